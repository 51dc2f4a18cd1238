"""`datakit convert`: others' tokenized datasets to a store, and to Megatron's."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from datakit.commands.shared import Linking, print_store
from threefold.errors import UserError
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Linking):
    """Options of `datakit convert`."""

    sources: tuple[str, ...] = argument(
        "SOURCE", "prefixes of PREFIX.bin and PREFIX.idx, .ds files, folders of .ds, MDS or litdata; or a store"
    )
    to: Literal["store", "megatron"] = option("store", "what to make")
    source_format: Literal["megatron", "datatrove", "mds", "litdata"] | None = option(
        None, "what the sources are, else found out", flag="--from"
    )
    output: str = option(..., "folder or URL to make; a rerun continues in it", metavar="DIR")
    tokenizer: str | None = option(
        None,
        "the tokenizer that made the datasets, for --to store; else a store's own, if they are its shards",
        metavar="FILE",
    )
    eod_token: str | None = option(None, "its end-of-document token, else <|endoftext|>", metavar="TOKEN")
    documents: Literal["auto", "items", "eod"] = option(
        "auto",
        "items: one document a sample of the source; eod: samples are joined and cut after the end-of-document "
        "token; auto: eod if samples look packed out of a stream, else items",
    )
    column: str | None = option(None, "column (mds) or leaf (litdata) of the tokens, if not the only", metavar="NAME")
    dtype: str | None = option(None, "of the tokens if the source does not say, like int64", metavar="DTYPE")


def run(options: Options) -> None:
    """Make a store of datasets of Megatron, datatrove, MosaicML streaming (mds) or litdata without tokenizing again,
    every token checked; or Megatron's indexed datasets of a store's shards. Megatron's files are linked or copied as
    they are, the others' tokens written again.
    """
    if options.to == "store":
        _convert_to_store(options)
        return
    from datakit.files.durable import url_behind
    from datakit.foreign.megatron import to_megatron

    into_store = ("tokenizer", "eod_token", "source_format", "column", "dtype")
    if len(options.sources) != 1 or any(getattr(options, name) for name in into_store) or options.documents != "auto":
        raise UserError(
            "--to megatron takes one store and no tokenizer", hint="datakit convert STORE --to megatron --output DIR"
        )
    paths = to_megatron(options.sources[0], options.output, copy=options.copy)
    prefixes = [url_behind(path) or str(path) for path in paths]
    options.show({"path": options.output, "prefixes": prefixes}, *prefixes)


def kept_beside(source: str) -> str | None:
    """Return the folder of a source that is a shard of a store which keeps its tokenizer; None if it is not."""
    from datakit.format.manifest import FILE_NAME, Manifest

    folder = Path(source).parent
    return str(folder) if (folder / FILE_NAME).is_file() and Manifest.read(folder).tokenizer_files else None


def _convert_to_store(options: Options) -> None:
    from datakit.foreign.conversion import convert_to_store
    from datakit.foreign.foreign_store import Choices
    from datakit.tokenization.tokenizer import DEFAULT_EOD

    tokenizer = options.tokenizer or kept_beside(options.sources[0])
    if tokenizer is None:
        raise UserError("a store needs the tokenizer that made its tokens", hint="--tokenizer FILE")
    choices = Choices(tokenizer, options.eod_token or DEFAULT_EOD, options.documents, options.column, options.dtype)
    store = convert_to_store(
        options.sources, options.output, choices, source_format=options.source_format, copy=options.copy
    )
    if store.manifest.settings.get("documents") == "eod":
        print(
            f"one stream, cut after each {store.manifest.tokenizer.eod_token}; --documents items keeps the samples",
            file=sys.stderr,
        )
    print_store(store, options)
