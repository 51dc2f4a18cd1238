"""`datakit preprocess`: make a token store of text."""

import os
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from datakit.commands.shared import OfInput, Reporting, counts_text
from threefold.console import live
from threefold.options import option


def _fractions(text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a pair of fractions like 0.99,0.01") from None
    return first, second


def _tag(text: str) -> Any:
    from datakit.format.tags import Tag

    return Tag.parse(text)


def _size(text: str) -> int:
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    number = text.rstrip("KMGiB")
    unit = text[len(number) :]
    if not number.isdecimal() or unit not in units or not int(number):
        raise ValueError(f"{text!r} is not a size like 64MiB")
    return int(number) * units[unit]


@dataclass(frozen=True, kw_only=True)
class Options(OfInput, Reporting):
    """Options of `datakit preprocess`."""

    output: str = option(..., "folder or URL of the store; a rerun continues in it", metavar="STORE")
    tokenizer: str = option(..., "tokenizer.json, sentencepiece .model or .tiktoken", metavar="FILE")
    tokenizer_backend: Literal["auto", "gigatoken", "tokenizers", "sentencepiece", "tiktoken"] = option(
        "auto", "engine that tokenizes; auto takes the fastest that has the same ids on a probe of the input"
    )
    append_eod: bool = option(False, "end every document with the end-of-document token")
    skip_empty: bool = option(False, "leave out documents of nothing but white space")
    max_chars: int | None = option(None, "leave out documents of more characters than this", metavar="N")
    split: tuple[float, float] | None = option(
        None,
        "put fractions of the documents, by a hash of their text, into STORE/train and STORE/valid",
        metavar="A,B",
        parse=_fractions,
    )
    dedup: bool = option(False, "keep of all documents of equal text the first; reads the input twice")
    tags: tuple[Any, ...] = option(
        (),
        "name a part of the input, a folder or glob of files, for stats and inspect; the first match counts",
        flag="--tag",
        metavar="NAME=GLOB",
        parse=_tag,
        repeats=True,
    )
    workers: int = option(lambda: len(os.sched_getaffinity(0)), "processes", metavar="N")
    engine: Literal["local", "ray"] = option("local", "processes here, or actors on Ray")
    ray_address: str | None = option(
        lambda: os.environ.get("RAY_ADDRESS"),
        "the Ray cluster; else $RAY_ADDRESS, or one that is started here",
        metavar="HOST:PORT",
    )
    item_size: int | None = option(
        None, "input of one work item, like 64MiB; else 256MiB, less for small inputs", metavar="SIZE", parse=_size
    )


def run(options: Options) -> None:
    """Make a token store of all documents of the input. The bytes are the same with any number of workers, memory is
    flat in the size of the input, and the same command continues after a kill.
    """
    from datakit.preprocessing.preprocess import preprocess
    from datakit.preprocessing.recipe import Recipe

    recipe = Recipe(**{key.name: getattr(options, key.name) for key in fields(Recipe) if hasattr(options, key.name)})
    with live() as shown:
        summary = preprocess(
            options.inputs,
            options.output,
            recipe,
            num_workers=options.workers,
            backend=options.tokenizer_backend,
            engine=options.engine,
            ray_address=options.ray_address,
            item_bytes=options.item_size,
            skip_unreadable=options.skip_unreadable,
            report=shown.say,
            progress=shown.show,
        )
    skipped = [f"skipped {counts_text(summary.skipped)}"] * bool(summary.skipped)
    replaced = f"replaced lone surrogates by U+FFFD in {summary.num_replaced:,} documents"
    stores = [
        f"{store.path}: {store.num_documents:,} documents, {store.num_tokens:,} tokens, {store.num_shards} shards"
        for store in summary.stores
    ]
    parts = zip(summary.stores, recipe.split, strict=True) if recipe.split else ()
    empty = [
        f"{store.path} has no document: of {summary.num_documents:,} none fell into its share, {share:g}"
        for store, share in parts
        if share and not store.num_documents
    ]
    options.show(
        asdict(summary),
        *skipped,
        *[replaced] * (summary.num_replaced > 0),
        *stores,
        *empty,
        f"{summary.num_documents:,} documents, {summary.num_tokens:,} tokens; {summary.input_bytes / 1e6:,.1f} MB in "
        f"{summary.elapsed_s:.1f} s, {summary.mb_per_s:.1f} MB/s, {summary.tokens_per_s:,.0f} tokens/s",
    )
