"""`trainer schedule`: draw a pipeline schedule."""

from dataclasses import dataclass
from typing import Literal

from threefold.cli import print_line
from threefold.errors import EXIT_OK
from threefold.options import option


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer schedule`."""

    schedule: Literal["1f1b", "gpipe"] = option("1f1b", "which schedule")
    pp: int = option(4, "pipeline stages, one a rank", minimum=1)
    microbatches: int = option(8, "micro-batches a step of one rank", minimum=1)
    backward: float = option(2.0, "time of a backward pass, if a forward pass takes 1", above=0)
    transfer: float = option(0.0, "time of a transfer between neighbours", minimum=0)


def run(options: Options) -> int:
    """Simulate a step and print a row of cells a rank: passes of micro-batches, dots while a rank waits. Below are the
    length of the step, the share of the ranks' time in which they wait, and the most micro-batches live at once."""
    from trainer.pipeline.draw import draw
    from trainer.pipeline.passes import with_transfers
    from trainer.pipeline.schedules import SCHEDULES
    from trainer.pipeline.simulate import simulate

    schedule = SCHEDULES[options.schedule](options.pp, options.microbatches)
    costs = {"F": 1.0, "B": options.backward, "SF": options.transfer, "SB": options.transfer}
    timeline = simulate(with_transfers(schedule), lambda action: costs[action.kind])
    for line in [*draw(timeline).splitlines(), "", str(timeline)]:
        print_line(line)
    return EXIT_OK
