"""`trainer plan`: search the layout of a run on so many GPUs, by its memory and the time of its steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from threefold.cli import print_line
from threefold.console import log, print_table
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError
from threefold.flags import Settings, settings
from threefold.needs import GIVEN, unmet
from threefold.options import argument, option, raise_faults
from threefold.plot import require_plot, write_png
from trainer.commands.shared import ELSEWHERE, check_places, write_json
from trainer.config import Config
from trainer.config.foreign.translate import translated

if TYPE_CHECKING:
    from trainer.plan.rates import Rates
    from trainer.plan.search import Planned


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer plan`."""

    config: str = argument("CONFIG.toml", "configuration; its layout is searched", "")
    from_megatron: str = option("", "plan what a command line of Megatron-LM says, or its script", metavar="COMMAND")
    gpus: int = option(8, "how many GPUs there are", minimum=1)
    gpu: str = option("h100", "which card, as its data sheet names it", metavar="NAME")
    calibration: str = option("", "figures of `trainer bench gpu`, in place of a data sheet's", metavar="FILE.json")
    fixed: bool = option(False, "plan the layout and settings of the configuration, without a search")
    gpus_per_node: int = option(8, "GPUs that the card's links join", minimum=1)
    network_gbytes: float = option(50.0, "GB/s of a GPU to other nodes", above=0)
    objective: Literal["time", "memory"] = option("time", "what is best: the shortest step that fits, or least memory")
    scale: int = option(0, "plan twice as many GPUs again and again, up to so many", minimum=0)
    scale_batch: Literal["fixed", "grown"] = option(
        "fixed", "the global batch of more GPUs: the configuration's, or grown as they are", needs={"scale": GIVEN}
    )
    plot: str = option(
        "", "draw the curve of --scale; needs threefold[plot]", metavar="FILE.png", needs={"scale": GIVEN}
    )
    json: str = option("", "write the plans as JSON; - prints them", metavar="FILE")
    output: str = option("", "write the best plan as a configuration that runs", metavar="CONFIG.toml")
    flags: Settings = settings(Config, hidden=ELSEWHERE, foreign=translated)


def run(options: Options) -> int:
    """Print the best layout with its memory and the time of its step by part, and what the next ones lose by. Times
    are of a calibration, or of data sheets, which no program reaches: these compare layouts. Needs no GPU and no
    store. Exit code 1 if no layout fits."""
    from trainer.config.ramp import planned_size
    from trainer.plan.explained import with_known_vocabulary
    from trainer.plan.search import best_plans, fixed_plan
    from trainer.plan.written import write_config
    from trainer.verify.source import open_run_or_file

    raise_faults("trainer plan", unmet(options), hint="--scale 1024 plans on up to so many GPUs")
    if bool(options.config) == bool(options.from_megatron):
        raise UserError("one of CONFIG.toml and --from-megatron COMMAND is planned", hint="trainer plan --help")
    check_places(options.json, "")
    check_places(options.output, "")
    if options.plot:
        require_plot(options.plot)
    rates = rates_of(options)
    source = open_run_or_file(options.config, options.flags, megatron=options.from_megatron)
    config, assumed = with_known_vocabulary(source.config)
    for line in filter(None, (assumed, planned_size(config.train))):
        log(line)
    if options.scale:
        return scale(options, config, rates)
    if options.fixed:
        plans = [fixed_plan(config, options.gpus, rates)]
    else:
        plans = best_plans(config, options.gpus, rates, options.objective)
    if options.json != "-":
        print_plans(plans)
    write_json(options.json, [row_of(plan) for plan in plans])
    if not plans[0].fits:
        number = "it does not fit" if len(plans) == 1 else f"none of {len(plans)} layouts fits"
        log(f"{number} into {rates.capacity / 1e9:g} GB; more GPUs, or another --gpu")
        return EXIT_CHECK_FAILED
    if options.output:
        write_config(options.output, options.config, options.from_megatron, options.flags, source.config, plans[0])
        log(f"wrote {options.output}: trainer launch --nproc-per-node N train {options.output}")
    return EXIT_OK


def scale(options: Options, config: Config, rates: "Rates") -> int:
    """Print the best plan of each number of GPUs, and draw them."""
    from trainer.plan.scaling import curve, efficiency, scaling

    points = list(scaling(config, options.gpus, options.scale, rates, options.scale_batch))
    shares, rows = efficiency(points), list[tuple[str, ...]]()
    for point, share in zip(points, shares, strict=True):
        known = (
            (f"{point.plan.time.total:.4g}", f"{point.tokens_per_s:.4g}", f"{share:.1%}")
            if point.plan
            else ("", "", "")
        )
        text = layout_text(point.plan) if point.plan else point.reason
        rows.append((str(point.num_gpus), str(point.batch), *known, text))
    if options.json != "-":
        print_table(("GPUs", "batch", "s", "tokens/s", "a GPU", "layout"), rows, left=("layout",))
    write_json(
        options.json,
        [
            {"gpus": point.num_gpus, "batch": point.batch, "tokens_per_s": point.tokens_per_s, "share": share}
            | (dict(row_of(point.plan)) if point.plan else {"reason": point.reason})
            for point, share in zip(points, shares, strict=True)
        ],
    )
    if not any(shares):
        return EXIT_CHECK_FAILED
    if options.plot:
        write_png(options.plot, curve(points, f"planned on {rates.name}, batch {options.scale_batch}"))
        log(f"wrote {options.plot}")
    return EXIT_OK


def rates_of(options: Options) -> "Rates":
    """Return the figures that the plans take, and say where they are from."""
    from trainer.plan.calibration import read_calibration
    from trainer.plan.rates import Rates

    network, node = options.network_gbytes * 1e9, options.gpus_per_node
    if not options.calibration:
        rates = Rates.of_card(options.gpu, network=network, node=node)
        log(f"figures are of the data sheet of {rates.name}, not measured: times compare layouts")
        return rates
    rates = Rates.of_calibration(read_calibration(options.calibration), network=network, node=node)
    log(f"figures are measured on {rates.name}: {options.calibration}")
    return rates


def print_plans(plans: "Sequence[Planned]") -> None:
    """Print the best plan by part, and the next ones with what they lose by."""
    from trainer.run.memory_check import flags_of

    best = plans[0]
    print_line(f"{layout_text(best)}: {best.time.total:.4g} s a step, {best.memory.total / 1e9:.1f} GB a rank")
    if settings := {name: value for name, value in best.candidate.settings.items() if value not in ((), "nothing", 0)}:
        print_line(f"  {flags_of(settings)}")
    print_line("")
    parts = [(name.replace("_", " "), f"{seconds:.4g}") for name, seconds in asdict(best.time).items()]
    print_table(("time", "s"), parts, left=("time",))
    print_line("")
    sizes = [(name, f"{size / 1e9:.2f}") for name, size in best.memory.parts.items()]
    print_table(("memory", "GB"), sizes, left=("memory",))
    if best.axes:
        print_line("")
        rows = [
            (axis.axis, f"{axis.num_bytes / 1e9:.4g}", f"{axis.seconds:.4g}", f"{axis.bytes_per_s / 1e9:.4g}")
            for axis in best.axes
        ]
        print_table(("transfers", "GB a step", "s", "bus GB/s"), rows, left=("transfers",))
    if len(plans) > 1:
        print_line("")
        rows = [
            (layout_text(plan), f"{plan.time.total:.4g}", f"{plan.memory.total / 1e9:.1f}", loss_text(plan, best))
            for plan in plans[1:9]
        ]
        print_table(("next", "s", "GB", "loses by"), rows, left=("next", "loses by"))


def layout_text(plan: "Planned") -> str:
    """Return a plan's layout and settings."""
    from trainer.config.resolve import layout_of

    parallel, train = plan.config.parallel, plan.config.train
    shard = f" in groups of {parallel.dp_shard}" if parallel.dp_shard else ""
    texts = [str(layout_of(plan.config)), f"zero {parallel.zero_stage}{shard}", f"micro-batch {train.micro_batch_size}"]
    texts += [parallel.schedule] if parallel.pp > 1 else []
    modules = f" of {','.join(train.recompute_modules)}" if train.recompute_modules else ""
    kept = " that keeps attention" if train.recompute_keep == "attention" else modules
    return ", ".join([*texts, f"recompute {train.recompute}{kept}"])


def loss_text(plan: "Planned", best: "Planned") -> str:
    """Return the part by which a plan is worse than the best one, or what it lacks."""
    if not plan.fits and best.fits:
        return f"does not fit into {plan.capacity / 1e9:g} GB"
    own, other = asdict(plan.time), asdict(best.time)
    part = max(own, key=lambda name: own[name] - other[name])
    return f"{own[part] - other[part]:.3g} s of {part.replace('_', ' ')}"


def row_of(plan: "Planned") -> Mapping[str, Any]:
    """Return what is known of a plan as plain data."""
    return {
        "layout": layout_text(plan),
        "settings": plan.candidate.settings,
        "fits": plan.fits,
        "seconds": plan.time.total,
        "time": asdict(plan.time),
        "bytes": plan.memory.total,
        "memory": plan.memory.parts,
        "transfers": [asdict(axis) for axis in plan.axes],
    }
