"""`datakit archive`: compress a store into a folder or a URL."""

from dataclasses import asdict, dataclass

from datakit.commands.shared import PLACE_HELP, Reporting, default_workers
from threefold.cli import log
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `datakit archive`."""

    store: str = argument("STORE", "a store in a local folder")
    output: str = option(..., f"{PLACE_HELP}; a rerun continues there", metavar="PLACE")
    level: int = option(3, "zstd level, from 1 (fast) to 19 (small)", metavar="N")
    workers: int = option(
        default_workers, "threads, each on a file of its own; on S3 each holds up to 100 MB", metavar="N"
    )


def run(options: Options) -> None:
    """Compress each file of a token store as seekable zstd into a folder or object storage: any zstd tool decompresses
    them, and ranges can be read without the rest. Every byte is checked against the store's manifest. The bytes are the
    same with any number of workers, and the same command continues after a kill.
    """
    from datakit.store.archiving import archive

    summary = archive(options.store, options.output, level=options.level, num_workers=options.workers, report=log)
    kept = f", {summary.num_kept} of them kept" * (summary.num_kept > 0)
    options.show(
        asdict(summary),
        f"{summary.path}: {summary.num_files} files{kept}, {summary.size_bytes / 1e6:,.1f} MB in "
        f"{summary.packed_bytes / 1e6:,.1f} MB",
    )
