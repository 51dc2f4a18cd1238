"""StepMemory: memory of steps that are over, used again.

The kernel clears new memory before a process gets it: of a step of 8 MiB that costs about a third of what making the
step does, and the bandwidth of the machine.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from datakit.batches.batch import Bytes


class StepMemory:
    """Memory for steps that one thread makes and others consume, when they like; it is bounded.

    Whatever still refers to an array keeps it from being used again, as each view of it does, and each tensor.
    """

    def __init__(self, most: int) -> None:
        """Keep memory of so many steps."""
        self._arrays: list[Bytes] = []
        self._most = most

    def take(self, num_bytes: int) -> Bytes:
        """Return memory of that size, of a step to which nothing refers any more, or new."""
        self._arrays = [array for array in self._arrays if array.size == num_bytes]
        for number in range(len(self._arrays)):
            if _num_references(self._arrays, number) == _UNUSED:
                return self._arrays[number]
        array = np.empty(num_bytes, np.uint8)
        self._arrays = [*self._arrays[1 - self._most :], array]
        return array


def _num_references(things: Sequence[Any], number: int) -> int:
    return sys.getrefcount(things[number])


_UNUSED = _num_references([object()], 0)  # what is counted of a thing that only its list refers to
