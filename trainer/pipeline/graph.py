"""PassGraph: the passes of a step as one CUDA graph, which is recorded once and launched by one call of the host.

A graph is what the host enqueued: kernels with the addresses that they read and write. What a later step reads is
copied to where the recorded one read it. What Python decides in a pass it decides once: which contribution to a
gradient is the first one, what is kept between two passes, in which order passes run. Memory of the passes belongs to
the graph. So it takes as much as before, but nothing else takes it between two steps. Source: CUDA C++ Programming
Guide, CUDA Graphs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.model.microbatch import Batch, Scale

WARM_UP_STEPS = 2  # in them libraries choose kernels and take memory, which a recording may not
Results = tuple[Tensor, Tensor]  # a loss, and squared norms
Passes = Callable[[int, Batch, Scale], Results]


class Capture(NamedTuple):
    """What launches passes that were recorded, and where their results are then."""

    launch: Callable[[], object]
    results: Results


def record_on_gpu(run: Callable[[], Results]) -> Capture:
    """Record what `run` enqueues, which is not done meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads save, and read batches
        results = run()
    return Capture(graph.replay, results)


class PassGraph:
    """Runs the passes of steps: the first ones as they are, then as a graph, of batches of one shape at a time.

    `passes` takes a step's number, its batch and the factor of a token's loss; what it reads beside these two has its
    place for good, and no pass waits for what is enqueued before. `expire` lets go of what passes made of weights for
    those behind them: a graph makes it each time. Owned by the training thread.
    """

    def __init__(
        self,
        passes: Passes,
        expire: Callable[[], object],
        record: Callable[[Callable[[], Results]], Capture] | None = None,
    ) -> None:
        self._passes, self._expire, self._record, self._num_runs = passes, expire, record or record_on_gpu, 0
        self._shape: torch.Size | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._capture: Capture | None = None

    def run(self, step: int, batch: Batch, scale: Scale) -> Results:
        """Return what the passes return; the next run writes over it."""
        self._num_runs += 1
        if self._num_runs <= WARM_UP_STEPS or batch.documents is not None:  # their bounds have no size that stays
            return self._passes(step, batch, scale)
        inputs = batch.tokens, batch.labels, batch.positions, batch.loss_mask, scale()
        if self._capture is None or batch.tokens.shape != self._shape:
            self._capture = None  # its memory is free for the next one
            self._shape, self._capture = batch.tokens.shape, self._recorded(step, batch, inputs)
        for place, tensor in zip(self._inputs, inputs, strict=True):
            place.copy_(tensor)
        self._capture.launch()
        return self._capture.results

    def close(self) -> None:
        """Let go of what is recorded: NCCL does not end a communicator before the graphs with its calls."""
        self._capture = None

    def _recorded(self, step: int, batch: Batch, inputs: tuple[Tensor, ...]) -> Capture:
        """Record the passes of batches of this shape, on tensors of their own."""
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        tokens, labels, positions, loss_mask, scale = self._inputs
        self._expire()
        own = replace(batch, tokens=tokens, labels=labels, positions=positions, loss_mask=loss_mask)
        return self._record(lambda: self._passes(step, own, lambda: scale))
