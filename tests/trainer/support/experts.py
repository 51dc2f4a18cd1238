"""The sums of gradients of a store that holds experts, on ranks of any layout, against sums that know no ranks.

Each rank has gradients of its own samples, which are drawn. What tp does not cut has the same ones on all tp ranks. The
gradient of an expert on a rank is what all ranks of its ep group ask of it, since their tokens come to it.
"""

from dataclasses import replace

import torch

from ckptkit.model.layout import Coords, ParallelLayout
from ckptkit.model.tensor import Box, Cut, Piece, Placement, TensorInfo
from tests.support.checks import require_equal
from tests.trainer.support.parity import config_for
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh
from trainer.model.table import local_runs
from trainer.ops.philox import normal_
from trainer.store.options import StoreOptions
from trainer.store.parameter import Parameter
from trainer.store.store import ParameterStore
from trainer.verify.threads import run_threads
from trainer.verify.whole import assembled

TABLE = {
    f"layers.0.{name}": Parameter(shape, Placement(0, cuts), 0.1)
    for name, shape, cuts in (
        ("norm.weight", (24,), ()),
        ("matrix.weight", (8, 6), (Cut(0),)),
        ("experts.up", (8, 12, 4), (Cut(0, "ep"), Cut(1))),
        ("experts.bias", (8, 12), (Cut(0, "ep"),)),
    )
}


def drawn(name: str, samples: int, box: Box | None = None) -> torch.Tensor:
    """What some samples ask of a parameter, or of a box of it."""
    shape = TABLE[name].shape
    place = box or Box((0,) * len(shape), shape)
    return normal_(torch.empty(place.shape, dtype=torch.float64), samples, name, shape, place.offset)


def is_expert(name: str) -> bool:
    return TABLE[name].placement.data_axis == "ep"


def samples_of(name: str, layout: ParallelLayout, coords: Coords) -> int:
    """The number of a rank's samples; with etp=1 tp ranks bring tokens of their own to the experts."""
    place = coords.dp * layout.cp + coords.cp
    return place * layout.tp + coords.tp if layout.etp and is_expert(name) else place


def sums_on(rank: int, layout: ParallelLayout, *, network: Network | None = None) -> tuple[torch.Tensor, list[Piece]]:
    """The squared norms over all ranks, and the sums that this rank owns."""
    mesh, wide = ProcessMesh(layout, rank, torch.device("cpu"), timeout_s=60, network=network), torch.float64
    runs = local_runs(config_for("llama", ParallelLayout()), TABLE, layout, mesh.coords)
    options = StoreOptions(
        wide, wide, wide, 0, 1 << 20, zero_stage=1, whole_bytes=0, keeps_gathered=False, with_optimizer=True,
        splits_master=False, muon_scale="original", overlaps_reduce=False, overlaps_gather=False,
    )  # fmt: skip
    store = ParameterStore(TABLE, runs, mesh, options)
    boxes = {name: row.placement.local_box(name, row.shape, layout, mesh.coords) for name, row in TABLE.items()}
    for bucket in store.buckets:
        for name, _, offset in bucket.plan.parameters():
            row = replace(TABLE[name], is_partial=bool(layout.etp) and is_expert(name))
            if row.contributes_on(layout, mesh.coords):
                ranks = mesh.ep.ranks if is_expert(name) else [rank]
                parts = [drawn(name, samples_of(name, layout, layout.coords(each)), boxes[name]) for each in ranks]
                bucket.gradients[offset:][: boxes[name].numel].copy_(sum(parts).flatten())
        bucket._reducing = bucket.group.start("reduce_scatter", bucket.gradients)
    squares = mesh.world.all_reduce(store.finish_reduce())
    return squares, [
        Piece(each.name, boxes[each.name], each.start, each.stop, bucket.gradients[bucket.owned[0] + each.offset :])
        for bucket in store.buckets
        for each in bucket.owned_segments
    ]


def compare_experts(layout: ParallelLayout) -> None:
    """Each element of each sum has one owner, and is what all samples ask."""
    summed = run_threads(layout.world_size, sums_on, layout)
    infos = [TensorInfo(name, "F64", row.shape, row.placement) for name, row in TABLE.items()]
    pieces = [
        Piece(each.name, each.box, each.start, each.stop, each.data[: each.stop - each.start])
        for _, own in summed
        for each in own
    ]
    sums = assembled(infos, pieces)
    for number, name in enumerate(TABLE):
        places = {samples_of(name, layout, layout.coords(rank)) for rank in range(layout.world_size)}
        expected = sum(drawn(name, each) for each in places)
        require_equal(torch.allclose(sums[name], expected, rtol=0, atol=1e-12), f"the sum of {name}")
        for rank, (squares, _) in enumerate(summed):
            gap = abs(squares[number].item() - expected.square().sum().item())
            require_equal(gap < 1e-9, f"rank {rank}: the norm of {name}")
