"""Claim: hold an output while it is made, alone, of what its note says; killed, the same call continues.

The note is put before any file and goes last. One run at a time works on a local output. Behind a URL the lock excludes
runs of one machine alone; runs of several make the same bytes, as their note is put once and refuses all others.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from datakit.files.durable import writing
from datakit.format.output import LOCK, Output
from threefold.claim import take_lock
from threefold.errors import StorageError, UserError, quoted
from threefold.scratch import is_kept
from threefold.storage.folders import make_folders

PATIENCE_S = 5.0  # a killed run's workers let go of its lock within a moment


@contextmanager
def claim(
    output: Output,
    made_of: dict[str, Any] | None = None,
    *,
    keeps: tuple[type[UserError], ...] = (StorageError,),
    patience_s: float = 0.0,
) -> Iterator[Output]:
    """Hold an output that is empty or was begun from the same; raise UserError if it holds anything else.

    `made_of` is JSON of all that decides the output's bytes, None if the caller calls `Output.begin`. Kills and faults
    of the kinds in `keeps` leave the output to be continued, if anything was made; any other UserError empties it.
    """
    output.check_free()
    with writing(output.work):
        make_folders(output.work)
        output.lock = os.open(output.work / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take_lock(output.lock, output.work / LOCK, output.place, patience_s)
        output.remove_leftovers()
        try:
            if made_of is not None:
                note = output.begin(made_of)
                if note.made_of != orjson.loads(orjson.dumps(made_of)):
                    raise UserError(
                        f"{output.place} was begun from other sources or in another way{note.by}",
                        hint="rerun the command it was begun with, or choose another --output",
                    )
            yield from _made(output, keeps)
        finally:
            if not is_kept(output.scratch):
                output.remove_unbegun()
    finally:
        os.close(output.lock)


def _made(output: Output, keeps: tuple[type[UserError], ...]) -> Iterator[Output]:
    try:
        with writing(output.scratch):
            output.scratch.mkdir(parents=True, exist_ok=True)
        yield output
    except keeps:
        # there a note without anything would refuse all others; a file that comes later, without one, this run too
        if output.folder is None and not output.may_grow and not output.holds_any():
            output.abandon()
        raise
    except UserError:  # what it is made of does not do: the output is free for another try
        output.abandon()
        raise


def _take_lock(descriptor: int, path: Path, place: str, patience_s: float) -> None:
    try:
        is_held = take_lock(descriptor, patience_s=patience_s)
    except OSError as error:  # some network and parallel file systems are mounted without locks
        raise StorageError(
            f"cannot lock {path}: {error.strerror}",
            hint="mount it with locks (Lustre: -o flock), or choose another --output",
        ) from error
    if not is_held:
        raise StorageError(f"another run is writing {place}", hint=f"lsof {quoted(path)}")
    if not os.fstat(descriptor).st_nlink:
        raise StorageError(f"another run has just completed {place}", hint=f"datakit inspect {quoted(place)}")
