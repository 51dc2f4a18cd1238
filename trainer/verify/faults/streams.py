"""Faults of which samples ranks read, of the order in which they call each other, and of waits for a device."""

from typing import Any

import torch

from datakit import BatchSizes, Loader
from trainer.mesh.group import Group
from trainer.store.store import ParameterStore
from trainer.verdict import Verdict
from trainer.verify.faults.fault import COLLECTIVES, DP, SAMPLES, TP, WAITS, Fault
from trainer.verify.faults.planting import wrapping


def rank_0_for_all(real: Any, self: Loader, blend: Any, rows: int, number: int, dp_rank: int, *rest: Any) -> None:
    real(self, blend, rows, number, 0, *rest)


class CountedInSteps(BatchSizes):
    """A batch that grows by steps of its first size, and not by samples."""

    __slots__ = ()

    def at(self, sample: int) -> int:
        """Return the size of the step that begins at a sample."""
        return super().at(sample // self.sizes[0])


def ramp_in_steps(real: Any, self: Loader, blend: Any, rows: int, sizes: BatchSizes, *rest: Any) -> None:
    real(self, blend, rows, CountedInSteps(sizes.final, sizes.rampup, sizes.read_before), *rest)


def in_blocks(real: Any, self: Loader, first: int) -> Any:
    """Let each rank read samples that follow each other."""
    samples = real(self, first)
    dp_rank = (samples[0, 0] - first) // samples.shape[1]
    return samples - dp_rank * samples.shape[1] + dp_rank * samples.size if samples.size > 1 else samples


def in_other_order(real: Any, self: Loader, first: int) -> Any:
    """Let each rank take its micro-batches in the other order."""
    return real(self, first)[::-1]


def left_out_on_one(real: Any, self: Group, called: str, *args: Any, **options: Any) -> Any:
    is_left_out = (called, self.name, self.index) == ("all_reduce", "world", 1)
    return None if is_left_out else real(self, called, *args, **options)


def reversed_on_one(real: Any, self: ParameterStore, *args: Any) -> None:
    """Let the second rank gather its buckets in the other order."""
    real(self, *args)
    if self.mesh.rank == 1:
        self._updated.reverse()


def another_size_on_one(real: Any, self: Group, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """Let the second rank sum a number less."""
    return real(self, tensor[:-1] if (self.name, self.index) == ("world", 1) else tensor, *args)


def read_in_the_step(real: Any, self: Verdict, step: int, loss: torch.Tensor, *others: Any) -> Any:
    loss.item()
    return real(self, step, loss, *others)


def decided_by_the_norm(real: Any, self: Verdict, step: int, loss: torch.Tensor, squares: Any, count: Any) -> Any:
    """Let the host look whether there is something to clip."""
    factor = real(self, step, loss, squares, count)
    return factor if bool(factor < 1) else torch.ones_like(factor)


STREAM_FAULTS = (
    Fault(
        "rows-of-first-rank",
        "all ranks of dp read the first one's rows",
        DP,
        wrapping(Loader, "__init__", rank_0_for_all),
        check=SAMPLES,
    ),
    Fault(
        "rows-in-blocks",
        "each rank of dp reads samples that follow each other",
        DP,
        wrapping(Loader, "samples", in_blocks),
        check=SAMPLES,
    ),
    Fault(
        "microbatches-reversed",
        "ranks of dp read their micro-batches in the other order",
        DP,
        wrapping(Loader, "samples", in_other_order),
        check=SAMPLES,
    ),
    Fault(
        "ramp-in-steps",
        "the batch grows by steps that are over, not by samples",
        None,
        wrapping(Loader, "__init__", ramp_in_steps),
        train={"rampup_batch_size": (2, 2, 4)},
        check=SAMPLES,
    ),
    Fault(
        "sum-left-out-on-one",
        "one rank leaves a sum out",
        TP,
        wrapping(Group, "_call", left_out_on_one),
        check=COLLECTIVES,
    ),
    Fault(
        "gathers-reversed-on-one",
        "one rank gathers its buckets in another order",
        DP,
        wrapping(ParameterStore, "__init__", reversed_on_one),
        check=COLLECTIVES,
        peer="NVIDIA/Megatron-LM#7452",
    ),
    Fault(
        "smaller-sum-on-one",
        "one rank sums a number less than the others",
        DP,
        wrapping(Group, "all_reduce", another_size_on_one),
        check=COLLECTIVES,
    ),
    Fault(
        "loss-read-in-step",
        "a step reads its loss on the host",
        DP,
        wrapping(Verdict, "judge", read_in_the_step),
        check=WAITS,
    ),
    Fault(
        "clip-decided-by-host",
        "the host looks whether there is something to clip",
        DP,
        wrapping(Verdict, "judge", decided_by_the_norm),
        check=WAITS,
    ),
)
