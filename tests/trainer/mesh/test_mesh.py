"""Groups of every rank of a layout: who is in them, and that their collectives reach exactly those."""

import ast
import re
from dataclasses import astuple, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import trainer
from ckptkit.model.layout import Coords, ParallelLayout
from ckptkit.model.tensor import Cut, Placement
from tests.trainer.support.ranks import run_ranks
from threefold.errors import UserError
from trainer.mesh.clock import Clock
from trainer.mesh.group import Group, Network
from trainer.mesh.layout import GROUPS, Axis, groups_needed, holders, nested
from trainer.mesh.mesh import ProcessMesh
from trainer.mesh.processes import Channel
from trainer.store.parameter import Parameter
from trainer.verify.threads import run_threads

CPU = torch.device("cpu")
SIZES = st.integers(1, 4)


def timeout_of(group: Group) -> float:
    """Seconds after which the group's collectives fail."""
    assert isinstance(group.transport, Channel)
    assert group.transport.handle.group_desc == group.name
    return group.transport.handle._get_backend(CPU).options._timeout.total_seconds()


def groups_of(rank: int, layout: ParallelLayout) -> dict[str, Any]:
    mesh = ProcessMesh(layout, rank, CPU, timeout_s=77)
    groups: dict[str, Any] = {}
    for name, group in {
        "world": mesh.world,
        "tp": mesh.tp,
        "dp": mesh.dp,
        **{name: mesh.along(GROUPS[name]) for name in ("tp.cp.dp", "cp.dp.ends")},
    }.items():
        total = group.all_reduce(torch.tensor([float(1 << rank)]))
        largest = group.start("all_reduce", torch.tensor([float(rank)]), "max").wait()
        shares = torch.zeros(2 * group.size)
        shares.view(group.size, 2)[group.index] = float(rank)
        group.start("all_gather", shares).wait()
        summed = group.share(group.start("reduce_scatter", torch.full((2 * group.size,), float(rank))).wait())
        own = group.start_scatter(torch.full((2 * group.size,), float(rank)), torch.zeros(2)).wait()
        assert own.equal(summed)
        assert group.start_scatter(torch.full((2 * group.size,), float(rank))).wait().equal(summed)
        assert group.start_gather(own).wait()[::2].equal(group.all_gather_rows(own)[:, 0])
        rows = group.all_gather_rows(torch.tensor([rank, -rank]))
        groups[name] = (group.ranks, total.item(), shares[::2].tolist(), summed.tolist(), rows.tolist(), largest.item())
        assert group.ranks[group.index] == rank
        assert group.size == 1 or timeout_of(group) == 77
        assert group.broadcast(torch.tensor([float(rank)]), source=group.size - 1).item() == group.ranks[-1]
    for links in (mesh.activations, mesh.gradients):
        pair = (links.previous, links.following)
        assert all(timeout_of(link) == 77 for link in pair if link)
        groups["links"] = tuple(link and link.ranks for link in pair)
        sends = [link.send(torch.tensor([rank]), to=1 - link.index) for link in pair if link]
        came = [link.receive(torch.tensor([-1]), source=1 - link.index).wait().item() for link in pair if link]
        assert came == [link.ranks[1 - link.index] for link in pair if link]
        assert [send.wait().item() for send in sends] == [rank] * len(came)
    return groups


@pytest.mark.ci
@pytest.mark.slow
def test_groups_of_tp2_pp3() -> None:
    layout = ParallelLayout(tp=2, pp=3)
    for rank, groups in enumerate(run_ranks(6, groups_of, layout)):
        at = layout.coords(rank)
        pipeline = [layout.rank(Coords(tp=at.tp, pp=stage)) for stage in range(3)]
        expected = {
            "world": list(range(6)),
            "tp": [layout.rank(Coords(tp=tp, pp=at.pp)) for tp in range(2)],
            "dp": [rank],
            "tp.cp.dp": [layout.rank(Coords(tp=tp, pp=at.pp)) for tp in range(2)],
            "cp.dp.ends": [rank] if at.pp == 1 else [pipeline[0], pipeline[2]],
        }
        for name, ranks in expected.items():
            total, rows = float(sum(ranks)), [[each, -each] for each in ranks]
            results = (tuple(ranks), sum(1 << r for r in ranks), ranks, [total] * 2, rows, max(ranks))
            assert groups[name] == results, (name, rank)
        pairs = [None, *pairwise(pipeline), None]
        assert groups["links"] == (pairs[at.pp], pairs[at.pp + 1])


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Layouts of up to 72 ranks, of which ep borrows some, with etp=1 those of tp too."""
    tp, cp, dp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2)), draw(SIZES), draw(st.integers(1, 3))
    etp = 1 if tp > 1 and draw(st.booleans()) else None
    lent = cp * dp * (tp if etp else 1)
    ep = draw(st.sampled_from([n for n in range(1 + bool(etp), lent + 1) if lent % n == 0]))
    return ParallelLayout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, etp=etp)


@given(layout=layouts(), data=st.data())
def test_groups_are_the_ranks_that_share_coordinates(layout: ParallelLayout, data: st.DataObject) -> None:
    tp, dp, pp = layout.tp, layout.dp, layout.pp
    places = {rank: layout.coords(rank) for rank in range(layout.world_size)}
    ends = {0, pp - 1}
    dp_shard = data.draw(st.sampled_from([0, *(size for size in range(1, dp + 1) if dp % size == 0)]))
    size = dp_shard or dp

    def lent(at: Coords) -> tuple[int, object]:
        """The place of a rank among those that ep borrows, in whose order neighbours differ along it; and the rest."""
        place, other = layout.rank(replace(at, pp=0)), at.pp
        return (place, other) if layout.etp else (place // tp, (at.tp, other))

    equal = {  # the ranks of a group are all that agree in this; None is in no group
        "world": lambda at: (),
        "tp": lambda at: (at.cp, at.dp, at.pp),
        "cp": lambda at: (at.tp, at.dp, at.pp),
        "dp": lambda at: (at.tp, at.cp, at.pp),
        "cp.dp": lambda at: (at.tp, at.pp),
        "tp.cp.dp": lambda at: at.pp,
        "kv.cp.dp": lambda at: (at.tp, at.pp),
        "cp.dp.ends": lambda at: at.tp if at.pp in ends else None,
        "ep": lambda at: (lent(at)[0] // layout.ep, lent(at)[1]),
        "edp": lambda at: (lent(at)[0] % layout.ep, lent(at)[1]),
        "tp.edp": lambda at: (lent(at)[0] % layout.ep, at.pp),
        "shard": lambda at: (at.tp, at.cp, at.dp // size, at.pp),
        "cp.shard": lambda at: (at.tp, at.dp // size, at.pp),
        "tp.cp.shard": lambda at: (at.dp // size, at.pp),
        "kv.cp.shard": lambda at: (at.tp, at.dp // size, at.pp),
        "replica": lambda at: (at.tp, at.cp, at.dp % size, at.pp),
        "kv": lambda at: astuple(at),
    }
    needed = groups_needed(layout, dp_shard=dp_shard)
    for name, key in equal.items():
        expected: dict[Any, list[int]] = {}
        for rank, at in places.items():
            if key(at) is not None:
                expected.setdefault(key(at), []).append(rank)
        assert sorted(map(sorted, needed[name])) == sorted(expected.values()), name
    for name in ("activations", "gradients"):
        for first, second in needed[name]:
            assert (places[first].pp + 1, places[first].tp) == (places[second].pp, places[second].tp)
        assert len(set(needed[name])) == len(needed[name]) == tp * layout.cp * dp * (pp - 1)
    links = {"activations", "gradients", "activations_back", "gradients_back"}
    assert needed.keys() == equal.keys() | links
    assert needed["activations_back"] == needed["gradients_back"] == []
    back = groups_needed(replace(layout, virtual=2))["activations_back"]
    assert len(set(back)) == len(back) == (tp * layout.cp * dp if pp > 1 else 0)
    for first, last in back:
        assert (places[first].pp, replace(places[first], pp=pp - 1)) == (0, places[last])


@given(layout=layouts(), data=st.data())
def test_shard_groups_and_their_replicas_are_the_holders(layout: ParallelLayout, data: st.DataObject) -> None:
    """Each holder is in one shard group and one group of replicas, whose places are those of one rank."""
    sizes = [size for size in range(1, layout.dp + 1) if layout.dp % size == 0]
    kv_replicas = data.draw(st.sampled_from([size for size in (1, 2) if layout.tp % size == 0]))
    needed = groups_needed(layout, kv_replicas, data.draw(st.sampled_from(sizes)))
    for name, axes in GROUPS.items():
        inner, outer = nested(axes)
        if not outer:
            assert (inner, Axis.DP in axes) == (axes, Axis.ENDS in axes)
            continue
        assert {*inner} - {*axes} == {Axis.SHARD}
        for ranks in needed[name]:
            inside = [group for group in needed[".".join(inner)] if {*group} & {*ranks}]
            across = [group for group in needed[".".join(outer)] if {*group} & {*ranks}]
            assert sorted(rank for group in inside for rank in group) == sorted(ranks)
            assert sorted(rank for group in across for rank in group) == sorted(ranks)
            assert all(len({*one} & {*other}) == 1 for one in inside for other in across)
            assert all(
                len({group.index(rank) for rank in each for group in inside if rank in group}) == 1 for each in across
            )


def test_a_shard_group_is_of_neighbours() -> None:
    needed = groups_needed(ParallelLayout(tp=2, dp=4), dp_shard=2)
    assert needed["tp.cp.shard"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert needed["cp.shard"] == needed["shard"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert needed["replica"] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_neighbours_hold_the_same_key_value_heads() -> None:
    layout = ParallelLayout(tp=4, dp=2)
    assert groups_needed(layout, kv_replicas=2)["kv.cp.dp"] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert groups_needed(layout, kv_replicas=4)["kv.cp.dp"] == groups_needed(layout)["tp.cp.dp"]
    assert groups_needed(layout)["kv.cp.dp"] == groups_needed(layout)["cp.dp"] == groups_needed(layout)["dp"]


PLACEMENTS = {
    "norm": Placement(0),
    "matrix": Placement(0, (Cut(0),)),
    "key-value heads": Placement(0, (Cut(0, max_parts=2),)),
    "one head": Placement(0, (Cut(0, max_parts=1),)),
    "experts": Placement(0, (Cut(0, "ep"), Cut(1, "tp"))),
    "biases of experts": Placement(0, (Cut(0, "ep"),)),
}


@given(layout=layouts(), name=st.sampled_from(sorted(PLACEMENTS)))
def test_holders_are_the_ranks_that_have_the_same_box(layout: ParallelLayout, name: str) -> None:
    """Whatever the cuts: the group follows from the placement, and so do those who contribute to its sums."""
    placement, kv_replicas = PLACEMENTS[name], max(layout.tp // (1 if name == "one head" else 2), 1)
    shape, places = (layout.ep * 4, 4), [layout.coords(rank) for rank in range(layout.world_size)]
    boxes = [(at.pp, placement.local_box(name, shape, layout, at)) for at in places]
    axes = holders(placement, layout)
    assert GROUPS[".".join(axes)] == axes
    groups = groups_needed(layout, kv_replicas)[".".join(axes)]
    for rank, box in enumerate(boxes):
        same = tuple(other for other, each in enumerate(boxes) if each == box)
        assert [ranks for ranks in groups if rank in ranks] == [same]
    row, is_cut = Parameter(shape, placement, None), any(cut.axis == "tp" for cut in placement.cuts)
    for rank, at in enumerate(places):
        before = [layout.rank(replace(at, tp=tp)) for tp in range(at.tp)]  # of the same tokens
        expected = is_cut or all(boxes[other] != boxes[rank] for other in before)
        assert row.contributes_on(layout, at) == expected


def test_waits_are_counted_by_the_axes_of_a_group() -> None:
    causes = {name: Group(name, (0,), 0, Clock(CPU), axes=axes).cause for name, axes in GROUPS.items()}
    assert [name for name, cause in causes.items() if cause == "comm_tp"] == ["tp", "kv"]
    assert [name for name, cause in causes.items() if cause == "comm_cp"] == ["cp"]
    assert {name for name, cause in causes.items() if cause == "comm_world"} == {"ep"}
    assert Group("world", (0,), 0, Clock(CPU)).cause == "comm_world"


def test_a_mesh_has_groups_along_cp_and_ep() -> None:
    def exchange(rank: int, *, network: Network) -> tuple[Any, ...]:
        mesh = ProcessMesh(ParallelLayout(tp=2, cp=2, ep=4, dp=2), rank, CPU, timeout_s=60, network=network)
        groups = (mesh.tp, mesh.cp, mesh.dp, mesh.ep, mesh.along((Axis.EDP,)))
        assert all(group.all_reduce(torch.tensor([rank])).item() == sum(group.ranks) for group in groups)
        return tuple(group.ranks for group in groups)

    found = run_threads(8, exchange)
    assert found[0] == ((0, 1), (0, 2), (0, 4), (0, 2, 4, 6), (0,))
    assert found[7] == ((6, 7), (5, 7), (3, 7), (1, 3, 5, 7), (7,))


def test_one_process_needs_no_process_group() -> None:
    mesh = ProcessMesh(ParallelLayout(), 0, CPU, timeout_s=60)
    assert not dist.is_initialized()
    assert mesh.coords.pp == mesh.layout.pp - 1
    assert mesh.world.all_reduce(torch.tensor([3.0])).item() == 3.0
    assert mesh.world.start("all_reduce", torch.tensor([3.0])).wait().item() == 3.0
    assert mesh.world.all_gather_rows(torch.tensor([3.0])).tolist() == [[3.0]]
    links: list[Group | None] = [mesh.activations.previous, mesh.gradients.following]
    assert links == [None, None]


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(UserError, match="layout tp2-pp2 needs 4 processes, started are 1") as caught:
        ProcessMesh(ParallelLayout(tp=2, pp=2), 0, CPU, timeout_s=60)
    assert "--nproc-per-node 4" in str(caught.value.hint)


def several_gathers(rank: int, *, network: Network | None = None) -> list[list[float]]:
    mesh = ProcessMesh(ParallelLayout(dp=2), rank, CPU, timeout_s=60, network=network)
    wholes = [torch.zeros(2), torch.zeros(4)]
    mesh.dp.start_gathers([torch.full((1,), rank + 1.0), torch.full((2,), rank + 5.0)], wholes).wait()
    return [whole.tolist() for whole in wholes]


def test_several_tensors_are_gathered_by_one_call() -> None:
    expected = [[1.0, 2.0], [5.0, 5.0, 6.0, 6.0]]
    assert run_threads(2, several_gathers) == [expected, expected]


@pytest.mark.ci
@pytest.mark.slow
def test_processes_gather_several_tensors_by_one_call() -> None:
    expected = [[1.0, 2.0], [5.0, 5.0, 6.0, 6.0]]
    assert run_ranks(2, several_gathers) == [expected, expected]


def test_collectives_go_through_groups() -> None:
    """torch.distributed is named where groups are carried, where ranks agree by bytes, and where they are started."""
    root = Path(trainer.__file__).parent
    groups = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) and re.search(r"torch.*\bdistributed\b", ast.unparse(node))
    }
    launches = {f"job/{name}.py" for name in ("launcher", "launch_faults", "launch_flags", "meeting", "passed_signals")}
    assert groups == {"mesh/processes.py", "job/ranks.py", "job/rendezvous.py", "job/roll_call.py", *launches}
