"""Spool: what comes through a pipe, copied to a file first, as work items are cut from files and may be read twice.

The file is under $TMPDIR and has no name: it goes with the process that made it, whatever ends that. Workers open it
through /proc while that process lives.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from datakit.files.durable import temporary_folder, writing
from threefold.errors import StorageError, quoted

STANDARD_INPUT = "-"
_READ_BYTES, _REPORT_INTERVAL_S = 1 << 20, 2.0


@dataclass(frozen=True, slots=True)
class Spooled:
    """A copy of what came: a path to open while this process lives, its size and its XXH3-64."""

    path: str
    size_bytes: int
    xxh3_64: str


class Spool:
    """Copies pipes, one after the other, and keeps the copies."""

    def __init__(self, report: Callable[[str], None] = lambda _: None) -> None:
        """`report` takes a line on what is waited for, and lines of progress."""
        self._report = report
        self._files: list[Any] = []

    def copy(self, path: str) -> Spooled:
        """Read a pipe, or standard input where `path` is "-", to its end; StorageError if that or a write fails."""
        name = "standard input" if path == STANDARD_INPUT else path
        folder = temporary_folder()
        place = folder / "datakit-spool"  # what an error names; the file has no name
        self._report(f"waiting for {name}, which is copied to a file in {folder} first")
        with writing(place):
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the copy is needed
        self._files.append(file)
        checksum, size_bytes, reported_s = xxhash.xxh3_64(), 0, time.monotonic()
        try:
            descriptor = os.dup(0) if path == STANDARD_INPUT else os.open(path, os.O_RDONLY)
            with open(descriptor, "rb", buffering=0) as pipe:
                while block := pipe.read(_READ_BYTES):
                    with writing(place):
                        file.write(block)
                    checksum.update(block)
                    size_bytes += len(block)
                    if time.monotonic() - reported_s >= _REPORT_INTERVAL_S:
                        self._report(f"reading {name}: {size_bytes / 1e6:,.1f} MB so far")
                        reported_s = time.monotonic()
            with writing(place):
                file.flush()
        except OSError as error:
            raise StorageError(
                f"cannot read {name}: {error.strerror or error}",
                hint="name a file in place of -" if path == STANDARD_INPUT else f"ls -l {quoted(path)}",
            ) from error
        return Spooled(f"/proc/{os.getpid()}/fd/{file.fileno()}", size_bytes, checksum.hexdigest())


def is_pipe(path: str) -> bool:
    """Return whether a path names standard input, a pipe, or a device.

    What can be read once, and from the begin only.
    """
    return path == STANDARD_INPUT or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))
