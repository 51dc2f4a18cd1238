"""DrawnOrder: who is next among ranks, what arrives late and who ends where, drawn from a seed that replays exactly."""

from hashlib import blake2b
from random import Random

CHANCES = (0.0, 0.05, 0.5)  # of a rank at a call to let others go first
DELAYS = (0, 2, 20, 200)  # of a message, in turns, at most
LATE = 0.25  # of messages


class DrawnOrder:
    """An order out of a seed; `death` is a rank and the number of the call at which it ends."""

    def __init__(self, seed: str, death: tuple[int, int] | None = None) -> None:
        self._random, self._death = Random(seed), death
        self._chance, self._most = self._random.choice(CHANCES), self._random.choice(DELAYS)
        self._is_first_come = self._random.random() < 0.2
        self._digest, self.num_choices = blake2b(digest_size=8), 0

    @property
    def trace(self) -> str:
        """Return the digest of all that was drawn until now."""
        return self._digest.hexdigest()

    def _noted(self, choice: int) -> int:
        self._digest.update(choice.to_bytes(4, "little"))
        self.num_choices += 1
        return choice

    def pick(self, num_ready: int) -> int:
        """Return which of the ranks that can go on does."""
        return self._noted(0 if self._is_first_come else self._random.randrange(num_ready))

    def lets_others(self, rank: int) -> bool:
        """Return whether a rank at a call lets others go first."""
        return bool(self._noted(self._random.random() < self._chance))

    def delay(self) -> int:
        """Return how many turns later a transfer arrives."""
        is_late = self._random.random() < LATE
        return self._noted(self._random.randint(0, self._most) if is_late else 0)

    def dies(self, rank: int, call: int) -> bool:
        """Return whether a rank ends at its call of this number."""
        return self._death == (rank, call)
