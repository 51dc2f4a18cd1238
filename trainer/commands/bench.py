"""`trainer bench`: measure the bandwidth between the ranks of a layout, or a GPU for plans."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from threefold.cli import print_json
from threefold.console import log, print_table
from threefold.errors import EXIT_OK, UserError
from threefold.options import argument, option
from trainer.commands.shared import check_places, is_first_rank, write_json
from trainer.job.failure import recorded

if TYPE_CHECKING:
    from trainer.plan.calibration import PartRate


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer bench`."""

    what: Literal["comm", "gpu"] = argument(
        "WHAT", "comm: collectives and transfers of each group of ranks; gpu: products, attention and kernels"
    )
    tp: int = option(1, "tensor-parallel size", minimum=1)
    cp: int = option(1, "context-parallel size, whose ranks exchange tokens for heads", minimum=1)
    pp: int = option(1, "pipeline ranks; what tp, cp and pp leave over is dp", minimum=1)
    dp_shard: int = option(0, "neighbours along dp whose groups, and those of replicas, are timed too", minimum=0)
    mib: tuple[float, ...] = option((1.0, 16.0, 256.0), "sizes of the tensors in MiB", metavar="A,B,...")
    repeats: int = option(10, "calls timed of each, of which the median counts", minimum=1)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes CUDA if a GPU is usable")
    plot: str = option("", "of comm: draw bandwidths by size; needs threefold[plot]", metavar="FILE.png")
    seconds: float = option(60.0, "about how long the parts of gpu are timed", above=0)
    output: str = option("", "of gpu: write a calibration for `trainer plan --calibration`", metavar="FILE.json")
    timeout_s: float = option(300.0, "how long a rank waits for the others before it ends", above=0)
    json: bool = option(False, "print one JSON document")


@recorded
def run(options: Options) -> int:
    """Time all-reduce, gather, reduce-scatter, broadcast and all-to-all of each group of a layout, and transfers
    between pipeline ranks, all groups of a kind at once. Bandwidths are those of the bus, by the
    formulas of nccl-tests. `bench gpu` times the trainer's own ops on the device, each between the others, and with
    more ranks collectives of all of them, alone and beside products."""
    if options.what == "gpu":
        return calibrate(options)
    from threefold.plot import require_plot, write_png
    from trainer.run.bench_comm import bench_comm, figure_of

    if not options.mib or min(options.mib) <= 0:
        raise UserError(f"--mib has sizes above 0, got {','.join(map(str, options.mib)) or 'none'}", hint="--mib 1,16")
    if options.plot:
        require_plot(options.plot)
    cuts = options.tp, options.cp, options.pp
    rows = bench_comm(options.device, cuts, options.dp_shard, options.mib, options.repeats, options.timeout_s)
    if not is_first_rank():
        return EXIT_OK
    if options.plot:
        write_png(options.plot, figure_of(rows))
        log(f"wrote {options.plot}")
    if options.json:
        print_json([{**asdict(row), "bus_bytes_per_s": row.bus_bytes_per_s} for row in rows])
        return EXIT_OK
    cells = [
        (
            row.group,
            str(row.num_ranks),
            row.operation,
            f"{row.num_bytes / 2**20:g}",
            f"{row.seconds * 1e3:.3f}",
            f"{row.bus_bytes_per_s / 1e9:.2f}",
        )
        for row in rows
    ]
    print_table(("group", "ranks", "operation", "MiB", "ms", "bus GB/s"), cells, left=("group", "operation"))
    return EXIT_OK


def calibrate(options: Options) -> int:
    """Measure this device, print the rates and write them."""
    from trainer.job.ranks import Ranks
    from trainer.plan.measured import measure

    check_places(options.output, "")
    with Ranks(options.device, timeout_s=options.timeout_s + options.seconds) as ranks:
        calibration = measure(ranks, options.seconds, log if is_first_rank() else lambda text: None)
    if not is_first_rank():
        return EXIT_OK
    if options.json:
        print_json(calibration.known())
    else:
        rows = rates_of(calibration.figures)
        print_table(("part", "pass", "dtype", "places", "slowest", "fastest", "a second"), rows, left=("part", "pass"))
        host = ", ".join(f"{kind} {seconds * 1e6:.0f} us" for kind, seconds in calibration.host_s.items())
        log(f"{calibration.card}; host, of a layer: {host}; {calibration.launch_s * 1e6:.1f} us a kernel")
    if options.output:
        write_json(options.output, calibration.known())
        log(f"wrote {options.output}: trainer plan CONFIG.toml --calibration {options.output}")
    return EXIT_OK


def rates_of(figures: "Iterable[PartRate]") -> list[tuple[str, ...]]:
    """Return a row of each pass of each part, with its slowest and its fastest rate."""
    grouped: dict[tuple[str, str, str], list[float]] = {}
    units: dict[str, tuple[float, str]] = {
        "product": (1e12, "TFLOP"),
        "attention": (1e12, "TFLOP"),
        "beside": (1.0, "s hidden"),
    }
    for figure in figures:
        grouped.setdefault((figure.part, figure.way, figure.dtype), []).append(figure.rate)
    rows = []
    for (part, way, dtype), rates in grouped.items():
        size, unit = units.get(part, (1e9, "GB"))
        ends = [f"{rate / size:.4g}" for rate in (min(rates), max(rates))]
        rows.append((part, way, dtype, str(len(rates)), *ends, unit))
    return rows
