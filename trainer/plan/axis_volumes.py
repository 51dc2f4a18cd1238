"""What a rank's calls move in a step, by the axis of their groups, and how long that takes with nothing beside it.

They are the moves that the times of a plan are of: those of tokens read off traces, those of weights by bucket. The
rank is of the last pipeline rank, which has the head; the few bytes of loss, norm and counts are left out.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ckptkit import Coords, rank_stages
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.model.stages import stage_ranges
from trainer.model.table import local_runs, parameter_table
from trainer.plan.rates import Rates
from trainer.plan.step_time import group_places
from trainer.plan.store_moves import store_moves
from trainer.plan.volumes import Volumes
from trainer.run.activations import Sizes


@dataclass(frozen=True, slots=True)
class AxisVolume:
    """Bytes of the tensors of a step's calls along an axis, and their seconds at `bytes_per_s` of the bus."""

    axis: str
    num_bytes: int
    seconds: float
    bytes_per_s: float


def axis_volumes(config: Config, rates: Rates, volumes: Volumes) -> list[AxisVolume]:
    """Return the volume of each axis along which a rank of a resolved run moves anything."""
    sizes: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    carried: dict[str, float] = defaultdict(float)
    for axis, kind, num_bytes, times, place in moves_of(config, volumes):
        sizes[axis] += num_bytes * times
        seconds[axis] += times * rates.collective_s(kind, num_bytes, *place)
        carried[axis] += times * rates.carried_bytes(kind, num_bytes, place[0])
    return [
        AxisVolume(axis, round(size), seconds[axis], carried[axis] / seconds[axis])
        for axis, size in sizes.items()
        if seconds[axis]
    ]


def moves_of(config: Config, volumes: Volumes) -> Iterator[tuple[str, str, int, float, tuple[int, int]]]:
    """Yield axis, kind, bytes and times of calls, with the size of their group and how far it reaches."""
    table, layout, places = parameter_table(config), layout_of(config), group_places(config)
    pp, number = layout.pp - 1, config.train.gradient_accumulation_steps
    ranges = stage_ranges(config, table, layout.num_stages)
    stages = rank_stages(layout, pp)
    num_layers = sum(len(ranges[stage]) for stage in stages)
    for moves, times in ((volumes.layer, num_layers * number), (volumes.ends, number)):
        for move, count in moves.items():
            yield axis_of(move.group), move.kind, move.num_bytes, count * times, places[move.group]
    for kind, group, num_bytes, often, _ in store_moves(
        config, local_runs(config, table, layout, Coords(pp=pp)), places
    ):
        yield axis_of(group), kind, num_bytes, often, places[group]
    if layout.pp > 1:
        sent = sum((stage < layout.num_stages - 1) + (stage > 0) for stage in stages)
        yield "pp", "send", Sizes.of(config).stream, sent * number, (2, layout.world_size // layout.pp + 1)


def axis_of(group: str) -> str:
    """Return the axis of a group, of several the one that dp is among.

    >>> axis_of("tp.cp.dp"), axis_of("cp.shard"), axis_of("tp")
    ('dp', 'shard', 'tp')
    """
    return group.rpartition(".")[2]
