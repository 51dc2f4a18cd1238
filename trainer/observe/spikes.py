"""Spikes: losses far above those of the steps before. The first rank sees them in the lines that it writes."""

import math
from collections import deque
from typing import Any

WINDOW, LEAST, DEVIATIONS = 128, 32, 8.0  # steps looked back on, those that it takes, and how far is far


class Spikes:
    """Looks out for spikes: a loss more than 8 deviations, and 5%, above the mean of the last 128 that are none.

    For example 2.6 is one after losses of 2.4 that differ by 0.01. Of a spike over several steps the first is reported.
    """

    def __init__(self) -> None:
        self._losses = deque[float](maxlen=WINDOW)
        self._is_high, self._num_high = False, 0

    def seen(self, loss: float) -> dict[str, Any] | None:
        """Return what is to be reported of the next loss, None if no spike begins with it."""
        if not math.isfinite(loss):
            return None
        is_high, mean, deviation = False, 0.0, 0.0
        if len(self._losses) >= LEAST:
            mean = sum(self._losses) / len(self._losses)
            deviation = math.sqrt(sum((known - mean) ** 2 for known in self._losses) / len(self._losses))
            is_high = loss > mean + max(DEVIATIONS * deviation, 0.05 * abs(mean))
        begins, self._is_high = is_high and not self._is_high, is_high
        self._num_high = self._num_high + 1 if is_high else 0
        if self._num_high > LEAST:  # it does not come down again: it is the new level
            self._losses.clear()
        if not is_high:
            self._losses.append(loss)
        return {"loss": loss, "mean": mean, "deviation": deviation} if begins else None
