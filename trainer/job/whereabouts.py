"""Whereabouts: at which step each rank of a job is, and what it does there, for who waits for it in vain.

A thread of its own posts what the training thread noted last on the job's board: nothing of a step waits for that.
It also reads there that another rank ended by a fault: then this one, which may wait for it in a kernel, ends soon.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from threefold.errors import StorageError
from trainer.job.failure import leave, record
from trainer.job.rendezvous import Board

PERIOD_S, LEAST_PERIOD_S = 10.0, 0.2
ENDS_WITHIN_S, ENDED = 10.0, "a rank ended"  # after it was read on the board
LOST = "ranks are gone"  # on the board, without a word of theirs
POSTED = "last good step"  # on the board, by a rank that ends by a fault and has its part of it saved
STAGES = ("reads its batch", "trains", "agrees", "evaluates", "saves")  # of a step, in their order


class RankLost(StorageError):
    """Another rank did not come to a call that all make: it ended, hangs or is late."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a rank is: in a step and a stage of it, both as numbers."""

    step: int
    stage: int

    def __str__(self) -> str:
        return f"in step {self.step}, where it {STAGES[self.stage]}"


class Whereabouts:
    """The places of the ranks; `note` is the training thread's, which also asks `behind` before it gives up."""

    def __init__(self, board: Board, rank: int, *, timeout_s: float) -> None:
        """Begin to post; what others read is older by a tenth of `timeout_s` at most."""
        self._board, self._rank = board, rank
        self._period_s = max(min(PERIOD_S, timeout_s / 10), LEAST_PERIOD_S)
        self.place, self._posted = Place(0, 0), Place(-1, 0)
        self._over = threading.Event()
        self.before_leaving: Callable[[], object] = lambda: None
        threading.Thread(target=self._post_always, name="whereabouts", daemon=True).start()

    def note(self, step: int, stage: str) -> None:
        """Note that this rank is in a step, counted from 1, and in a stage of it."""
        self.place = Place(step, STAGES.index(stage))

    def behind(self, ranks: Sequence[int]) -> dict[int, Place | None]:
        """Return which of some ranks did not come as far as this one, and where they were; None if they never said."""
        places: dict[int, Place | None] = {}
        for rank in ranks:
            said = self._board.read(_key(rank)) if rank != self._rank else None
            place = Place(*json.loads(said)) if said else None
            if rank != self._rank and (place is None or place < self.place):
                places[rank] = place
        return places

    def post_end(self) -> None:
        """Post that this rank ends by a fault, which it reports."""
        self.close()
        self._board.post(ENDED, str(self._rank))

    @property
    def is_ended_by_another(self) -> bool:
        """Return whether another rank posted that."""
        return self._board.read(ENDED) not in (None, str(self._rank))

    def leave(self, text: str) -> NoReturn:
        """End this process now, from any thread: the training thread may wait for a rank that does not come."""
        lost = RankLost(text)
        record(lost)
        self.before_leaving()
        leave(lost.exit_code)

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    def _post_always(self) -> None:
        while not self._over.wait(self._period_s):
            place = self.place
            if place != self._posted:
                self._board.post(_key(self._rank), json.dumps([place.step, place.stage]))
                self._posted = place
            if self.is_ended_by_another and not self._over.wait(ENDS_WITHIN_S):
                self.leave("another rank ended by a fault, which it reported")


def _key(rank: int) -> str:
    return f"rank {rank} is at"
