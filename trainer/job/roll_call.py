"""RollCall: ranks of one start of a job find each other in a store that outlives starts.

A launcher's store keeps what ranks of earlier starts left. torch numbers starts by the restarts of a node, which differ
between nodes: one whose ranks were ended for the fault of another counts none. So each rank draws a name, and
rank 0 answers the names that it sees. A rank belongs to the rank 0 that answered its own name, as one of an earlier
start answers no more.

    rank 1 leaves "name of 1: b7", and reads "name of 0: 3c", a rank 0 of before. Nobody answers b7 as 3c.
    rank 0 leaves "name of 0: e9", reads b7, and answers "e9 has b7". Both are of the start e9.
"""

import secrets

from torch.distributed import Store  # type: ignore[attr-defined]


class RollCall:
    """One rank's part of the call of a start."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        """Draw a name, and leave it."""
        self._store, self._rank, self._others = store, rank, range(1, world_size)
        self.name = secrets.token_hex(8)
        self._answered: dict[int, str] = {}
        store.set(name_of(rank), self.name)

    def start(self) -> str | None:
        """Return the name of the start, which is that of its rank 0; None if that has not answered."""
        if self._rank == 0:
            return self.name
        if not self._store.check([name_of(0)]):
            return None
        first = self._store.get(name_of(0)).decode()
        return first if self._store.check([_answer(first, self.name)]) else None

    def answer(self) -> None:
        """Answer the names that are new, on rank 0; a name of an earlier start is answered in vain."""
        for rank in self._others if self._rank == 0 else ():
            if self._store.check([name_of(rank)]):
                name = self._store.get(name_of(rank)).decode()
                if self._answered.get(rank) != name:
                    self._store.set(_answer(self.name, name), "")
                    self._answered[rank] = name


def name_of(rank: int) -> str:
    """Return the key of a rank's name."""
    return f"trainer/name of {rank}"


def _answer(first: str, name: str) -> str:
    return f"trainer/{first} has {name}"
