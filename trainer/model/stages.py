"""Which layers are on which stage: as many on each, so many as the configuration says, or by cost.

By cost the slowest stage is as fast as whole layers allow, if layers and head take as long as their arithmetic. The
last stage has the head, and so fewer layers.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

from ckptkit import ParallelLayout, Placement, rank_stages, stage_layers
from trainer.config import Config
from trainer.config.resolve import layers_by_hand, longest_row
from trainer.store.parameter import Parameter


def stage_ranges(config: Config, table: Mapping[str, Parameter], num_stages: int) -> list[range]:
    """Return the layers of each stage."""
    num_layers, how = config.model.num_layers, config.parallel.pipeline_layout
    if how == "even" or num_stages == 1:
        return [stage_layers(num_layers, num_stages, stage) for stage in range(num_stages)]
    sizes = layers_by_hand(how)
    if how == "cost":
        layer, head = layer_and_head_flops(config, table)
        sizes = sizes_by_cost(num_layers, num_stages, head / layer)
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]


def sizes_by_cost(num_layers: int, num_stages: int, head: float) -> list[int]:
    """Return the numbers of layers, if the last stage also has a head that takes as long as `head` layers.

    16 layers and a head of 3 on 2 stages are 9 and 7. Of cuts with equal slowest stages the last stage gets the most.
    """

    def slowest(last: int) -> float:
        return max(last + head, -(-(num_layers - last) // (num_stages - 1)))

    last = min(range(num_layers - num_stages + 1, 0, -1), key=slowest)
    others = [len(stage_layers(num_layers - last, num_stages - 1, stage)) for stage in range(num_stages - 1)]
    return [*others, last]


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
    layer, head = layer_and_head_flops(config, table)
    flops = [layer * len(layers) for layers in stage_ranges(config, table, num_stages)]
    return [*flops[:-1], flops[-1] + head]


def layer_and_head_flops(config: Config, table: Mapping[str, Parameter]) -> tuple[float, float]:
    """Return the operations a token of one layer and of the head, forward and backward.

    Attention counts in full, as in the longest rows.
    """
    model = config.model
    numel = sum(math.prod(row.shape) for name, row in table.items() if name.startswith("layers.0."))
    attention = 12.0 * model.num_heads * model.head_size * longest_row(config)
    return 6.0 * numel + attention, 6.0 * math.prod(table["head.weight"].shape)
