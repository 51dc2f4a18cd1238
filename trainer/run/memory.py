"""The memory that a rank needs on its device, part by part, by arithmetic alone.

Parameters, gradients and optimizer state follow from the parameter table; padding aside, they are what a rank
allocates. Activations are what the layers keep for the backward passes of the micro-batches in flight, temporaries what
the layer whose pass runs takes beside that. NCCL's buffers and CUDA's context are not torch's, and are as measured.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from ckptkit import Coords
from trainer.config import Config
from trainer.config.eight_bits import eight_bit_names, keeps_weights
from trainer.config.resolve import keeps_gathered, kv_replicas, layout_of
from trainer.engine import DTYPES
from trainer.mesh.layout import GROUPS, Axes, Axis, groups_needed, nested
from trainer.model.table import local_runs, parameter_table
from trainer.ops.dtypes import wide_dtype
from trainer.ops.momentum import AT_ONCE
from trainer.ops.muon import direction_dtype
from trainer.ops.rounding import BLOCK, rounding_bytes
from trainer.run.activations import activation_bytes
from trainer.run.temporaries import temporary_bytes
from trainer.store.leases import LEASES, num_leased
from trainer.store.muon import ROUND
from trainer.store.optimizers import OPTIMIZERS
from trainer.store.plan import BucketPlan, ParameterRun, plan_buckets

MIB = 1 << 20
CONTEXT_BYTES = 640 * MIB  # CUDA's context with the kernels that a run loads, and cuBLAS's workspaces
PAIR_BYTES, GROUP_BYTES = 544 * MIB, 688 * MIB  # a communicator of two ranks, and one of more: NCCL's issue 964
PEER_BYTES, MOST_PEERS = 470 * MIB, 7  # what an all-to-all adds for each rank of the node: NCCL's issue 1685


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank of one pipeline stage needs on its device."""

    parameters: int
    gradients: int
    optimizer: int
    leases: int
    activations: int
    temporaries: int
    copies: int = 0
    groups: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        """Return the bytes in all."""
        return sum(asdict(self).values())

    @property
    def of_torch(self) -> int:
        """Return the bytes that torch allocates, beside which are NCCL's and CUDA's own."""
        return self.total - self.groups - self.context

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of each part that takes any, by what it is."""
        names = {"copies": "weights in eight bits", "groups": "NCCL buffers", "context": "CUDA context"}
        return {names.get(name, name): size for name, size in asdict(self).items() if size}

    def __str__(self) -> str:
        parts = " + ".join(f"{size_text(size)} {name}" for name, size in self.parts.items())
        return f"{size_text(self.total)} = {parts} (estimated)"


def rank_memory(config: Config, pp: int) -> RankMemory:
    """Return the memory of a rank on one pipeline stage of a resolved configuration."""
    parallel, layout = config.parallel, layout_of(config)
    dtype = DTYPES[config.train.precision]
    wide = wide_dtype(dtype)
    groups = groups_needed(layout, kv_replicas(config), parallel.dp_shard)
    sizes = {axes: len(groups[name][0]) for name, axes in GROUPS.items()}
    runs = local_runs(config, parameter_table(config), layout, Coords(pp=pp))
    optimizer = optimizer_bytes(config, runs)
    if config.optim.offload and config.train.device != "cpu":
        optimizer = min(optimizer, config.optim.offload_window_mib << 20)
    parameters = gradients = travelling = of_rounding = 0
    leased: dict[str, int] = {}  # elements of the buckets that are cut, by unit
    buckets = plan_buckets(runs, parallel.bucket_mib << 20, dtype.itemsize)
    for bucket in buckets:
        axes = bucket.runs[0].holders
        num_holders, num_inner = sizes[axes], sizes[nested(axes)[0]]
        size = bucket.size(num_holders)
        is_cut = parallel.zero_stage >= 2 and bucket.is_cut(num_holders, num_inner, parallel.zero_whole_kib << 10)
        kept = size // num_inner if is_cut else size
        parameters += kept if parallel.zero_stage >= 3 else size
        gradients += kept
        travelling += kept if num_holders > (num_inner if is_cut else 1) else 0  # once a step
        if parallel.grad_reduce == "int8" and num_holders > 1:
            of_rounding = max(of_rounding, rounding_bytes(size, num_inner if is_cut else num_holders, wide.itemsize))
        leased[bucket.runs[0].unit] = leased.get(bucket.runs[0].unit, 0) + size * is_cut
    of_gradients = num_leased(leased.values(), LEASES)
    most = len(leased) if keeps_gathered(config) else LEASES
    of_parameters = num_leased(leased.values(), most) if parallel.zero_stage >= 3 else 0
    bits = {"wide": 0.0, "bf16": 16.0, "int8": 8 * (1 + wide.itemsize / BLOCK)}[parallel.grad_reduce]
    exchanged = 2 * int((travelling + of_gradients) * bits / 8)  # what this rank sends and what it receives
    is_gpu, held = config.train.device != "cpu", {run.holders for run in runs}
    used = (
        held
        | {part for axes in held for part in nested(axes) if part}
        | {(Axis.TP,), (Axis.DP,), (Axis.CP,), (Axis.EP,)}
    )
    exchanging = used if parallel.grad_reduce != "wide" else {(Axis.CP,)}
    if parallel.moe_dispatch == "alltoall":
        exchanging = exchanging | {(Axis.EP,)}
    most_peers = max(sizes[axes] for axes in exchanging) - 1
    activations = activation_bytes(config, pp)
    of_update = update_bytes(config, buckets, sizes)  # while no pass has activations
    return RankMemory(
        parameters=parameters * dtype.itemsize,
        gradients=gradients * wide.itemsize + exchanged,
        optimizer=optimizer,
        leases=of_parameters * dtype.itemsize + of_gradients * wide.itemsize,
        activations=activations,
        temporaries=max(temporary_bytes(config, pp) + of_rounding, of_update - activations),
        copies=copy_bytes(config, runs),
        groups=group_bytes(groups, layout.rank(Coords(pp=pp)), used, most_peers) if is_gpu else 0,
        context=CONTEXT_BYTES if is_gpu else 0,
    )


def optimizer_bytes(config: Config, runs: Sequence[ParameterRun]) -> int:
    """Return what a rank has of masters that are apart, and of moments, wherever they are."""
    parallel, dtype = config.parallel, DTYPES[config.train.precision]
    wide = wide_dtype(dtype)
    groups = groups_needed(layout_of(config), kv_replicas(config), parallel.dp_shard)
    sizes = {axes: len(groups[name][0]) for name, axes in GROUPS.items()}
    moments = 2 if config.optim.moments == "bf16" else wide.itemsize
    master = 0 if wide == dtype else 2 if config.optim.master == "split" else wide.itemsize
    return sum(
        (-(-run.numel // sizes[run.holders]) if parallel.zero_stage else run.numel)
        * (len(OPTIMIZERS[run.optimizer].states) * moments + master)
        for run in runs
    )


def offloaded_bytes(config: Config, pp: int) -> int:
    """Return what a rank of a stage has of the optimizer in the host's memory."""
    if not config.optim.offload or config.train.device == "cpu":
        return 0
    return optimizer_bytes(config, local_runs(config, parameter_table(config), layout_of(config), Coords(pp=pp)))


def update_bytes(config: Config, buckets: Sequence[BucketPlan], sizes: Mapping[Axes, int]) -> int:
    """Return what an update takes besides the state: nothing for AdamW, whose kernel keeps no temporaries."""
    optim, wide = config.optim, wide_dtype(DTYPES[config.train.precision])
    numbers: dict[str, list[int]] = {}
    for bucket in buckets:
        size = bucket.size(sizes[bucket.runs[0].holders])
        owned = -(-size // sizes[bucket.runs[0].holders]) if config.parallel.zero_stage else size
        numbers.setdefault(bucket.runs[0].optimizer, []).append(owned)
    if "muon" in numbers:
        return direction_dtype(wide).itemsize * _matrix_elements(buckets, sizes, sum(numbers["muon"]))
    if optim.name == "adamw":
        return 0
    num_lists = 3 if optim.name == "lion" or optim.nesterov else 2  # gradients, a product, and steps
    most = (max if config.parallel.overlap_param_gather else sum)(numbers[optim.name])
    return num_lists * wide.itemsize * min(most, AT_ONCE + max(numbers[optim.name]))


def _matrix_elements(buckets: Sequence[BucketPlan], sizes: Mapping[Axes, int], num_owned: int) -> int:
    """Return how many elements of whole matrices an update has at once, of all that a rank owns of matrices.

    While those of one shape are made orthogonal, they are there three times, with two Gram matrices. What arrived of
    the round and what is returned is there too. With more rounds so is what is sent of the next and what is back of
    the one before: twice, if they are exchanged with other ranks.
    """
    by_shape, num_ranks = Counter[tuple[int, int]](), 1
    for run in (run for bucket in buckets for run in bucket.runs if run.optimizer == "muon"):
        num_ranks = max(num_ranks, sizes[run.holders])
        for shape in run.shapes.values():
            by_shape[shape[-2], shape[-1]] += -(-math.prod(shape) // sizes[run.holders])
    travelling = min(num_owned, ROUND)
    at_once = max(3 * some + 2 * some * min(shape) // max(shape) for shape, some in by_shape.items())
    others = 2 * (1 if num_ranks == 1 else 2) if num_owned > ROUND else 0
    return (2 + others) * travelling + min(at_once, 5 * travelling)


def copy_bytes(config: Config, runs: Sequence[ParameterRun]) -> int:
    """Return what weights in eight bits take that are kept, as they are and transposed."""
    names = eight_bit_names(config) if keeps_weights(config) else set()
    return sum(2 * run.numel for run in runs if run.names[0] in names)


def group_bytes(
    groups: Mapping[str, Sequence[tuple[int, ...]]], rank: int, used: Collection[Axes], num_peers: int
) -> int:
    """Return what NCCL takes for the groups of a rank: those along `used` axes, all ranks, and links of the pipeline.

    Equal groups along axes are one. This rank exchanges with `num_peers` others, gradients or heads.
    """
    members_here = {
        ((), ranks) if name in GROUPS else (name, ranks)
        for name, members in groups.items()
        for ranks in members
        if rank in ranks and len(ranks) > 1 and GROUPS.get(name, ()) in {(), *used}
    }
    return sum(PAIR_BYTES if len(ranks) == 2 else GROUP_BYTES for _, ranks in members_here) + PEER_BYTES * min(
        num_peers, MOST_PEERS
    )


def arena_bytes(config: Config, pp: int) -> int:
    """Return the host memory through which a rank of a stage saves what it owns, or a window of that."""
    wide = wide_dtype(DTYPES[config.train.precision]).itemsize
    moments = 2 if config.optim.moments == "bf16" else wide
    layout = layout_of(config)
    groups = groups_needed(layout, kv_replicas(config))
    sizes = {axes: len(groups[name][0]) for name, axes in GROUPS.items()}
    whole = sum(
        -(-run.numel // sizes[run.holders]) * (wide + len(OPTIMIZERS[run.optimizer].states) * moments)
        for run in local_runs(config, parameter_table(config), layout, Coords(pp=pp))
    )
    return min(whole, config.checkpoint.window_mib * MIB or whole)


def size_text(num_bytes: int) -> str:
    """Return a size in the unit that fits it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
