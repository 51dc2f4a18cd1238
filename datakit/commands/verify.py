"""`datakit verify`: check every byte of a store, an archive or a packing index."""

import os
from dataclasses import asdict, dataclass

from datakit.commands.shared import OfStored
from threefold.cli import log, print_json
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, CheckFailed


@dataclass(frozen=True, kw_only=True)
class Options(OfStored):
    """Options of `datakit verify`."""


def run(options: Options) -> int:
    """Check every byte of a store, an archive or a packing index against its manifest, and name what is damaged: the
    files and in a local store their documents, in an archive the frames.
    """
    from datakit.format.manifest import ARCHIVE_NAME, FILE_NAME
    from datakit.reports.verification import Fault, verify
    from datakit.rows.packed_rows import RECORD_NAME

    try:
        faults = verify(options.store)
    except CheckFailed as error:  # without sound records nothing else can be checked
        if options.json:
            names = (name for name in (ARCHIVE_NAME, RECORD_NAME) if f"/{name}" in error.message)
            fault = Fault(os.path.join(options.store, next(names, FILE_NAME)), error.message)
            print_json({"ok": False, "faults": [asdict(fault)]})
        raise
    if options.json:
        print_json({"ok": not faults, "faults": [asdict(fault) for fault in faults]})
    elif not faults:
        print(f"{options.store}: all checksums hold")
    for fault in faults:
        log(f"error: {fault}")
    if faults:
        log("hint: restore these files from a copy, or make them again in another place")
    return EXIT_CHECK_FAILED if faults else EXIT_OK
