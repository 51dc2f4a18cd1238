"""Backoff: the pauses between tries at what may pass, or between looks for what may come.

A pause is `first_s` plus a share, `growth`, of the time paused so far. With the growth of 1 each pause is twice the
last: 0.2, 0.4, 0.8, ... seconds. With 1/8 it is 9/8 of the last.
"""

import math
import random
import time
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """The pauses of one piece of work; the thread that does the work owns it.

    `jitter` is the share by which a pause may be shorter or longer, at random. At most `max_tries` tries are made, and
    no pause ends later than `within_s` after the Backoff was made.
    """

    first_s: float
    max_s: float = math.inf
    growth: float = 1.0
    jitter: float = 0.0
    max_tries: float = math.inf
    within_s: float = math.inf
    num_tries: int = field(default=1, init=False)
    _paused_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._made_s = time.monotonic()

    def after(self, waited_s: float) -> float:
        """Return the pause that follows so many seconds of waiting."""
        jitter = random.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else 1.0
        return min(self.first_s + self.growth * waited_s, self.max_s) * jitter

    def next_s(self) -> float | None:
        """Return the pause before the next try, None if no other try is allowed; call it once a failed try."""
        pause_s = self.after(self._paused_s)
        if self.num_tries >= self.max_tries or time.monotonic() + pause_s > self._made_s + self.within_s:
            return None
        self.num_tries += 1
        self._paused_s += pause_s
        return pause_s
