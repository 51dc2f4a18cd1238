"""`datakit unarchive`: make a local store of an archive or of a store at a URL."""

from dataclasses import dataclass

from datakit.commands.shared import PLACE_HELP, Reporting, default_workers, print_store
from threefold.cli import log
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `datakit unarchive`."""

    source: str = argument("PLACE", f"an archive or a store: {PLACE_HELP}")
    output: str = option(..., "folder of the store; a rerun continues in it", metavar="STORE")
    workers: int = option(default_workers, "threads, each on a file of its own", metavar="N")


def run(options: Options) -> None:
    """Make a local token store of an archive, or of a store in a folder or on object storage. Every byte is
    checked against the manifest, and the same command continues after a kill.
    """
    from datakit.store.archiving import unarchive

    print_store(unarchive(options.source, options.output, num_workers=options.workers, report=log), options)
