"""`trainer schedule`: draw a pipeline schedule."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from threefold.cli import print_line
from threefold.console import log
from threefold.errors import EXIT_OK, UserError
from threefold.options import FlagText, argument, option

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.pipeline.actions import Schedule
    from trainer.pipeline.simulate import Cost


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
    measure: bool = option(False, "time the passes of each stage of the run here, in place of the three before")
    receive_ahead: bool = option(
        False, "as if receives were posted a pass ahead wherever no ranks can wait for each other; runs do not yet"
    )
    plot: str | None = option(None, "draw a picture too; needs threefold[plot]", metavar="FILE.png")


def run(options: Options) -> int:
    """Simulate a step and print a row of cells a rank: passes of micro-batches, dots while a rank waits. Below are the
    length of the step, the share of the ranks' time in which they wait, and the most micro-batches live at once."""
    from threefold.plot import require_plot, write_png
    from trainer.config.ramp import planned_size
    from trainer.pipeline.draw import draw, figure
    from trainer.pipeline.schedules import SCHEDULES, with_transfers
    from trainer.pipeline.simulate import simulate

    if options.plot:
        require_plot(options.plot)
    if options.weights >= options.backward:
        text = f"--weights {options.weights:g} is a part of --backward {options.backward:g}, and so must be less"
        raise UserError(text, hint=f"--weights {options.backward / 2:g}")
    config = config_of(options)
    if config is None:
        name, sizes = options.schedule or "1f1b", (options.pp or 4, options.microbatches or 8, options.vpp or 1)
    else:
        num_microbatches = options.microbatches or config.train.gradient_accumulation_steps
        name, sizes = config.parallel.schedule, (config.parallel.pp, num_microbatches, config.parallel.virtual_stages)
        if not options.microbatches and (line := planned_size(config.train)):
            log(line)
    schedule = SCHEDULES[name](*sizes)
    rows = with_transfers(schedule, None if options.receive_ahead else 0)
    timeline = simulate(rows, cost_of(options, config, schedule))
    for line in [*draw(timeline).splitlines(), "", str(timeline)]:
        print_line(line)
    if options.plot:
        stages = f" of {sizes[2]} stages" if sizes[2] > 1 else ""
        write_png(options.plot, figure(timeline, f"{name}, {sizes[0]} ranks{stages}, {sizes[1]} micro-batches"))
        log(f"wrote {options.plot}")
    return EXIT_OK


def config_of(options: Options) -> "Config | None":
    """Return the run's configuration with the flags that win over it; None without a run."""
    if options.config is None:
        return None
    from trainer.config.walk import load_config
    from trainer.data import with_vocabulary

    given = {"schedule": options.schedule, "pp": options.pp, "virtual_stages": options.vpp, "dp": options.dp}
    flags = {f"parallel.{name}": FlagText(str(value), f"--parallel.{name}") for name, value in given.items() if value}
    config = load_config(options.config, flags, world_size=None)
    if config.model.vocab_size or options.work:  # the head's work follows from it
        return config
    return with_vocabulary(config)


def cost_of(options: Options, config: "Config | None", schedule: "Schedule") -> "Cost":
    """Return the times of actions that the flags, the run's arithmetic or a measurement say."""
    from trainer.pipeline.simulate import costs, measured_costs

    if options.measure:
        return measured_costs(schedule, measure(config), transfer=options.transfer)
    num_stages = len({action.stage for row in schedule for action in row})
    if options.work and (len(options.work) != num_stages or min(options.work) <= 0):
        text = f"--work has a number above 0 for each of {num_stages} stages, got {','.join(map(str, options.work))}"
        raise UserError(text, hint="--work " + ",".join("1" * num_stages))
    work = options.work
    if config is not None and not work:
        from trainer.model.stages import stage_flops
        from trainer.model.table import parameter_table

        work = tuple(stage_flops(config, parameter_table(config), num_stages))
    times = {"backward": options.backward, "weights": options.weights, "transfer": options.transfer}
    return costs(schedule, work=work, **times)


def measure(config: "Config | None") -> dict[tuple[str, int], float]:
    """Return the times of the run's passes on this machine, and print them."""
    if config is None:
        raise UserError("--measure times the stages of a run", hint="trainer schedule CONFIG.toml --measure")
    from trainer.run.environment import ranks_of
    from trainer.run.stage_times import stage_times

    with ranks_of(config) as ranks:
        times = stage_times(config, ranks.device)
    for stage in sorted({stage for _, stage in times}):
        parts = (f"{kind} {times[kind, stage] * 1e3:.3g} ms" for kind in ("F", "B", "W"))
        log(f"stage {stage}: {', '.join(parts)}")
    return times
