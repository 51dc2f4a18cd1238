"""Claim: how an output is held while it is made, by a lock on this machine and by a note for all others.

The note says what the output is made of and which call put it. It is put before any file and goes last: killed, a call
with an equal note continues. The lock ends with its process, whatever ends that.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage
from threefold.storage.folders import Folder, local_root
from threefold.storage.local import local_failures

LOOK_S = 0.1  # between two tries at a lock


class Note(NamedTuple):
    """What an unfinished output is made of, and the call that noted it, "" where the note does not say."""

    made_of: dict[str, Any]
    call: str

    @classmethod
    def parse(cls, place: str, content: bytes, key: str) -> "Note":
        """Read the note at `place`, whose call is under a key beside what it is made of; CheckFailed if damaged."""
        try:
            made_of = dict(orjson.loads(content))
        except (TypeError, ValueError) as error:
            raise CheckFailed(f"{place} is damaged: {error!r}", hint="choose another --output") from None
        return cls(made_of, str(made_of.pop(key, "")))

    @property
    def by(self) -> str:
        """The call for a message, "" if it is not known."""
        return f" by run {self.call}" if self.call else ""

    def encode(self, key: str) -> bytes:
        """Return the content of a note's file."""
        return orjson.dumps(self.made_of | {key: self.call})


def this_process() -> str:
    """Return the machine and number of this process, for a note."""
    return f"{socket.gethostname()}:{os.getpid()}"


def this_call() -> str:
    """Return a name that no other call has, of this process or another, for a note."""
    return f"{this_process()}:{secrets.token_hex(4)}"


def take_lock(descriptor: int, *, is_shared: bool = False, patience_s: float = 0.0) -> bool:
    """Lock an open file or folder until it is closed; return whether it is locked, False if another process holds it.

    Those that share a lock hold it together. OSError where the file system has no locks.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(LOOK_S)
        else:
            return True


@contextlib.contextmanager
def folder_held(storage: Storage, inner: str, *, is_shared: bool) -> Iterator[None]:
    """Hold a folder of a local disk; UserError if another process does. Where there are no locks, nothing is held.

    Several processes may hold it if all of them share it. Of the folders that this makes those stay that hold something
    at the end.
    """
    root = local_root(storage)
    if root is None:
        yield
        return
    new = [each for each in (root / inner, root / os.path.dirname(inner), root) if not each.exists()]
    with local_failures("lock", root / inner), Folder(root, inner, make=True) as folder:
        descriptor = folder.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        is_held = True
        with contextlib.suppress(OSError):
            is_held = take_lock(descriptor, is_shared=is_shared)
        if not is_held:
            raise UserError(
                f"another process writes the same into {storage.url}/{inner}",
                hint="wait until it ends, then run this again",
            )
        yield
    finally:
        os.close(descriptor)
        for each in new:
            with contextlib.suppress(OSError):
                each.rmdir()
