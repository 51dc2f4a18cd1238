"""`trainer bench`: measure the bandwidth between the ranks of a layout."""

from dataclasses import asdict, dataclass
from typing import Literal

from threefold.cli import print_json
from threefold.console import print_table
from threefold.errors import EXIT_OK, UserError
from threefold.options import argument, option
from trainer.commands.shared import is_first_rank
from trainer.job.failure import recorded


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer bench`."""

    what: Literal["comm"] = argument("WHAT", "comm: collectives and transfers of each group of ranks")
    tp: int = option(1, "tensor-parallel size", minimum=1)
    cp: int = option(1, "context-parallel size, whose ranks exchange tokens for heads", minimum=1)
    pp: int = option(1, "pipeline ranks; what tp, cp and pp leave over is dp", minimum=1)
    dp_shard: int = option(0, "neighbours along dp whose groups, and those of replicas, are timed too", minimum=0)
    mib: tuple[float, ...] = option((1.0, 16.0, 256.0), "sizes of the tensors in MiB", metavar="A,B,...")
    repeats: int = option(10, "calls timed of each, of which the median counts", minimum=1)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes CUDA if a GPU is usable")
    timeout_s: float = option(300.0, "how long a rank waits for the others before it ends", above=0)
    json: bool = option(False, "print one JSON document")


@recorded
def run(options: Options) -> int:
    """Time all-reduce, gather, reduce-scatter, broadcast and all-to-all of each group of a layout, and transfers
    between pipeline ranks, all groups of a kind at once. Bandwidths are those of the bus, by the
    formulas of nccl-tests."""
    from trainer.run.bench_comm import bench_comm

    if not options.mib or min(options.mib) <= 0:
        raise UserError(f"--mib has sizes above 0, got {','.join(map(str, options.mib)) or 'none'}", hint="--mib 1,16")
    cuts = options.tp, options.cp, options.pp
    rows = bench_comm(options.device, cuts, options.dp_shard, options.mib, options.repeats, options.timeout_s)
    if not is_first_rank():
        return EXIT_OK
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
