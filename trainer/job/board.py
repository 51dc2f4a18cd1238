"""Board: notes that the ranks of a job leave for each other in its store, for what they cannot agree on together."""

from contextlib import suppress
from typing import Protocol


class Store(Protocol):
    """What a job needs of torch's store."""

    def set(self, key: str, value: str) -> object: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...


class Board:
    """Notes by key; one that cannot be left or read is as if it were not there. Any thread may use it."""

    def __init__(self, store: Store | None) -> None:
        """Use the store of a job; a process alone has none, and nobody to leave notes for."""
        self._store = store

    def post(self, key: str, text: str) -> None:
        """Leave a note, in place of one under the same key."""
        with suppress(RuntimeError):  # the process that has the store is gone
            if self._store is not None:
                self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """Return a note that is there; does not wait for one."""
        with suppress(RuntimeError):
            if self._store is not None and self._store.check([key]):
                return self._store.get(key).decode()
        return None
