"""Tail: the lines of a metrics file on any storage as they come, of a long one from near its end on."""

import json
from collections.abc import Iterator
from typing import Any

from threefold.errors import StorageError, listing
from threefold.storage import open_storage

FIRST_BYTES = 4 << 20  # of what is there already


class Tail:
    """Reads what was added to a file since the last look; one that a resume cut back is read from near its end again.

    Cost: a request for the size a look, and one for the bytes that are new.
    """

    def __init__(self, place: str, *, first_bytes: int = FIRST_BYTES) -> None:
        """Open the file's folder; UserError if the file is not there."""
        folder, slash, self._key = place.rpartition("/")
        self.place, self._first_bytes = place, first_bytes
        self._storage = open_storage(folder or ("/" if slash else "."))
        self._at, self._rest, self._is_begun = 0, b"", False
        if self._storage.info(self._key) is None:
            hint = listing(place) if "://" not in place else "trainer train ... --metrics FILE"
            raise StorageError(f"no metrics file {place}", hint=hint)

    def read(self) -> list[dict[str, Any]]:
        """Return the whole lines that are new; none while a resume puts a file in place of another."""
        info = self._storage.info(self._key)
        if info is None:
            return []
        size = info.size_bytes
        is_inside = False
        if not self._is_begun or size < self._at:
            self._at, self._rest, self._is_begun = max(size - self._first_bytes, 0), b"", True
            is_inside = self._at > 0
        if size == self._at:
            return []
        [data] = self._storage.read_ranges(self._key, [(self._at, size)])
        self._at = size
        *lines, self._rest = (self._rest + bytes(data)).split(b"\n")
        return list(parsed(lines[1:] if is_inside else lines))


def parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yield lines that are of a metrics file; others are left out."""
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            yield value
