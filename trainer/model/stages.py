"""Which layers are on which stage: as many on each, so many as the configuration says, or by cost.

By cost the slowest stage is as fast as whole layers allow, if layers and head take as long as their arithmetic. The
last stage has the head, and so fewer layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from ckptkit import ParallelLayout, Placement, rank_stages, stage_layers
from trainer.config import Config
from trainer.config.resolve import layers_by_hand
from trainer.model.flops import layers_and_head_flops
from trainer.store.parameter import Parameter


def stage_ranges(config: Config, table: Mapping[str, Parameter], num_stages: int) -> list[range]:
    """Return the layers of each stage."""
    num_layers, how = config.model.num_layers, config.parallel.pipeline_layout
    if how == "even" or num_stages == 1:
        return [stage_layers(num_layers, num_stages, stage) for stage in range(num_stages)]
    sizes = layers_by_hand(how)
    if how == "cost":
        sizes = sizes_by_cost(*layers_and_head_flops(config, table), num_stages)
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]


def sizes_by_cost(layers: Sequence[float], head: float, num_stages: int) -> list[int]:
    """Return the numbers of layers on stages, if each layer takes so long, and the last stage also has the head.

    16 equal layers and a head of 3 on 2 stages are 9 and 7. Of cuts with equal slowest stages the last stage gets the
    most, then the one before it, and so on.
    """
    ends = [0.0, *accumulate([*layers[:-1], layers[-1] + head])]
    slowest, stop, sizes = slowest_stages(ends, num_stages), len(layers), []
    for others in range(num_stages - 1, -1, -1):
        bound = slowest[others + 1][stop] * (1 + 1e-12)  # sums round
        start = next(start for start in range(others, stop) if ends[stop] - ends[start] <= bound)
        sizes.append(stop - start)
        stop = start
    return sizes[::-1]


def slowest_stages(ends: Sequence[float], num_stages: int) -> list[list[float]]:
    """Return how long the slowest stage takes in the best cut, by the number of stages and of the first layers.

    `ends` are the times of all layers before each, and of all.
    """
    slowest = [[0.0, *[math.inf] * (len(ends) - 1)]]
    for _ in range(num_stages):
        before = slowest[-1]
        slowest.append([
            min((max(before[start], ends[stop] - ends[start]) for start in range(stop)), default=math.inf)
            for stop in range(len(ends))
        ])  # fmt: skip
    return slowest


def with_layers(config: Config, table: Mapping[str, Parameter]) -> Config:
    """Return a configuration whose layers by cost are numbers, as the root of a checkpoint is to record them."""
    parallel = config.parallel
    if parallel.pipeline_layout != "cost" or parallel.pp == 1:
        return config
    ranges = stage_ranges(config, table, parallel.pp * parallel.virtual_stages)
    return replace(config, parallel=replace(parallel, pipeline_layout=",".join(str(len(each)) for each in ranges)))


def is_on_rank(placement: Placement, ranges: list[range], layout: ParallelLayout, pp: int) -> bool:
    """Return whether a pipeline rank holds a parameter on any of its stages."""
    stages, where = rank_stages(layout, pp), placement.stage
    if isinstance(where, str):
        return (0 if where == "first" else len(ranges) - 1) in stages
    return any(where in ranges[stage] for stage in stages)


def stage_flops(config: Config, table: Mapping[str, Parameter], num_stages: int) -> list[float]:
    """Return the operations a token of each stage: those of its layers, and of the head on the last one."""
    layers, head = layers_and_head_flops(config, table)
    flops = [sum(layers[number] for number in numbers) for numbers in stage_ranges(config, table, num_stages)]
    return [*flops[:-1], flops[-1] + head]
