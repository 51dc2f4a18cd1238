"""Steps under way, each with the batch that it took, so that a void one can be taken once more."""

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from datakit import HostBatch, Loader
from threefold.errors import UserError
from trainer.checkpoint.progress import Progress
from trainer.data import StepReader
from trainer.job.ranks import Ranks
from trainer.model.flops import TokenFlops
from trainer.model.microbatch import Batch
from trainer.verdict import PendingStats

MOST_REPEATS = 8  # of one step


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch with the place of the stream behind it: what is wrong with it, its samples, tokens a row, epochs.

    `num_samples` are of all ranks, and `wait_s` is the time that was waited for them. `flops` are the operations a
    token of this rank's share.
    """

    batch: Batch
    fault: Exception | None
    num_samples: int
    length: int
    epochs: tuple[int, ...]
    cursor: Mapping[str, Any]
    wait_s: float
    flops: TokenFlops

    @property
    def num_tokens(self) -> int:
        """The tokens of all ranks."""
        return self.num_samples * self.length

    def mean_flops(self, ranks: Ranks) -> TokenFlops:
        """Return the operations a token over all ranks, whose documents differ: they all ask, or none."""
        if self.batch.documents is None:
            return self.flops
        return replace(self.flops, attention=ranks.mean(self.flops.attention))


@dataclass(frozen=True, slots=True)
class Started:
    """A step that may still run: the run's progress before and with it, and the batch that it took."""

    before: Progress
    progress: Progress
    taken: Taken
    stats: PendingStats


class Intake:
    """The batches of a run in their order; those of void steps come once more. Owned by the training thread."""

    def __init__(
        self,
        reader: StepReader,
        loader: Loader,
        fault_of: Callable[[HostBatch], UserError | None],
        flops_of: Callable[[HostBatch], TokenFlops],
    ) -> None:
        self._reader, self._loader, self._fault_of, self._flops_of = reader, loader, fault_of, flops_of
        self._again: list[Taken] = []
        self._step = self._num_repeats = 0

    def take(self) -> Taken:
        """Return the next batch."""
        if self._again:
            return self._again.pop(0)
        began_s = perf_counter()
        num_samples = self._loader.global_batch_size
        host, batch, fault = self._reader.next_batch(self._fault_of)
        cursor = self._loader.cursor.to_json()
        wait_s = perf_counter() - began_s
        return Taken(batch, fault, num_samples, host.shape[-1], host.epochs, cursor, wait_s, self._flops_of(host))

    def put_back(self, step: int, batches: Sequence[Taken]) -> UserError | None:
        """Let batches be taken once more, from that of a step on; return an error if it was void too often."""
        self._again = [*batches, *self._again]
        self._num_repeats = self._num_repeats + 1 if step == self._step else 1
        self._step = step
        return UserError(f"step {step} was void {MOST_REPEATS} times") if self._num_repeats >= MOST_REPEATS else None


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory this process ever held: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory_share(device: torch.device) -> float:
    """Return the most that torch ever reserved of its GPU's memory, as a share of it; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    return torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory
