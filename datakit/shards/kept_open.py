"""KeptOpen: what a store keeps open of its shards, within one bound for all stores of the process.

The least recently used goes first, whichever store it is of. Takes no lock, so a fork at any moment leaves it usable:
each step on the shared order is a single operation, and two threads that open the same shard at once do no harm.
"""

import errno
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import ref

from threefold.errors import StorageError

Key = TypeVar("Key")
Value = TypeVar("Value")
_LIMITS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # of memory that can be addressed, and of open files


class Bound:
    """How many values all `KeptOpen` of one kind may keep together, and the order in which they were used."""

    def __init__(self, most: int) -> None:
        self.most = most
        # of a KeptOpen that is gone the entries stay until they are the oldest: never used again, they soon are
        self._order: OrderedDict[tuple[ref[KeptOpen[Any, Any]], Any], None] = OrderedDict()

    def used(self, owner: "ref[KeptOpen[Any, Any]]", name: Any) -> None:
        """Note that a value was used, and drop the oldest beyond the bound."""
        order, key = self._order, (owner, name)
        try:
            order.move_to_end(key)
        except KeyError:
            order[key] = None
            if len(order) > self.most:
                self.shrink(self.most)

    def halve(self) -> bool:
        """Drop half of all values, the oldest; False where nothing is kept."""
        return self.shrink(len(self._order) // 2)

    def drop_oldest(self) -> bool:
        """Drop the value that was not used for the longest time; False where nothing is kept."""
        return self.shrink(len(self._order) - 1)

    def shrink(self, most: int) -> bool:
        """Drop the oldest until at most so many are kept; False where nothing was."""
        is_any = bool(self._order)
        with suppress(KeyError):  # another thread has just dropped the last one
            while len(self._order) > most:
                (owner, name), _ = self._order.popitem(last=False)
                if (values := owner()) is not None:
                    values.drop(name)
        return is_any


class KeptOpen(Generic[Key, Value]):
    """The open values of one store, by the number of a shard, say; safe to use from several threads."""

    def __init__(self, bound: Bound) -> None:
        self._bound, self._ref = bound, ref(self)
        self._values: dict[Key, Value] = {}

    def get(
        self, key: Key, open_value: Callable[[Key], Value], keeps: Callable[[Value], bool] = lambda _: True
    ) -> Value:
        """Return the value of a key, opened if it is not kept; one that `keeps` refuses is the caller's alone.

        If the address space is full, for instance by `ulimit -v`, or too many files are open, what is kept makes room
        for it.
        """
        value = self._values.get(key)
        while value is None:
            try:
                value = open_value(key)
            except StorageError as error:
                if getattr(error.__cause__, "errno", None) not in _LIMITS or not self._bound.halve():
                    raise
            else:
                if not keeps(value):
                    return value
                self._values[key] = value
        self._bound.used(self._ref, key)
        return value

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def drop(self, key: Key) -> None:
        """Keep this value no longer; whoever uses it still may."""
        self._values.pop(key, None)

    def __len__(self) -> int:
        return len(self._values)
