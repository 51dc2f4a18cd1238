"""`datakit merge`: make one store of several."""

import sys
from dataclasses import dataclass

from datakit.commands.shared import Linking, print_store
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Linking):
    """Options of `datakit merge`."""

    stores: tuple[str, ...] = argument("STORE", "stores of one tokenizer, in this order")
    output: str = option(..., "folder or URL of the store; a rerun continues in it", metavar="STORE")


def run(options: Options) -> None:
    """Make one store of all shards of some stores, in the order given, without tokenizing again; documents keep their
    sources.
    """
    from datakit.store.merging import merge

    store = merge(options.stores, options.output, copy=options.copy)
    if {"append_eod"} & {name for part in store.manifest.settings["merged"] for name in part["settings"]}:
        print(
            "warning: documents of some of these stores end with a token of their own, others do not", file=sys.stderr
        )
    print_store(store, options)
