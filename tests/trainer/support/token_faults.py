"""Faults of what a token is: the place that it has. See `faults`."""

from dataclasses import replace

from tests.trainer.support.faults import TP, Fault, Patch, wrapping
from trainer.engine import Engine
from trainer.model.microbatch import MicroBatch
from trainer.parallel import tensor


def rows_turned(batch: MicroBatch) -> MicroBatch:
    """The same micro-batch with its rows in the other order: as many runs as rows."""
    length, parts = batch.seq_length, {}
    for name in ("tokens_S", "labels_S", "positions_S", "loss_mask_S", "weights_S"):
        part = getattr(batch, name)
        parts[name] = part if part is None else part.unflatten(0, (-1, length)).flip(0).flatten()
    [run] = batch.runs
    runs = tuple(run[start : start + length] for start in range(len(run) - length, -1, -length))
    return replace(batch, runs=runs, **parts)


def turning_rows(patch: Patch) -> None:
    """Let every engine have its rows in the other order, which is no fault."""
    wrapping(
        Engine, "_microbatches", lambda real, *args, **named: [rows_turned(each) for each in real(*args, **named)]
    )(patch)


def runs_change_places(patch: Patch) -> None:
    turning_rows(patch)
    wrapping(tensor, "share_of", lambda real, runs, *sizes: real(runs[::-1], *sizes))(patch)


TOKEN_FAULTS = [
    Fault("a token has a place of the wrong run", TP, runs_change_places, cuts_tokens=True, micro_batch_size=2),
]
