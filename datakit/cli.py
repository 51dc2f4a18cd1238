"""The `datakit` command: text to token stores, and what is in them."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from datakit import archive_verbs, convert_verb, store_verbs
from threefold.cli import Parser, log, print_json, print_line, run
from threefold.console import live, print_table
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, CheckFailed, UserError

if TYPE_CHECKING:
    from datakit.store.tags import Tag

INPUT_HELP = (
    "files, folders, globs or URLs of such, of .jsonl, .ndjson, .json (one object a line) or .txt, plain, .gz, .zst, "
    ".xz or .bz2, and of .parquet or .arrow; - is jsonl from standard input; pipes are copied to $TMPDIR first"
)
STORED_HELP = "a store or an archive, in a folder, on s3:// or at any fsspec URL"
DEFAULT_EOD = "<|endoftext|>"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; gives its exit code."""
    return run(build_parser(), argv)


def build_parser() -> Parser:
    """The command line of all verbs."""
    parser = Parser(prog="datakit", description="Text corpus to token store.")
    verbs = parser.add_subparsers()

    train = verbs.add_parser("train-tokenizer", help="train a byte-level BPE tokenizer", description=_train.__doc__)
    _add_input_flags(train)
    train.add_argument("--vocab-size", type=int, required=True, metavar="N", help="tokens in the vocabulary")
    train.add_argument("--output", required=True, metavar="FILE", help="tokenizer.json to write")
    train.set_defaults(handler=_train)

    make = verbs.add_parser("preprocess", help="make a token store of text", description=_preprocess.__doc__)
    _add_input_flags(make)
    make.add_argument(
        "--output", required=True, metavar="STORE", help="folder or URL of the store; a rerun continues in it"
    )
    make.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="tokenizer.json, sentencepiece .model or .tiktoken"
    )
    make.add_argument(
        "--tokenizer-backend",
        choices=["auto", "gigatoken", "tokenizers", "sentencepiece", "tiktoken"],
        default="auto",
        help="engine that tokenizes; auto takes the fastest that gives the same ids on a probe of the input",
    )
    make.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    make.add_argument("--skip-empty", action="store_true", help="leave out documents of nothing but white space")
    make.add_argument("--max-chars", type=int, metavar="N", help="leave out documents of more characters than this")
    make.add_argument(
        "--split",
        type=_fractions,
        metavar="A,B",
        help="put fractions of the documents, by a hash of their text, into STORE/train and STORE/valid",
    )
    make.add_argument(
        "--dedup",
        action="store_true",
        help="keep of all documents of equal text the first; reads the input twice",
    )
    make.add_argument(
        "--tag",
        action="append",
        type=_tag,
        dest="tags",
        metavar="NAME=GLOB",
        help="name a part of the input, a folder or glob of files, for stats and inspect; the first match counts",
    )
    make.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    make.add_argument("--engine", choices=["local", "ray"], default="local", help="processes here, or actors on Ray")
    make.add_argument(
        "--ray-address",
        default=os.environ.get("RAY_ADDRESS"),
        metavar="HOST:PORT",
        help="the Ray cluster; default: $RAY_ADDRESS, or one that is started here",
    )
    make.add_argument(
        "--item-size",
        type=_size,
        metavar="SIZE",
        help="input of one work item, like 64MiB; default: 256MiB, less for small inputs",
    )
    make.add_argument("--json", action="store_true", help="print the summary as JSON")
    make.set_defaults(handler=_preprocess)

    inspect = verbs.add_parser("inspect", help="say what a store or archive holds", description=_inspect.__doc__)
    inspect.add_argument("store", metavar="STORE", help=STORED_HELP)
    store_verbs.add_excerpt_flags(inspect)
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(handler=_inspect)

    check = verbs.add_parser("verify", help="check every byte of a store or archive", description=_verify.__doc__)
    check.add_argument("store", metavar="STORE", help=STORED_HELP)
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(handler=_verify)
    store_verbs.add_stats(verbs)
    store_verbs.add_merge(verbs)
    convert_verb.add_convert(verbs)
    store_verbs.add_diff(verbs)
    archive_verbs.add_archive(verbs)
    archive_verbs.add_unarchive(verbs)
    return parser


def _add_input_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT_HELP)
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="KEY,...",
        help="key (parquet, arrow: column) of the text, a.b for b inside a; several texts are joined by blank lines",
    )
    parser.add_argument("--txt-split", choices=["file", "line"], default="file", help="what is a document in .txt")
    parser.add_argument("--skip-invalid", action="store_true", help="skip documents that cannot be read or tokenized")
    parser.add_argument("--eod-token", default=DEFAULT_EOD, metavar="TOKEN", help="the end-of-document token")


def _train(arguments: argparse.Namespace) -> int:
    """Train a byte-level BPE tokenizer on all documents of the input; the end-of-document token is its token 0."""
    from datakit.tokenization.tokenizer_training import train_tokenizer

    tokenizer = train_tokenizer(
        arguments.inputs,
        arguments.output,
        vocab_size=arguments.vocab_size,
        eod_token=arguments.eod_token,
        text_key=arguments.text_key,
        txt_split=arguments.txt_split,
        skip_invalid=arguments.skip_invalid,
        report=log,
    )
    if tokenizer.vocab_size < arguments.vocab_size:
        log(f"the text gave {tokenizer.vocab_size} tokens, not {arguments.vocab_size}: more text would give more")
    log(f"wrote {arguments.output}: {tokenizer.vocab_size} tokens, fingerprint {tokenizer.fingerprint}")
    return EXIT_OK


def _preprocess(arguments: argparse.Namespace) -> int:
    """Make a token store of all documents of the input. The bytes are the same with any number of workers, memory is
    flat in the size of the input, and the same command continues after a kill."""
    from datakit.preprocessing.preprocess import preprocess
    from datakit.preprocessing.recipe import Recipe

    recipe = Recipe(
        tokenizer=arguments.tokenizer,
        eod_token=arguments.eod_token,
        append_eod=arguments.append_eod,
        text_key=arguments.text_key,
        txt_split=arguments.txt_split,
        split=arguments.split,
        skip_invalid=arguments.skip_invalid,
        skip_empty=arguments.skip_empty,
        max_chars=arguments.max_chars,
        tags=tuple(arguments.tags or ()),
        dedup=arguments.dedup,
    )
    with live() as shown:
        summary = preprocess(
            arguments.inputs,
            arguments.output,
            recipe,
            num_workers=arguments.workers,
            backend=arguments.tokenizer_backend,
            engine=arguments.engine,
            ray_address=arguments.ray_address,
            item_bytes=arguments.item_size,
            report=shown.say,
            progress=shown.show,
        )
    if arguments.json:
        print_json(asdict(summary))
        return EXIT_OK
    if summary.skipped:
        print(f"skipped {_counts(summary.skipped)}")
    if summary.num_replaced:
        print(f"replaced lone surrogates by U+FFFD in {summary.num_replaced:,} documents")
    for store in summary.stores:
        print_line(
            f"{store.path}: {store.num_documents:,} documents, {store.num_tokens:,} tokens, {store.num_shards} shards"
        )
    print(
        f"{summary.num_documents:,} documents, {summary.num_tokens:,} tokens; {summary.input_bytes / 1e6:,.1f} MB in "
        f"{summary.elapsed_s:.1f} s, {summary.mb_per_s:.1f} MB/s, {summary.tokens_per_s:,.0f} tokens/s"
    )
    return EXIT_OK


def _inspect(arguments: argparse.Namespace) -> int:
    """Say what a token store or an archive holds, or show one of a store's documents or samples and where it came
    from."""
    from datakit.archives.store_source import StoreSource
    from datakit.store.manifest import is_plain_folder
    from datakit.store.token_store import TokenStore

    place = arguments.store
    if store_verbs.asks_for_excerpt(arguments):
        if not is_plain_folder(place):
            raise UserError(
                f"{place} is no store in a local folder: its documents and samples cannot be shown",
                hint=f"datakit unarchive {place} --output STORE",
            )
        return store_verbs.inspect_excerpt(arguments)
    if is_plain_folder(place):
        store = TokenStore.open(place)
        path, manifest, record = str(store.path), store.manifest, None
    else:
        source = StoreSource.open(place)
        path, manifest, record = source.storage.url, source.manifest, source.record
    found: dict[str, object] = {
        "path": path,
        "num_documents": manifest.num_documents,
        "num_tokens": manifest.num_tokens,
        "dtype": manifest.dtype,
        "fingerprint": manifest.fingerprint,
        "tokenizer": asdict(manifest.tokenizer),
        "settings": manifest.settings,
        "skipped": manifest.skipped,
        "shards": [asdict(shard) for shard in manifest.shards],
    }
    if record:
        sizes = {"frame_bytes": record.frame_bytes, "packed_bytes": record.packed_bytes}
        found["archive"] = {"level": record.level, **sizes}
    if arguments.json:
        print_json(found)
        return EXIT_OK
    tokenizer = manifest.tokenizer
    print_line(f"{path}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, {manifest.dtype}")
    if record:
        print(f"archive      {record.packed_bytes / 1e6:,.1f} MB, zstd level {record.level}")
    print(f"fingerprint  {manifest.fingerprint}")
    print(f"tokenizer    {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint}")
    print(f"end token    {tokenizer.eod_token!r} = {tokenizer.eod_id}")
    print_line("settings     " + ", ".join(f"{name}={value}" for name, value in manifest.settings.items()))
    if manifest.skipped:
        print(f"skipped      {_counts(manifest.skipped)}")
    print(f"shards       {len(manifest.shards)}")
    rows = [(shard.name, f"{shard.num_documents:,}", f"{shard.num_tokens:,}") for shard in manifest.shards]
    print_table(("shard", "documents", "tokens"), rows, left={"shard"})
    return EXIT_OK


def _verify(arguments: argparse.Namespace) -> int:
    """Check every byte of a store or an archive against its manifest, and name what is damaged: the files and in a
    local store their documents, in an archive the frames."""
    from datakit.reports.verification import Fault, verify
    from datakit.store.manifest import ARCHIVE_NAME, FILE_NAME

    try:
        faults = verify(arguments.store)
    except CheckFailed as error:  # without sound records nothing else can be checked
        if arguments.json:
            record = os.path.join(arguments.store, ARCHIVE_NAME if f"/{ARCHIVE_NAME}" in error.message else FILE_NAME)
            print_json({"ok": False, "faults": [asdict(Fault(record, error.message))]})
        raise
    if arguments.json:
        print_json({"ok": not faults, "faults": [asdict(fault) for fault in faults]})
    elif not faults:
        print(f"{arguments.store}: all checksums hold")
    for fault in faults:
        log(f"error: {fault}")
    if faults:
        log("hint: restore these files from a copy, or make them anew in another place")
    return EXIT_CHECK_FAILED if faults else EXIT_OK


def _counts(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())


def _fractions(text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of fractions like 0.99,0.01") from None
    return first, second


def _tag(text: str) -> "Tag":
    from datakit.store.tags import Tag

    try:
        return Tag.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    number = text.rstrip("KMGiB")
    unit = text[len(number) :]
    if not number.isdecimal() or unit not in units or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 64MiB")
    return int(number) * units[unit]
