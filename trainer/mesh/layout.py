"""The groups of ranks that a layout needs, by name, and which of them hold one tensor. Pure: nothing is built here."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise

from ckptkit import Coords, Cut, ParallelLayout, Placement

Ranks = tuple[int, ...]


class Axis(StrEnum):
    """In what the ranks of a group differ. `KV`, `EDP`, `SHARD`, `REPLICA` and `ENDS` are parts of axes.

    Those of KV are neighbours along tp with the same key-value heads, of EDP those that hold the same experts for other
    samples, of ENDS the first and the last pipeline rank. SHARD are neighbours along dp that cut weights among them,
    REPLICA the ranks of dp that have the same place among such neighbours.
    """

    TP = "tp"
    KV = "kv"
    CP = "cp"
    EP = "ep"
    DP = "dp"
    EDP = "edp"
    SHARD = "shard"
    REPLICA = "replica"
    PP = "pp"
    ENDS = "ends"


Axes = tuple[Axis, ...]
OVER_DATA = (Axis.CP, Axis.DP)
# by name; equal groups have the first name
GROUPS: dict[str, Axes] = {
    ".".join(axes): axes
    for axes in (
        (Axis.TP,), (Axis.DP,), (Axis.CP,), OVER_DATA, (Axis.TP, *OVER_DATA), (Axis.KV, *OVER_DATA),
        (*OVER_DATA, Axis.ENDS), (Axis.EDP,), (Axis.TP, Axis.EDP), (Axis.EP,),
        (Axis.SHARD,), (Axis.CP, Axis.SHARD), (Axis.TP, Axis.CP, Axis.SHARD), (Axis.KV, Axis.CP, Axis.SHARD),
        (Axis.REPLICA,), (Axis.KV,),
    )
}  # fmt: skip
_EXPERTS = Placement("first", (Cut(0, "ep"),))


def holders(placement: Placement, layout: ParallelLayout, *, is_tied: bool = False) -> Axes:
    """Return the axes along which ranks hold the same part of a tensor; a tied one is on both ends of the pipeline.

    A norm is held along tp, cp and dp, a matrix that tp cuts along cp and dp.
    """
    parts = [cut.num_parts(layout.tp) for cut in placement.cuts if cut.axis == "tp"]
    along_tp = () if parts == [layout.tp] else (Axis.KV,) if parts else (Axis.TP,)
    over_data: Axes = {"ep": (Axis.EDP,), "cp": (Axis.DP,)}.get(placement.data_axis or "", OVER_DATA)
    if over_data == (Axis.EDP,) and layout.etp:
        along_tp = ()  # ep borrows tp ranks
    return (*along_tp, *over_data, *((Axis.ENDS,) if is_tied else ()))


def nested(axes: Axes) -> tuple[Axes, Axes]:
    """Return along which axes holders cut a tensor among them, and along which such groups of holders repeat it.

    Together they are the holders: cp.dp are cp.shard in each replica. What two stages hold is never cut.
    """
    if Axis.DP not in axes or Axis.ENDS in axes:
        return axes, ()
    return tuple(Axis.SHARD if axis == Axis.DP else axis for axis in axes), (Axis.REPLICA,)


@lru_cache(maxsize=16)  # plans ask for those of one layout again and again
def groups_needed(layout: ParallelLayout, kv_replicas: int = 1, dp_shard: int = 0) -> Mapping[str, Sequence[Ranks]]:
    """Return the ranks of every group, by the groups' name, in the order in which all ranks build them.

    A group is named by the axes along which its ranks differ: "tp.cp.dp" are a pipeline rank's, who hold norms and row
    biases. `kv_replicas` neighbours along tp have the same key-value heads, `dp_shard` along dp are a shard group, of
    0 all are. `activations` and `gradients` link each pipeline rank to the next; they are two, since opposite
    directions on one NCCL communicator would wait for each other. If ranks hold several stages `activations_back` and
    `gradients_back` link the last rank to the first. For tp2-pp2: tp [(0, 1), (2, 3)], dp [(0,), (1,), (2,), (3,)],
    tp.cp.dp [(0, 1), (2, 3)], nothing that links back, and (0, 2), (1, 3) for cp.dp.ends and the links.
    """
    places = [layout.coords(rank) for rank in range(layout.world_size)]
    columns = _ranks_along((Axis.PP,), layout, places)
    links: list[Ranks] = [pair for column in columns for pair in pairwise(column)]
    back: list[Ranks] = [(column[0], column[-1]) for column in columns if layout.virtual > 1 < layout.pp]
    return {
        "world": [tuple(range(layout.world_size))],
        **{name: _ranks_along(axes, layout, places, kv_replicas, dp_shard) for name, axes in GROUPS.items()},
        "activations": links,
        "gradients": links,
        "activations_back": back,
        "gradients_back": back,
    }


def _ranks_along(
    axes: Axes, layout: ParallelLayout, places: Sequence[Coords], kv_replicas: int = 1, dp_shard: int = 0
) -> list[Ranks]:
    """Return the groups of ranks that differ along some axes, of ranks at `places`: a column for each thing in common.

    For tp2-dp2 the ranks of a group along tp have dp in common, which is 0 0 1 1, and pp, which is 0 0 0 0.
    """
    common = {axis: [getattr(coords, axis) for coords in places] for axis in (Axis.TP, Axis.CP, Axis.DP, Axis.PP)}
    for axis in axes:
        if axis == Axis.KV:
            common[Axis.TP] = [tp // kv_replicas for tp in common[Axis.TP]]
        elif axis == Axis.SHARD:
            common[Axis.DP] = [dp // (dp_shard or layout.dp) for dp in common[Axis.DP]]
        elif axis == Axis.REPLICA:
            common[Axis.DP] = [dp % (dp_shard or layout.dp) for dp in common[Axis.DP]]
        elif axis in (Axis.EP, Axis.EDP):
            for borrowed in (*OVER_DATA, *((Axis.TP,) if layout.etp else ())):
                common.pop(borrowed, None)
            common[axis] = [
                _EXPERTS.data_group(layout, coords)[0] if axis == Axis.EP else layout.along("ep", coords)[0]
                for coords in places
            ]
        else:
            common.pop(Axis.PP if axis == Axis.ENDS else axis, None)
    groups: dict[object, list[int]] = {}
    for rank, key in enumerate(zip(*common.values(), strict=True)):
        if Axis.ENDS not in axes or places[rank].pp in (0, layout.pp - 1):
            groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
