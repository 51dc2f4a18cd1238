"""How long an update takes: its kernels by bytes, what Muon multiplies and sends, and state that is on the host.

Muon's matrices are shared out as the run does it, so a round takes as long as the rank with the most to do. State that
is streamed goes both ways at once. What the window holds, and the first forward of the next step, are beside that.
"""

from collections.abc import Mapping

from ckptkit import Coords
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.engine import DTYPES
from trainer.model.table import local_runs, parameter_table
from trainer.ops.dtypes import wide_dtype
from trainer.ops.muon import direction_dtype
from trainer.plan.rates import Rates
from trainer.plan.store_moves import NAMES
from trainer.run.memory import optimizer_bytes
from trainer.store.matrices import Matrix, in_rounds, shared_out
from trainer.store.muon import ROUND, whole_axes
from trainer.store.optimizers import OPTIMIZERS
from trainer.store.parameter import Parameter
from trainer.store.plan import ParameterRun

# what passes of Muon beside its products read and write of an element, in the wide dtype and in that of products: one
# kernel has gradient, moment and direction, the other update, master and weight; between them it is put in place twice
# and scaled
WIDE_PASSES, NARROW_PASSES = 5, 10
Places = Mapping[str, tuple[int, int]]


def update_s(config: Config, rates: Rates, places: Places, pp: int, forward_s: float) -> float:
    """Return the seconds of the update of a rank, beside which a forward of the next step takes `forward_s`."""
    dtype = DTYPES[config.train.precision]
    read = updated = 0.0
    runs = local_runs(config, parameter_table(config), layout_of(config), Coords(pp=pp))
    for run in runs:
        owned = run.numel / (places[NAMES[run.holders]][0] if config.parallel.zero_stage else 1)
        read += owned * wide_dtype(dtype).itemsize
        updated += owned * updated_bytes(config, run.optimizer)
    kernels = rates.kernel_s("norms", "forward", read) + rates.kernel_s("update", "forward", updated)
    matrices = [run for run in runs if run.optimizer == "muon"]
    if matrices:
        kernels += muon_s(config, rates, places, matrices)
    if not config.optim.offload:
        return kernels
    streamed = max(optimizer_bytes(config, runs) - (config.optim.offload_window_mib << 20), 0)
    beside = forward_s if config.parallel.overlap_param_gather else 0.0
    return max(kernels, rates.stream_s(streamed) - beside)


def updated_bytes(config: Config, optimizer: str) -> int:
    """Return what an update reads and writes of an element: its gradient, states, master and weight."""
    optim, dtype = config.optim, DTYPES[config.train.precision]
    wide = wide_dtype(dtype).itemsize
    if optimizer == "muon":
        return WIDE_PASSES * wide + NARROW_PASSES * direction_dtype(wide_dtype(dtype)).itemsize
    states = len(OPTIMIZERS[optimizer].states) * (2 if optim.moments == "bf16" else wide)
    if wide == dtype.itemsize:
        return wide + 2 * (states + wide)
    kept = 2 * (2 + dtype.itemsize) if optim.master == "split" else 2 * wide + dtype.itemsize
    return wide + 2 * states + kept


def muon_s(config: Config, rates: Rates, places: Places, runs: list[ParameterRun]) -> float:
    """Return the seconds of Muon's products on the rank that has the most of each round, and of its exchanges.

    Both ways of a round are beside products of its neighbours, but for the first way out and the last way back.
    """
    layout, table, seconds = layout_of(config), parameter_table(config), 0.0
    narrow = direction_dtype(wide_dtype(DTYPES[config.train.precision])).itemsize
    for axes in dict.fromkeys(whole_axes(run.holders, layout) for run in runs):
        own = [run for run in runs if whole_axes(run.holders, layout) == axes]
        num_ranks, span = places[NAMES[axes]]
        matrices = {name: matrices_of(name, table[name], run) for run in own for name in run.names}
        sizes = {name: sum(one.shape[0] * one.shape[1] for one in some) for name, some in matrices.items()}
        loads, ways = [0] * num_ranks, list[float]()
        for names in in_rounds(sizes, ROUND * num_ranks):
            takers = shared_out([matrix for name in names for matrix in matrices[name]], loads)
            products = [0.0] * num_ranks
            for matrix, rank in takers.items():
                products[rank] += orthogonal_s(config, rates, matrix)
            num_bytes = sum(sizes[name] for name in names) / num_ranks * narrow
            ways.append(rates.collective_s("all_to_all", num_bytes, num_ranks, span))
            seconds += max(*products, 2 * ways[-1])
        seconds += ways[0] + ways[-1]
    return seconds


def matrices_of(name: str, row: Parameter, run: ParameterRun) -> list[Matrix]:
    """Return the matrices of a parameter that the ranks of a group hold together: of experts those of this rank."""
    number = run.shape[0] if len(run.shape) == 3 else 1
    return [Matrix(name, expert, (row.shape[-2], row.shape[-1])) for expert in range(number)]


def orthogonal_s(config: Config, rates: Rates, matrix: Matrix) -> float:
    """Return the seconds of the products of all steps: a Gram matrix, its square, and both with the matrix.

    Of 1,024 x 4,096 those are 5 steps of 8.6, 2.1 and 8.6 GFLOP.
    """
    small, large = sorted(matrix.shape)
    dtype = "fp64" if config.train.precision == "fp64" else "bf16"
    products = (small, small, large), (small, small, small), (small, large, small)
    return config.optim.muon_steps * sum(rates.product_s("forward", dtype, sides) for sides in products)
