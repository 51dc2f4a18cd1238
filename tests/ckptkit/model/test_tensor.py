"""Placement: what a rank holds under any layout, against arrays that are split by hand, and who of several saves it."""

import math
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.model.layout import Axis, Coords, ParallelLayout, rank_stages, stage_layers, stage_rank
from ckptkit.model.tensor import Box, Cut, Placement, TensorInfo
from tests.ckptkit.plan.test_cover import faults_of
from tests.ckptkit.plan.test_load_plan import load, save
from tests.ckptkit.support.checkpoints import cut
from tests.ckptkit.support.model_tables import rank_chunks, values
from threefold.errors import UserError

LAYERS = 5


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Layouts of up to 48 ranks."""
    cp, dp = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (3, 2)]))
    ep = draw(st.sampled_from([n for n in range(1, dp * cp + 1) if dp * cp % n == 0]))
    tp, pp, virtual = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    if tp > 1 and draw(st.booleans()):
        ep = draw(st.sampled_from([n for n in range(2, dp * cp * tp + 1) if dp * cp * tp % n == 0]))
        return ParallelLayout(tp, cp, ep, dp, pp, virtual, etp=1)
    return ParallelLayout(tp, cp, ep, dp, pp, virtual)


@st.composite
def tensors_for(draw: st.DrawFn, *layouts: ParallelLayout) -> list[TensorInfo]:
    """Tensors that all the layouts can cut, of any cuts: grids, two of one dim, few parts, padding."""
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        axes = draw(st.sampled_from([(), ("tp",), ("ep",), ("cp",), ("tp", "ep"), ("ep", "tp"), ("cp", "tp")]))
        round_to = draw(st.sampled_from([None, None, 1, 3])) if axes else None
        shape = [draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 3)))]
        cuts = []
        for axis in axes:
            sizes = [getattr(layout, axis) for layout in layouts]
            most = draw(
                st.sampled_from([None, *[n for n in (1, 2, 4) if all(n % s == 0 or s % n == 0 for s in sizes)]])
            )
            cuts.append(Cut(draw(st.integers(0, len(shape) - 1)), axis, most))
            if round_to is None:
                shape[cuts[-1].dim] *= math.lcm(most or 1, *(cuts[-1].num_parts(size) for size in sizes))
        stage = draw(st.sampled_from(["first", "last", *range(LAYERS)]))
        tensors.append(TensorInfo(f"w{number}", "F32", tuple(shape), Placement(stage, tuple(cuts), round_to)))
    return tensors


def size_by_hand(info: TensorInfo, layout: ParallelLayout, axis: Axis) -> int:
    """The size of an axis for a tensor: with etp=1 that of tp is 1 for experts."""
    is_expert = "ep" in [cut.axis for cut in info.placement.cuts]
    return 1 if axis == "tp" and is_expert and layout.etp == 1 else int(getattr(layout, axis))


def index_by_hand(layout: ParallelLayout, axis: Axis, rank: int) -> int:
    """The place of a rank along an axis, by listing all ranks: tp runs fastest, then cp, dp, pp."""
    grid = np.arange(layout.world_size).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    _, dp, cp, tp = (int(place[0]) for place in np.nonzero(grid == rank))
    if axis == "ep" and layout.etp == 1:
        return rank % (layout.world_size // layout.pp) % layout.ep
    if axis == "ep":
        return [number % layout.ep for number in range(layout.dp * layout.cp)][dp * layout.cp + cp]
    return {"tp": tp, "cp": cp}[axis]


def box_by_hand(info: TensorInfo, layout: ParallelLayout, rank: int) -> tuple[list[np.ndarray], list[int]]:
    """The indexes that a rank holds along each dim, and how many it has room for: equal rows, cut by cut."""
    held_layers, room = [], []
    for dim, length in enumerate(info.shape):
        cuts = [each for each in info.placement.cuts if each.dim == dim]
        parts = [min(size_by_hand(info, layout, each.axis), each.max_parts or 99) for each in cuts]
        step = 1 if not cuts else info.placement.round_to or 1
        size = next(n for n in range(0, length + step, step) if n * math.prod(parts) >= length)
        indexes = np.arange(size * math.prod(parts))
        for each, num in zip(cuts, parts, strict=True):
            num_ranks = size_by_hand(info, layout, each.axis)
            holders = np.repeat(np.arange(num), num_ranks // num)
            indexes = indexes.reshape(num, -1)[holders[index_by_hand(layout, each.axis, rank) % num_ranks]]
        held_layers.append(indexes[indexes < length])
        room.append(size)
    return held_layers, room


def box_of(info: TensorInfo, layout: ParallelLayout, rank: int) -> Box:
    return info.placement.local_box(info.name, info.shape, layout, layout.coords(rank))


@given(data=st.data(), layout=layouts())
def test_each_rank_holds_what_splitting_by_hand_leaves_it(data: st.DataObject, layout: ParallelLayout) -> None:
    for info in data.draw(tensors_for(layout)):
        for rank in range(layout.world_size):
            kept, room = box_by_hand(info, layout, rank)
            box = box_of(info, layout, rank)
            assert [list(range(a, a + n)) for a, n in zip(box.offset, box.shape, strict=True)] == [
                list(k) for k in kept
            ]
            assert list(info.placement.live_shape(info.name, info.shape, layout)) == room


@given(data=st.data(), layout=layouts())
def test_each_element_is_stored_once_by_a_rank_that_holds_it(data: st.DataObject, layout: ParallelLayout) -> None:
    tensors = data.draw(tensors_for(layout))
    ranks = [rank_chunks(tensors, LAYERS, layout, layout.coords(rank)) for rank in range(layout.world_size)]
    assert faults_of(tensors, ranks) == {}
    for rank, chunks in enumerate(ranks):
        for info, box, _, _ in chunks:
            assert info.placement.on_stage(LAYERS, layout, layout.coords(rank).pp)
            assert info.placement.is_first_replica(layout, layout.coords(rank))
            assert box == box_of(info, layout, rank)


@given(data=st.data(), first=layouts(), second=layouts())
def test_each_rank_of_any_layout_loads_its_box(
    data: st.DataObject, first: ParallelLayout, second: ParallelLayout
) -> None:
    tensors = data.draw(tensors_for(first, second))
    arrays = values(tensors)
    ranks = [rank_chunks(tensors, LAYERS, first, first.coords(rank)) for rank in range(first.world_size)]
    files, indexes = save(ranks, tensors, arrays)
    for rank in range(second.world_size):
        pp = second.coords(rank).pp
        held = [info for info in tensors if info.placement.on_stage(LAYERS, second, pp)]
        wanted = [(info, box, 0, box.numel) for info in held for box in [box_of(info, second, rank)]]
        targets, _ = load(wanted, tensors, files, indexes) if wanted else ([], None)
        for (info, box, start, stop), target in zip(wanted, targets, strict=True):
            assert target.tobytes() == cut(arrays[info.name], box, start, stop).tobytes()


@given(data=st.data(), layout=layouts())
def test_ranks_of_one_box_are_a_data_group_of_each_replica(data: st.DataObject, layout: ParallelLayout) -> None:
    """Of those that hold one box, the first replicas number themselves 0 to the size of their data group."""
    for info in data.draw(tensors_for(layout)):
        num_stage = layout.world_size // layout.pp
        boxes = sorted((str(box_by_hand(info, layout, rank)), rank) for rank in range(num_stage))
        whole = [rank for box, rank in boxes if "[]" not in box and "array([], " not in box]
        of_box = {rank: box for box, rank in boxes}
        for _, same in groupby(whole, of_box.__getitem__):
            ranks = [layout.coords(rank) for rank in same]
            groups = [info.placement.data_group(layout, coords) for coords in ranks]
            first = [
                group for group, c in zip(groups, ranks, strict=True) if info.placement.is_first_replica(layout, c)
            ]
            assert sorted(first) == [(n, len(first)) for n in range(len(first))]
            assert {size for _, size in groups} == {len(first)}
            assert len(ranks) % len(first) == 0


def test_two_key_heads_over_four_ranks() -> None:
    heads, layout = TensorInfo("k", "F32", (4, 3), Placement(0, (Cut(0, max_parts=2),))), ParallelLayout(tp=4, dp=2)
    assert [box_of(heads, layout, rank).offset[0] for rank in range(4)] == [0, 0, 2, 2]
    assert [heads.placement.is_first_replica(layout, Coords(tp=tp)) for tp in range(4)] == [True, False, True, False]
    ranks = [rank_chunks([heads], 1, layout, layout.coords(rank)) for rank in range(8)]
    assert [[info.name for info, *_ in chunks] for chunks in ranks] == [["k"], [], ["k"], []] + [[]] * 4
    ranks[1] = [(heads, box_of(heads, layout, 1), 0, 6)]
    assert "stored more than once" in faults_of([heads], ranks)["k"]


def test_experts_by_ep_and_tp_over_eight_ranks() -> None:
    """Of dp ranks 0 to 3, the even ones hold the first expert, the odd ones the second."""
    up = TensorInfo("up", "F32", (2, 4, 3), Placement(0, (Cut(0, "ep"), Cut(1, "tp"))))
    layout = ParallelLayout(tp=2, ep=2, dp=4)
    assert [box_of(up, layout, rank).offset for rank in range(8)] == [(0, 0, 0), (0, 2, 0), (1, 0, 0), (1, 2, 0)] * 2
    assert [up.placement.data_group(layout, layout.coords(rank)) for rank in range(8)] == [(0, 2)] * 4 + [(1, 2)] * 4


def test_with_etp_1_experts_are_whole_and_ep_borrows_tp_ranks() -> None:
    up = TensorInfo("up", "F32", (4, 4, 3), Placement(0, (Cut(0, "ep"), Cut(1, "tp"))))
    layout = ParallelLayout(tp=2, ep=4, dp=4, etp=1)
    assert [box_of(up, layout, rank) for rank in range(8)] == [Box((n, 0, 0), (1, 4, 3)) for n in (0, 1, 2, 3)] * 2
    assert [up.placement.data_group(layout, layout.coords(rank)) for rank in range(8)] == [(0, 2)] * 4 + [(1, 2)] * 4
    assert up.placement.live_shape("up", up.shape, layout) == (1, 4, 3)
    down = TensorInfo("down", "F32", (4, 4), Placement(0, (Cut(0),)))
    assert [box_of(down, layout, rank).offset[0] for rank in range(4)] == [0, 2] * 2, "others are cut by tp as ever"


def test_etp_is_1_or_tp_and_is_written_only_where_it_says_something() -> None:
    assert ParallelLayout(tp=2, ep=2, dp=2, etp=2) == ParallelLayout(tp=2, ep=2, dp=2)
    assert ParallelLayout(ep=2, dp=2, etp=1) == ParallelLayout(ep=2, dp=2)
    assert "etp" not in ParallelLayout(tp=2, ep=2, dp=2, etp=2).sizes
    layout = ParallelLayout(tp=2, ep=4, dp=2, etp=1)
    assert (layout.sizes["etp"], str(layout)) == (1, "tp2-ep4-dp2-etp1")
    assert ParallelLayout.parse(str(layout)) == layout
    for sizes, text in (
        ({"tp": 4, "ep": 2, "dp": 2, "etp": 2}, "etp=2 is neither 1 nor tp=4"),
        ({"tp": 4, "dp": 2, "etp": 1}, "etp=1 lets ep borrow tp ranks, and ep is 1"),
        ({"tp": 2, "ep": 3, "dp": 2, "etp": 1}, r"ep=3 does not divide dp=2 \* cp=1 \* tp=2"),
        ({"tp": 2, "ep": 4, "dp": 2}, r"ep=4 does not divide dp=2 \* cp=1"),
        ({"tp": 2, "ep": 2, "dp": 2, "etp": 0}, "etp of a parallel layout must be a whole number >= 1, got 0"),
    ):
        with pytest.raises(UserError, match=text):
            ParallelLayout(**sizes)


def test_a_vocabulary_is_rounded_on_each_rank_and_stored_as_it_is() -> None:
    embed, layout = Placement("first", (Cut(0),), round_to=128), ParallelLayout(tp=4)
    assert embed.live_shape("embed", (50257, 8), layout) == (12672, 8)
    assert embed.live_shape("embed", (50257, 8), ParallelLayout()) == (50304, 8)
    sizes = [embed.local_box("embed", (50257, 8), layout, layout.coords(rank)).shape[0] for rank in range(4)]
    assert sizes == [12672, 12672, 12672, 12241]


@pytest.mark.parametrize(
    ("shape", "cut", "tp", "choices"),
    [
        ((6, 2), Cut(0), 4, "1, 2, 3, 6"),
        ((12, 2), Cut(0, max_parts=4), 3, "1, 2, 4, or multiples of 4"),
        ((12, 2), Cut(0, max_parts=4), 6, "1, 2, 4, or multiples of 4"),
    ],
)
def test_an_axis_that_does_not_fit_is_refused(shape: tuple[int, ...], cut: Cut, tp: int, choices: str) -> None:
    with pytest.raises(UserError, match=rf"cannot cut w .* into tp={tp} along dim 0") as caught:
        Placement(0, (cut,)).local_box("w", shape, ParallelLayout(tp=tp), Coords())
    assert caught.value.hint == f"choose tp from {choices}"


@given(pp=st.integers(1, 5), virtual=st.integers(1, 4), num_layers=st.integers(0, 30))
def test_stages_are_interleaved_and_each_tensor_has_one(pp: int, virtual: int, num_layers: int) -> None:
    layout = ParallelLayout(pp=pp, virtual=virtual)
    held = {rank: rank_stages(layout, rank) for rank in range(pp)}
    assert sorted(stage for stages in held.values() for stage in stages) == list(range(pp * virtual))
    assert all(stages == [rank + pp * chunk for chunk in range(virtual)] for rank, stages in held.items())
    assert (stage_rank(layout, 0), stage_rank(layout, pp * virtual - 1)) == (0, pp - 1)
    for place in ("first", "last", *range(num_layers)):
        ranks = [rank for rank in range(pp) if Placement(place).on_stage(num_layers, layout, rank)]
        layers = [stage_layers(num_layers, pp * virtual, stage) for stage in range(pp * virtual)]
        stage = {"first": 0, "last": pp * virtual - 1}.get(place) if isinstance(place, str) else None
        stage = next(n for n, each in enumerate(layers) if place in each) if stage is None else stage
        assert ranks == [stage % pp]
