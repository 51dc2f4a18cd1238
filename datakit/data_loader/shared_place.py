"""Where the next iteration of a dataset begins, for the process that owns it and the workers that it has started.

A worker has a copy of the dataset of its own. What follows is known on both sides, whichever way workers are started:
the cursor that the owner has loaded since, that workers have read, and that they went on from states of their own.
"""

import json
from ctypes import c_char, c_int64
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

CURSOR_OWNER, READ_OWNER, RESUMED_OWNER = range(3)
CURSOR_BYTES = 1024  # what a cursor is at most


class SharedPlace:
    """Memory that a process shares with its workers; `owner` is the id of that process.

    Ranks that were forked share the memory too, and each writes under its own id. Pickled for a process that is being
    started it is shared with that one, otherwise the copy is new.
    """

    def __init__(self) -> None:
        self._owners: Any = RawArray(c_int64, 3)
        self._cursor: Any = RawArray(c_char, CURSOR_BYTES)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) if get_spawning_popen() is not None else {"new": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "new" in state:
            self.__init__()  # type: ignore[misc]
        else:
            vars(self).update(state)

    def begin_at(self, cursor: dict[str, Any], owner: int) -> None:
        """Let each iteration begin at a cursor; what workers did before no longer counts."""
        self._owners[CURSOR_OWNER] = 0
        self._cursor.value = json.dumps(cursor).encode()
        self._owners[CURSOR_OWNER] = owner
        self._clear(RESUMED_OWNER, owner)
        self._clear(READ_OWNER, owner)

    def cursor(self, owner: int) -> dict[str, Any] | None:
        """Return the cursor at which an iteration begins; None if `begin_at` was not called."""
        return dict(json.loads(self._cursor.value)) if self._owners[CURSOR_OWNER] == owner else None

    def note_reader(self, owner: int, *, is_worker: bool) -> None:
        """Note who reads from now on: the owner, or workers."""
        if is_worker:
            self._owners[READ_OWNER] = owner
        else:
            self._clear(READ_OWNER, owner)

    def is_read_by_workers(self, owner: int) -> bool:
        """Return whether workers read last, and not the owner."""
        return bool(self._owners[READ_OWNER] == owner)

    def note_resumed(self, owner: int) -> None:
        """Note that a worker goes on from a state of its own, of which the owner knows nothing."""
        self._owners[RESUMED_OWNER] = owner

    def is_resumed_by_workers(self, owner: int) -> bool:
        """Return whether workers went on from states of their own since the owner set a start."""
        return bool(self._owners[RESUMED_OWNER] == owner)

    def _clear(self, name: int, owner: int) -> None:
        if self._owners[name] == owner:
            self._owners[name] = 0
