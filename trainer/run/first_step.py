"""FirstStep: how long a step takes on a CPU, said before and during the first one if that is minutes."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch

from trainer.engine import Engine

SLOW_S = 60.0  # a step that takes less says so by itself
SIDE = 512  # of the matrices whose product is timed


class FirstStep:
    """The first step of a start, on the rank that reports; owned by the training thread.

    A line comes before it, by the arithmetic of a step and the speed of a product of matrices, and one after each
    micro-batch, by those before it.
    """

    def __init__(
        self,
        engine: Engine,
        num_microbatches: int,
        *,
        flops: float,
        say: Callable[[str], None],
        slow_s: float = SLOW_S,
    ) -> None:
        """Wait for the step of so many micro-batches, whose arithmetic on this rank is `flops`."""
        self._engine, self._flops, self._say, self._slow_s = engine, flops, say, slow_s
        self._num_microbatches = num_microbatches
        self._num_passes = self._num_microbatches * engine.mesh.layout.virtual
        self._num_passed, self._began_s = 0, 0.0
        self._is_over = engine.mesh.device.type != "cpu" or engine.mesh.rank != 0

    def begin(self) -> None:
        """Report how long the step may take, if it is the first."""
        if self._is_over:
            return
        estimate_s = self._flops / product_flops_per_s(self._engine.dtype)
        if estimate_s >= self._slow_s:
            self._say(
                f"a step is {self._flops / 1e12:,.1f} TFLOP a rank, in {self._num_microbatches} micro-batches: "
                f"about {shown(estimate_s)} on this CPU, at the speed of a product of matrices"
            )
        self._began_s = time.monotonic()
        self._engine.pipeline.after_backward = self._note

    def end(self) -> None:
        """Report no more."""
        self._is_over, self._engine.pipeline.after_backward = True, None

    def _note(self) -> None:
        self._num_passed += 1
        passed_s = time.monotonic() - self._began_s
        whole_s = passed_s * self._num_passes / self._num_passed
        num_done, num_left = divmod(self._num_passed, self._engine.mesh.layout.virtual)
        if whole_s >= self._slow_s and not num_left:
            self._say(
                f"micro-batch {num_done} of {self._num_microbatches} after {shown(passed_s)}: "
                f"a step takes about {shown(whole_s)}"
            )


def product_flops_per_s(dtype: torch.dtype) -> float:
    """Return the operations a second of a product of square matrices, the better of two."""
    matrix, seconds = torch.ones(SIDE, SIDE, dtype=dtype), []
    for _ in range(2):
        began_s = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - began_s)
    return 2 * SIDE**3 / max(min(seconds), 1e-9)


def shown(seconds: float) -> str:
    """Return a time for people, as 0:02:05."""
    return str(timedelta(seconds=round(seconds)))
