"""LateLanes: lanes of copies on a CPU, each of which is made as late as what follows allows.

A copy that nothing waits for is not made. So what reads a place too early, or reads it without a wait, finds what was
there before.
"""

import torch

from trainer.model.host_inputs import HostInputs
from trainer.store.window import Copies, Mark, Streaming


class LateLanes:
    """Two queues of copies; owned by the thread of a rank."""

    def __init__(self) -> None:
        self._queues: dict[str, list[tuple[Copies, Mark]]] = {"in": [], "out": []}
        self._begins = {"in": 0, "out": 0}  # the number of a queue's first copies

    def copy(self, lane: str, copies: Copies, after: Mark | None) -> Mark:
        """Put copies off."""
        self._queues[lane].append((copies, after))
        return lane, self._begins[lane] + len(self._queues[lane])

    def mark(self) -> Mark:
        """Return nothing to wait for: arithmetic is done at once."""
        return None

    def wait(self, mark: Mark) -> None:
        """Make what is put off up to a mark, and before it what that is behind."""
        if mark is None:
            return
        lane, stop = mark
        while self._begins[lane] < stop:
            copies, after = self._queues[lane].pop(0)
            self._begins[lane] += 1
            self.wait(after)
            for to, source in copies:
                to.copy_(source)

    def settle(self) -> None:
        """Make all that is put off."""
        for lane, queue in self._queues.items():
            self.wait((lane, self._begins[lane] + len(queue)))


def streaming_on_cpu(piece_bytes: int = 1 << 11) -> Streaming:
    """Return how a CPU streams what it has in memory: in small pieces, through three buffers."""
    return Streaming(LateLanes(), _zeros, piece_bytes, 3)


def late_inputs() -> HostInputs:
    """Return where a CPU puts inputs of layers: elsewhere in memory."""
    return HostInputs(LateLanes(), _zeros)


def _zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)
