"""The verb `convert` of the `datakit` command: other programs' tokenized datasets to stores, stores to Megatron's."""

import argparse
import sys
from typing import TYPE_CHECKING

from datakit.store_verbs import add_copy_flag, print_store
from threefold.cli import print_json
from threefold.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    from datakit.store_verbs import Verbs


def add_convert(verbs: "Verbs") -> None:
    """Add the verb `convert`."""
    parser = verbs.add_parser(
        "convert", help="others' tokenized datasets to a store, and to Megatron's", description=_convert.__doc__
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="prefixes of PREFIX.bin and PREFIX.idx, .ds files, folders of .ds, MDS or litdata; or a store",
    )
    parser.add_argument("--to", choices=["store", "megatron"], default="store", help="what to make")
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=["megatron", "datatrove", "mds", "litdata"],
        help="what the sources are, else found out",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make; a rerun continues in it")
    parser.add_argument("--tokenizer", metavar="FILE", help="the tokenizer that made the datasets; for --to store")
    parser.add_argument("--eod-token", metavar="TOKEN", help="its end-of-document token, else <|endoftext|>")
    parser.add_argument(
        "--documents",
        choices=["auto", "items", "eod"],
        default="auto",
        help="items: one document a sample of the source; eod: samples are joined and cut after the end-of-document "
        "token; auto: eod where samples look packed out of a stream, else items",
    )
    parser.add_argument(
        "--column", metavar="NAME", help="column (mds) or leaf (litdata) of the tokens, if not the only"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="of the tokens where the source does not tell, like int64")
    add_copy_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(handler=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    """Make a store of datasets of Megatron, datatrove, MosaicML streaming (mds) or litdata without tokenizing again,
    every token checked; or Megatron's indexed datasets of a store's shards. Megatron's files are linked or copied as
    they are, the others' tokens written anew."""
    if arguments.to == "store":
        return _convert_to_store(arguments)
    from datakit.foreign.megatron import to_megatron

    into_store = ("tokenizer", "eod_token", "source_format", "column", "dtype")
    asked = [name for name in into_store if getattr(arguments, name)] + ["documents"] * (arguments.documents != "auto")
    if len(arguments.sources) != 1 or asked:
        raise UserError(
            "--to megatron takes one store and no tokenizer", hint="datakit convert STORE --to megatron --output DIR"
        )
    prefixes = [str(prefix) for prefix in to_megatron(arguments.sources[0], arguments.output, copy=arguments.copy)]
    if arguments.json:
        print_json({"path": arguments.output, "prefixes": prefixes})
    else:
        print(*prefixes, sep="\n")
    return EXIT_OK


def _convert_to_store(arguments: argparse.Namespace) -> int:
    from datakit.foreign.conversion import convert_to_store
    from datakit.foreign.foreign_store import Choices
    from datakit.tokenization.tokenizer import DEFAULT_EOD

    if not arguments.tokenizer:
        raise UserError("a store needs the tokenizer that made its tokens", hint="--tokenizer tok.json")
    choices = Choices(
        arguments.tokenizer,
        arguments.eod_token or DEFAULT_EOD,
        arguments.documents,
        arguments.column,
        arguments.dtype,
    )
    store = convert_to_store(
        arguments.sources, arguments.output, choices, source_format=arguments.source_format, copy=arguments.copy
    )
    if store.manifest.settings.get("documents") == "eod":
        print(
            f"one stream, cut after each {store.manifest.tokenizer.eod_token}; --documents items keeps the samples",
            file=sys.stderr,
        )
    print_store(store, arguments.json)
    return EXIT_OK
