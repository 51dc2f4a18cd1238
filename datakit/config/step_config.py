"""StepConfig: the keys of a run's `[train]` that say which samples a step reads; the trainer's table extends it."""

from collections.abc import Iterator
from dataclasses import dataclass

from datakit.order.batch_sizes import BatchSizes, rampup_fault
from threefold.options import Fault, option


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The part of `[train]` that says which samples a step reads."""

    train_steps: int = option(100, "the step of the run's end", minimum=1, flags=["--train-steps"], keeps_bits=True)
    seq_length: int = option(256, "tokens a sample", minimum=1, flags=["--seq-length"])
    global_batch_size: int = option(8, "samples a step of all ranks", minimum=1, flags=["--global-batch-size"])
    rampup_batch_size: tuple[int, ...] = option(
        (),
        "samples a step at first, how many more at a time, and the sample by which there are global_batch_size",
        minimum=1,
        flags=["--rampup-batch-size"],
        metavar=("START", "INCR", "SAMPLES"),
    )
    seed: int = option(0, "seed of weights, dropout and sample order", minimum=0, maximum=2**63 - 1, flags=["--seed"])

    def faults(self, table: str) -> Iterator[Fault]:
        """Yield the fault in how the batch grows, if there is one."""
        if (fault := rampup_fault(self.global_batch_size, self.rampup_batch_size)) is not None:
            names = {f"{table}.rampup_batch_size", f"{table}.global_batch_size"}
            yield names, f"{table}.rampup_batch_size: {fault}"

    def sizes(self, read_before: int = 0) -> BatchSizes:
        """Return how many samples steps have, of a run before which another program read some."""
        return BatchSizes(self.global_batch_size, self.rampup_batch_size, read_before)
