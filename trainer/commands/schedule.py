"""`trainer schedule`: draw a pipeline schedule."""

from dataclasses import dataclass
from typing import Literal

from threefold.cli import print_line
from threefold.console import log
from threefold.errors import EXIT_OK, UserError
from threefold.options import FlagText, argument, option


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer schedule`."""

    config: str | None = argument("CONFIG.toml", "a run: what no flag says is taken from it", None)
    schedule: Literal["1f1b", "gpipe", "zb-h1"] | None = option(None, "which schedule; else the run's, or 1f1b")
    pp: int | None = option(None, "pipeline ranks; else the run's, or 4", minimum=1)
    vpp: int | None = option(None, "stages that each of them holds; else the run's, or 1", minimum=1)
    dp: int | None = option(None, "ranks that share the run's batch; else the run's, or 1", minimum=1)
    microbatches: int | None = option(None, "micro-batches a step of one rank; else the run's, or 8", minimum=1)
    backward: float = option(2.0, "time of a rank's backward pass, if its forward pass takes 1", above=0)
    weights: float = option(1.0, "part of that for the gradients of linears' weights, which zb-h1 puts off", above=0)
    transfer: float = option(0.0, "time of a transfer between neighbours", minimum=0)
    work: tuple[float, ...] = option(
        (), "how much each stage computes, in any unit; else as in the run, or equal", metavar="A,B,..."
    )
    plot: str | None = option(None, "draw a picture too; needs threefold[plot]", metavar="FILE.png")


def run(options: Options) -> int:
    """Simulate a step and print a row of cells a rank: passes of micro-batches, dots while a rank waits. Below are the
    length of the step, the share of the ranks' time in which they wait, and the most micro-batches live at once."""
    from threefold.plot import require_plot, write_png
    from trainer.pipeline.costs import costs
    from trainer.pipeline.draw import draw, figure
    from trainer.pipeline.passes import with_transfers
    from trainer.pipeline.schedules import SCHEDULES
    from trainer.pipeline.simulate import simulate

    if options.plot:
        require_plot(options.plot)
    if options.weights >= options.backward:
        text = f"--weights {options.weights:g} is a part of --backward {options.backward:g}, and so must be less"
        raise UserError(text, hint=f"--weights {options.backward / 2:g}")
    name, sizes, work = shape_of(options)
    schedule = SCHEDULES[name](*sizes)
    num_stages = sizes[0] * sizes[2]
    if work and (len(work) != num_stages or min(work) <= 0):
        text = f"--work has a number above 0 for each of {num_stages} stages, got {','.join(map(str, work))}"
        raise UserError(text, hint="--work " + ",".join("1" * num_stages))
    times = {"backward": options.backward, "weights": options.weights, "transfer": options.transfer}
    timeline = simulate(with_transfers(schedule), costs(schedule, work=work, **times))
    for line in [*draw(timeline).splitlines(), "", str(timeline)]:
        print_line(line)
    if options.plot:
        stages = f" of {sizes[2]} stages" if sizes[2] > 1 else ""
        write_png(options.plot, figure(timeline, f"{name}, {sizes[0]} ranks{stages}, {sizes[1]} micro-batches"))
        log(f"wrote {options.plot}")
    return EXIT_OK


def shape_of(options: Options) -> tuple[str, tuple[int, int, int], tuple[float, ...]]:
    """Return the schedule's name, its ranks, micro-batches and stages a rank, and the work of each stage, if known."""
    if options.config is None:
        sizes = (options.pp or 4, options.microbatches or 8, options.vpp or 1)
        return options.schedule or "1f1b", sizes, options.work
    from trainer.config.walk import load_config
    from trainer.data import with_vocabulary
    from trainer.observe.flops import stage_flops

    given = {"schedule": options.schedule, "pp": options.pp, "virtual_stages": options.vpp, "dp": options.dp}
    flags = {f"parallel.{name}": FlagText(str(value), f"--parallel.{name}") for name, value in given.items() if value}
    config = load_config(options.config, flags, world_size=None)
    parallel, train = config.parallel, config.train
    sizes = (parallel.pp, options.microbatches or train.gradient_accumulation_steps, parallel.virtual_stages)
    if options.work:
        return parallel.schedule, sizes, options.work
    if not config.model.vocab_size:  # the head's work follows from it
        config = with_vocabulary(config)
    return parallel.schedule, sizes, tuple(stage_flops(config))
