"""The verbs of the `datakit` command that take stores to object storage and back, and what lies there."""

import argparse
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from threefold.cli import log, print_json, print_line
from threefold.errors import EXIT_OK

if TYPE_CHECKING:
    from datakit.store_verbs import Verbs

_MAX_DEFAULT_WORKERS = 8
_PLACE_HELP = "a folder, s3://bucket/prefix or any fsspec URL"


def add_archive(verbs: "Verbs") -> None:
    """Add the verb `archive`."""
    parser = verbs.add_parser("archive", help="compress a store into a folder or a URL", description=_archive.__doc__)
    parser.add_argument("store", metavar="STORE", help="a store in a local folder")
    parser.add_argument("--output", required=True, metavar="PLACE", help=f"{_PLACE_HELP}; a rerun continues there")
    parser.add_argument("--level", type=int, default=3, metavar="N", help="zstd level, from 1 (fast) to 19 (small)")
    _add_common_flags(parser, "threads, each on a file of its own; on S3 each holds up to 100 MB")
    parser.set_defaults(handler=_archive)


def add_unarchive(verbs: "Verbs") -> None:
    """Add the verb `unarchive`."""
    parser = verbs.add_parser(
        "unarchive", help="make a local store of an archive or of a store at a URL", description=_unarchive.__doc__
    )
    parser.add_argument("source", metavar="PLACE", help=f"an archive or a store: {_PLACE_HELP}")
    parser.add_argument("--output", required=True, metavar="STORE", help="folder of the store; a rerun continues in it")
    _add_common_flags(parser, "threads, each on a file of its own")
    parser.set_defaults(handler=_unarchive)


def _add_common_flags(parser: argparse.ArgumentParser, workers_help: str) -> None:
    num_workers = min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_WORKERS)
    parser.add_argument("--workers", type=int, default=num_workers, metavar="N", help=workers_help)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def _archive(arguments: argparse.Namespace) -> int:
    """Compress each file of a token store as seekable zstd into a folder or object storage: any zstd tool decompresses
    them, and ranges can be read without the rest. Every byte is checked against the store's manifest. The bytes are the
    same with any number of workers, and the same command continues after a kill."""
    from datakit.archives.archiving import archive

    found = archive(arguments.store, arguments.output, level=arguments.level, num_workers=arguments.workers, report=log)
    if arguments.json:
        print_json(asdict(found))
    else:
        kept = f", {found.num_kept} of them kept" * (found.num_kept > 0)
        print_line(
            f"{found.path}: {found.num_files} files{kept}, {found.size_bytes / 1e6:,.1f} MB in "
            f"{found.packed_bytes / 1e6:,.1f} MB"
        )
    return EXIT_OK


def _unarchive(arguments: argparse.Namespace) -> int:
    """Make a local token store of an archive, or of a store that lies in a folder or on object storage. Every byte is
    checked against the manifest, and the same command continues after a kill."""
    from datakit.archives.unarchiving import unarchive
    from datakit.store_verbs import print_store

    store = unarchive(arguments.source, arguments.output, num_workers=arguments.workers, report=log)
    print_store(store, arguments.json)
    return EXIT_OK
