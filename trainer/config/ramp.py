"""Of a batch that grows: whether its sizes are whole micro-batches of each rank, and which of them is planned."""

from collections.abc import Iterator

from threefold.options import Fault
from trainer.config.train import TrainConfig


def planned_size(train: TrainConfig) -> str:
    """Return a line that says of which steps a plan is, if their batch grows; empty if all are alike."""
    sizes = train.sizes()
    return f"steps grow from {sizes} samples: these are figures of the last ones" if sizes.rampup else ""


def ramp_faults(train: TrainConfig, dp_size: int) -> Iterator[Fault]:
    """Yield a fault if not all sizes are, with those near them that are; how the batch grows has no fault itself."""
    if not train.rampup_batch_size:
        return
    start, increment, samples = train.rampup_batch_size
    unit = train.micro_batch_size * dp_size
    odd = [size for size in train.sizes().sizes if size % unit]
    if not odd:
        return
    pairs = sorted(whole_ramps(train, unit), key=lambda pair: abs(pair[0] - start) + abs(pair[1] - increment))[:6]
    text = f"train.rampup_batch_size has a step of {odd[0]} samples, which is not a multiple of micro_batch_size "
    text += f"{train.micro_batch_size} * dp {dp_size} = {unit}: "
    if pairs:
        text += f"START INCR may be {', '.join(f'{first} {more}' for first, more in sorted(pairs))}: "
        text += f"--rampup-batch-size {pairs[0][0]} {pairs[0][1]} {samples}"
    else:
        text += f"no size below global_batch_size {train.global_batch_size} is: leave train.rampup_batch_size out"
    yield {"train.rampup_batch_size", "train.micro_batch_size", "train.global_batch_size", "parallel.dp"}, text


def whole_ramps(train: TrainConfig, unit: int) -> Iterator[tuple[int, int]]:
    """Yield START and INCR of batches that grow by multiples of `unit`, from sizes near the one asked for."""
    start, final = train.rampup_batch_size[0], train.global_batch_size
    nearest = sorted(range(unit, final, unit), key=lambda size: abs(size - start))[:4]
    for first in nearest:
        yield from ((first, more) for more in range(unit, final - first + 1, unit) if (final - first) % more == 0)
