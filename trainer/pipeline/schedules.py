"""The schedules that `parallel.schedule` names, and a rank's row of one, ready for the executor."""

from collections.abc import Callable
from functools import cache

from trainer.pipeline.actions import Action
from trainer.pipeline.gpipe import forward_only, gpipe
from trainer.pipeline.one_f_one_b import one_f_one_b
from trainer.pipeline.passes import with_transfers
from trainer.pipeline.zb_h1 import zb_h1

SCHEDULES: dict[str, Callable[[int, int, int], list[list[Action]]]] = {
    "1f1b": one_f_one_b, "gpipe": gpipe, "zb-h1": zb_h1
}  # fmt: skip


@cache
def rank_actions(name: str, num_ranks: int, num_microbatches: int, virtual: int, rank: int) -> tuple[Action, ...]:
    """Return a rank's row of a schedule, with transfers; of forward passes alone for the name "forward"."""
    make = forward_only if name == "forward" else SCHEDULES[name]
    return tuple(with_transfers(make(num_ranks, num_microbatches, virtual))[rank])
