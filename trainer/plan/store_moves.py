"""What travels for the weights of a rank in a step, bucket by bucket: sums of gradients, and gathers of weights."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trainer.config import Config
from trainer.config.resolve import keeps_gathered
from trainer.engine import DTYPES
from trainer.mesh.layout import GROUPS, nested
from trainer.ops.dtypes import wide_dtype
from trainer.ops.rounding import packed_bytes
from trainer.store.leases import LEASES
from trainer.store.plan import BucketPlan, ParameterRun, plan_buckets

NAMES = {axes: name for name, axes in GROUPS.items()}  # of groups


class StoreMove(NamedTuple):
    """A call for a bucket of weights or gradients, and how often a step makes it, on the mean of equal buckets."""

    kind: str
    group: str
    num_bytes: int
    times: float
    is_of_pass: bool


def store_moves(config: Config, runs: list[ParameterRun], places: Mapping[str, tuple[int, int]]) -> Iterator[StoreMove]:
    """Yield what a rank's buckets travel for; `places` are the sizes of groups by their names.

    At ZeRO stages 2 and 3 shard groups sum, and at 3 gather, for each micro-batch, and their replicas once a step.
    """
    parallel, number = config.parallel, config.train.gradient_accumulation_steps
    dtype = DTYPES[config.train.precision]
    cut, whole = list[BucketPlan](), list[BucketPlan]()
    for bucket in plan_buckets(runs, parallel.bucket_mib << 20, dtype.itemsize):
        axes = bucket.runs[0].holders
        sizes = places[NAMES[axes]][0], places[NAMES[nested(axes)[0]]][0]
        is_cut = parallel.zero_stage >= 2 and bucket.is_cut(*sizes, parallel.zero_whole_kib << 10)
        (cut if is_cut else whole).append(bucket)
    for bucket in whole:
        name = NAMES[bucket.runs[0].holders]
        size = bucket.size(places[name][0])
        yield StoreMove(*sum_of(config, size, name, places), 1, is_of_pass=False)
        if parallel.zero_stage:
            yield StoreMove("all_gather", name, size * dtype.itemsize, 1, is_of_pass=False)
    reads = gathers_by_unit(config, cut)
    for bucket in cut:
        axes, unit = bucket.runs[0].holders, bucket.runs[0].unit
        inner, outer = (NAMES[part] if part else "" for part in nested(axes))
        size = bucket.size(places[NAMES[axes]][0])
        yield StoreMove(*sum_of(config, size, inner, places), number, is_of_pass=True)
        yield StoreMove("all_gather", inner, size * dtype.itemsize, reads[unit], is_of_pass=reads[unit] > 1)
        if outer and places[outer][0] > 1:
            kept = size // places[inner][0]
            yield StoreMove(*sum_of(config, kept, outer, places), 1, is_of_pass=False)
            yield StoreMove("all_gather", outer, kept * dtype.itemsize, 1, is_of_pass=False)


def sum_of(config: Config, size: int, group: str, places: Mapping[str, tuple[int, int]]) -> tuple[str, str, int]:
    """Return the call that sums so many gradients over a group: its kind, the group and its bytes."""
    parallel, wide, num_ranks = config.parallel, wide_dtype(DTYPES[config.train.precision]).itemsize, places[group][0]
    if parallel.grad_reduce == "wide" or num_ranks == 1:
        return "reduce_scatter" if parallel.zero_stage else "all_reduce", group, size * wide
    return "all_to_all", group, 2 * size if parallel.grad_reduce == "bf16" else packed_bytes(size, num_ranks, wide)


def gathers_by_unit(config: Config, buckets: list[BucketPlan]) -> dict[str, float]:
    """Return how often a step gathers each unit: once, or for each pass those of a size that its leases have not kept.

    For example 8 equal layers with 2 leases and 4 micro-batches are gathered 8 + 7 * 6 = 50 times, 6.25 times each.
    """
    sizes: dict[str, int] = defaultdict(int)
    for bucket in buckets:
        sizes[bucket.runs[0].unit] += bucket.size(1)
    if config.parallel.zero_stage < 3 or keeps_gathered(config):
        return dict.fromkeys(sizes, 1.0)
    equal, passes = Counter(sizes.values()), 2 * config.train.gradient_accumulation_steps
    return {unit: 1 + (passes - 1) * max(1 - LEASES / equal[size], 0.0) for unit, size in sizes.items()}
