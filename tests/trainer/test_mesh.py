"""Groups of every rank of a layout: who is in them, and that their collectives reach exactly those."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptkit.model.layout import Coords, ParallelLayout
from tests.trainer.support.ranks import run_ranks
from threefold.errors import UserError
from trainer.mesh import Link, ProcessMesh

CPU = torch.device("cpu")


def timeout_of(handle: dist.ProcessGroup) -> float:
    """Seconds after which the group's collectives fail."""
    return handle._get_backend(CPU).options._timeout.total_seconds()


def groups_of(rank: int, layout: ParallelLayout) -> dict[str, Any]:
    mesh = ProcessMesh(layout, rank, CPU, timeout_s=77)
    found: dict[str, Any] = {}
    for name in ("world", "tp", "dp", "pp", "ends"):
        group = getattr(mesh, name)
        total = group.all_reduce(torch.tensor([float(1 << rank)]))
        shares = torch.zeros(2 * group.size)
        shares.view(group.size, 2)[group.index] = float(rank)
        group.all_gather(shares)
        summed = torch.full((2 * group.size,), float(rank))
        group.reduce_scatter(summed)
        found[name] = (group.ranks, total.item(), shares[::2].tolist(), summed.chunk(group.size)[group.index].tolist())
        assert group.ranks[group.index] == rank
        assert group.handle is None or timeout_of(group.handle) == 77
        assert group.broadcast(torch.tensor([float(rank)]), source=group.size - 1).item() == group.ranks[-1]
    for links in (mesh.activations, mesh.gradients):
        assert all(timeout_of(link.handle) == 77 for link in (links.previous, links.following) if link)
        found["links"] = tuple(link and link.peer for link in (links.previous, links.following))
    return found


@pytest.mark.slow
def test_groups_of_tp2_pp3() -> None:
    layout = ParallelLayout(tp=2, pp=3)
    for rank, found in enumerate(run_ranks(6, groups_of, layout)):
        at = layout.coords(rank)
        pipeline = [layout.rank(Coords(tp=at.tp, pp=stage)) for stage in range(3)]
        expected = {
            "world": list(range(6)),
            "tp": [layout.rank(Coords(tp=tp, pp=at.pp)) for tp in range(2)],
            "dp": [rank],
            "pp": pipeline,
            "ends": [rank] if at.pp == 1 else [pipeline[0], pipeline[2]],
        }
        for name, ranks in expected.items():
            total = float(sum(ranks))
            assert found[name] == (tuple(ranks), sum(1 << r for r in ranks), ranks, [total] * 2), (name, rank)
        neighbours = dict(enumerate(pipeline))
        assert found["links"] == (neighbours.get(at.pp - 1), neighbours.get(at.pp + 1))


def test_one_process_needs_no_process_group() -> None:
    mesh = ProcessMesh(ParallelLayout(), 0, CPU, timeout_s=60)
    assert not dist.is_initialized()
    assert mesh.is_first_stage
    assert mesh.is_last_stage
    assert mesh.world.all_reduce(torch.tensor([3.0])).item() == 3.0
    links: list[Link | None] = [mesh.activations.previous, mesh.gradients.following]
    assert links == [None, None]


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(UserError, match="layout tp2-pp2 needs 4 processes, started are 1") as caught:
        ProcessMesh(ParallelLayout(tp=2, pp=2), 0, CPU, timeout_s=60)
    assert "--nproc-per-node 4" in str(caught.value.hint)
