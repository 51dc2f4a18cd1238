"""Plans: any cut to any other cut and back is byte-identical, each element moves once, faults are reported."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.format.part_index import PartIndex
from ckptkit.io.blocks import GRANULE_BYTES
from ckptkit.model.chunk_table import ChunkTable, TensorColumns
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.ranks import RankChunk
from ckptkit.model.tensor import Box, Cut, Piece, Placement, TensorInfo, storage_order
from ckptkit.plan.load_plan import LoadPlan, plan_load
from ckptkit.plan.save_plan import plan_save
from ckptkit.plan.stored import Bounds
from tests.ckptkit.support.checkpoints import stored_chunks
from tests.ckptkit.support.model_tables import gpt_tensors, rank_chunks, values
from threefold.errors import CheckFailed, UserError

NONE = np.empty(0, np.uint64)


def pieces_of(chunks: list[RankChunk], arrays: dict[str, np.ndarray]) -> list[Piece]:
    return [Piece(info.name, box, a, b, cut(arrays[info.name], box, a, b)) for info, box, a, b in chunks]


def cut(array: np.ndarray, box: Box, start: int, stop: int) -> np.ndarray:
    window = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
    return np.ascontiguousarray(array[window]).reshape(-1)[start:stop]


def save(ranks: list[list[RankChunk]], tensors: list[TensorInfo], arrays: dict[str, np.ndarray], max_chunks: int = 7):  # type: ignore[no-untyped-def]
    """All ranks' data files in memory, and their joined chunks."""
    files, indexes = [], []
    for chunks in ranks:
        pieces = pieces_of(chunks, arrays)
        plan = plan_save(pieces, tensors, max_chunks=max_chunks)
        for file, rows in zip(plan.files, plan.rows, strict=True):
            data = b"".join(pieces[row].data.tobytes() for row in rows)
            assert len(data) == file.data_bytes
            files.append(np.frombuffer(file.header + data, np.uint8))
            indexes.append(file.index(NONE))
    return files, indexes


def load(chunks: list[RankChunk], tensors: list[TensorInfo], files: list[np.ndarray], indexes: list[PartIndex]):  # type: ignore[no-untyped-def]
    table = ChunkTable.of(chunks)
    everything = stored_chunks(indexes, tensors)
    near = stored_chunks(indexes, tensors, Bounds.of(table, everything.chunks.tensors))
    assert len(near.chunks) <= len(everything.chunks)
    plan = plan_load(table, near)
    assert_equal(plan, plan_load(table, everything))
    targets = [np.zeros(size, np.uint8) for size in table.size_bytes]
    writes = [np.zeros(size, np.int64) for size in table.size_bytes]
    keys = list(zip(plan.part.tolist(), plan.source.tolist(), strict=True))
    assert keys == sorted(keys)
    for part, source, row, target, size in zip(plan.part, plan.source, plan.row, plan.target, plan.size, strict=True):
        assert size > 0
        targets[row][target : target + size] = files[part][source : source + size]
        writes[row][target : target + size] += 1
    assert all((count == 1).all() for count in writes), "each byte is copied exactly once"
    return targets, plan


def assert_equal(plan: LoadPlan, other: LoadPlan) -> None:
    for name in ("part", "source", "row", "target", "size"):
        assert np.array_equal(getattr(plan, name), getattr(other, name)), name


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Box, int, int]]:
    """A global shape cut into boxes and these into ranges, at random; every element in exactly one chunk."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        before, after = list(box.shape), list(box.shape)
        before[dim], after[dim] = at, box.shape[dim] - at
        moved = [o + (at if d == dim else 0) for d, o in enumerate(box.offset)]
        boxes += [Box(box.offset, tuple(before)), Box(tuple(moved), tuple(after))]
    chunks = []
    for box in boxes:
        cuts = sorted([0, box.numel, *draw(st.lists(st.integers(0, box.numel), max_size=3))])
        chunks += [(box, a, b) for a, b in pairwise(cuts)]
    return draw(st.permutations(chunks))


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@pytest.mark.ci
@pytest.mark.slow
@settings(max_examples=20 * settings().max_examples)  # thousands with the profile "thorough"
@given(st.data())
def test_any_cut_to_any_cut(data: st.DataObject) -> None:
    tensors = [
        TensorInfo(f"t{i}", data.draw(st.sampled_from(["F64", "F32", "BF16", "U8"])), shape, Placement(0))
        for i, shape in enumerate(data.draw(st.lists(shapes, min_size=1, max_size=4)))
    ]
    arrays = values(tensors)
    num_ranks = data.draw(st.integers(1, 4))
    ranks: list[list[RankChunk]] = [[] for _ in range(num_ranks)]
    for info in tensors:
        for chunk in data.draw(partitions(info.shape)):
            ranks[data.draw(st.integers(0, num_ranks - 1))].append((info, *chunk))
    files, indexes = save(ranks, tensors, arrays)
    wanted = [(info, *chunk) for info in tensors for chunk in data.draw(partitions(info.shape))]
    targets, _ = load(wanted, tensors, files, indexes)
    for (info, box, start, stop), target in zip(wanted, targets, strict=True):
        assert target.tobytes() == cut(arrays[info.name], box, start, stop).tobytes()


layouts = st.builds(ParallelLayout, tp=st.sampled_from([1, 2, 4, 8]), dp=st.integers(1, 5), pp=st.integers(1, 4))


def all_ranks(tensors: list[TensorInfo], num_layers: int, layout: ParallelLayout) -> list[list[RankChunk]]:
    return [rank_chunks(tensors, num_layers, layout, layout.coords(rank)) for rank in range(layout.world_size)]


@settings(max_examples=settings().max_examples // 6)
@given(first=layouts, second=layouts, tied=st.booleans())
def test_any_layout_to_any_layout_and_back(first: ParallelLayout, second: ParallelLayout, tied: bool) -> None:
    tensors = gpt_tensors(num_layers=5, tied=tied)
    arrays = values(tensors)
    files, indexes = save(all_ranks(tensors, 5, first), tensors, arrays, max_chunks=10_000)
    moved_files, moved_indexes = [], []
    for chunks in all_ranks(tensors, 5, second):
        targets, _ = load(chunks, tensors, files, indexes)
        pieces = [Piece(i.name, box, a, b, t) for (i, box, a, b), t in zip(chunks, targets, strict=True)]
        for (info, box, a, b), piece in zip(chunks, pieces, strict=True):
            assert piece.data.tobytes() == cut(arrays[info.name], box, a, b).tobytes()
        plan = plan_save(pieces, tensors)
        moved_files.append(np.frombuffer(
            plan.files[0].header + b"".join(pieces[row].data.tobytes() for row in plan.rows[0]), np.uint8))  # fmt: skip
        moved_indexes.append(plan.files[0].index(NONE))
    for rank, chunks in enumerate(all_ranks(tensors, 5, first)):
        targets, _ = load(chunks, tensors, moved_files, moved_indexes)
        plan = plan_save(
            [Piece(i.name, box, a, b, t) for (i, box, a, b), t in zip(chunks, targets, strict=True)], tensors
        )
        back = plan.files[0].header + b"".join(targets[row].tobytes() for row in plan.rows[0])
        assert back == files[rank].tobytes()


@pytest.mark.parametrize(
    "second", ["tp4-pp8", "tp1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp2-dp4", "tp16-pp2"))]
)
def test_granules_read_are_within_a_twentieth_of_the_bytes_needed(second: str) -> None:
    """Over a whole reshard, where the granules kept from one batch of tensors to the next are read once."""
    tensors = [
        TensorInfo(i.name, i.dtype, tuple(64 * n if n != 37 else 50257 for n in i.shape), i.placement)
        for i in gpt_tensors(num_layers=8)
    ]
    source, target = ParallelLayout.parse("tp8-pp4-dp2"), ParallelLayout.parse(second)
    indexes = [
        file.index(NONE)
        for chunks in all_ranks(tensors, 8, source)
        for file in plan_save([Piece(i.name, box, a, b, None) for i, box, a, b in chunks], tensors).files
    ]
    stored = stored_chunks(indexes, tensors)
    wanted = ChunkTable.of([chunk for chunks in all_ranks(tensors, 8, target) for chunk in chunks])
    plan = plan_load(wanted, stored)
    granules = {
        (part, g)
        for part, a, n in zip(plan.part.tolist(), plan.source.tolist(), plan.size.tolist(), strict=True)
        for g in range(a // GRANULE_BYTES, (a + n - 1) // GRANULE_BYTES + 1)
    }
    sizes = [min(GRANULE_BYTES, indexes[part].size_bytes - g * GRANULE_BYTES) for part, g in granules]
    needed = sum(info.size_bytes for info in tensors)
    assert int(plan.size.sum()) == needed
    assert sum(sizes) <= 1.05 * needed


def test_a_row_cut_is_one_copy_and_a_column_cut_one_a_row() -> None:
    rows, columns = (
        TensorInfo("r", "F32", (64, 8), Placement(0, (Cut(0),))),
        TensorInfo("c", "F32", (64, 8), Placement(0, (Cut(1),))),
    )
    tensors = [rows, columns]
    whole = [[(info, Box((0, 0), info.shape), 0, 512) for info in tensors]]
    files, indexes = save(whole, tensors, values(tensors))
    _, plan = load([(rows, Box((32, 0), (32, 8)), 0, 256)], tensors, files, indexes)
    assert len(plan) == 1
    _, plan = load([(columns, Box((0, 4), (64, 4)), 0, 256)], tensors, files, indexes)
    assert plan.size.tolist() == [16] * 64
    _, plan = load([(columns, Box((0, 4), (64, 4)), 6, 11)], tensors, files, indexes)
    assert plan.size.tolist() == [8, 12]


def test_ranges_of_one_box_in_one_file_join_again() -> None:
    info = TensorInfo("t", "F32", (10, 10), Placement(0))
    box = Box((0, 0), (10, 10))
    files, indexes = save([[(info, box, 50, 100), (info, box, 0, 50)]], [info], values([info]))
    _, plan = load([(info, box, 0, 100)], [info], files, indexes)
    assert len(plan) == 1


@given(st.data())
def test_bounds_hold_every_position_and_no_line_more(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    info, numel = TensorInfo("t", "F32", (9, 9, 9)[: len(shape)], Placement(0)), math.prod(shape)
    offset = data.draw(st.tuples(*(st.integers(0, 9 - size) for size in shape)))
    start = data.draw(st.integers(0, numel - 1))
    stop = data.draw(st.integers(start + 1, numel))
    low, high = ChunkTable.of([(info, Box(offset, shape), start, stop)]).bounds()
    held = np.stack(np.unravel_index(np.arange(start, stop), shape), axis=1) + offset
    for dim in range(len(shape)):
        assert low[dim] <= held[:, dim].min()
        assert high[dim] > held[:, dim].max()
    assert (low[0], high[0]) == (held[:, 0].min(), held[:, 0].max() + 1)


def test_bounds_leave_out_what_is_elsewhere() -> None:
    tensors = gpt_tensors(num_layers=4, hidden=64, vocab=640)
    ranks = all_ranks(tensors, 4, ParallelLayout(tp=2, dp=4))
    _, indexes = save(ranks, tensors, values(tensors), max_chunks=1000)
    wanted = ChunkTable.of(ranks[5])
    near = stored_chunks(indexes, tensors, Bounds.of(wanted, TensorColumns.of(tensors)))
    assert len(wanted) <= len(near.chunks) <= 2 * len(wanted)
    assert len(stored_chunks(indexes, tensors).chunks) >= 4 * len(wanted)


def test_missing_and_doubled_elements_are_reported() -> None:
    info = TensorInfo("layers.0.attn.q.weight", "F32", (4, 4), Placement(0))
    box = Box((0, 0), (4, 4))
    for stored in (
        [(info, box, 0, 15)],
        [(info, box, 0, 9), (info, box, 8, 16)],
        [(info, box, 0, 8), (info, box, 0, 8)],
    ):
        _, indexes = save([list(stored)], [info], values([info]))
        with pytest.raises(CheckFailed, match=r"attn.q.weight .*64 bytes wanted, \d+ stored"):
            plan_load(ChunkTable.of([(info, box, 0, 16)]), stored_chunks(indexes, [info]))


def test_many_faults_are_counted_not_listed() -> None:
    tensors = [TensorInfo(f"t{i}", "F32", (4,), Placement(0)) for i in range(50)]
    wanted = ChunkTable.of([(info, Box((0,), (4,)), 0, 4) for info in tensors])
    with pytest.raises(CheckFailed, match="and 20 more"):
        plan_load(wanted, stored_chunks([], tensors))


def test_pieces_that_do_not_fit_are_refused_in_one_report() -> None:
    info = TensorInfo("w", "F32", (4, 4), Placement(0))
    bad = [
        Piece("v", Box((0,), (1,)), 0, 1, None),
        Piece("w", Box((0,), (4,)), 0, 4, None),
        Piece("w", Box((2, 0), (3, 4)), 0, 12, None),
        Piece("w", Box((0, 0), (4, 4)), 0, 17, None),
    ]
    with pytest.raises(UserError) as caught:
        plan_save(bad, [info])
    for part in ("v: not in the table", "other dims", "leaves shape", "leaves its box of 16"):
        assert part in str(caught.value)


def test_an_index_of_another_model_is_refused() -> None:
    info, other = TensorInfo("w", "F32", (4,), Placement(0)), TensorInfo("w", "F64", (4,), Placement(0))
    _, indexes = save([[(info, Box((0,), (4,)), 0, 4)]], [info], values([info]))
    for tensors in ([other], []):
        with pytest.raises(CheckFailed, match="unlike the tensor table"):
            stored_chunks(indexes, tensors)


def test_a_writer_past_the_limit_of_a_file_starts_another() -> None:
    tensors = gpt_tensors()
    chunks = rank_chunks(tensors, 3, ParallelLayout(), ParallelLayout().coords(0))
    plan = plan_save([Piece(i.name, box, a, b, None) for i, box, a, b in chunks], tensors, max_chunks=10)
    assert [len(file.chunks) for file in plan.files] == [10] * (len(chunks) // 10) + [len(chunks) % 10] * (
        len(chunks) % 10 > 0
    )
    assert sorted(np.concatenate(plan.rows).tolist()) == list(range(len(chunks)))
    assert len(plan_save([], tensors).files) == 1


def test_storage_order_is_stage_then_parameter_with_its_optimizer_state() -> None:
    names = [info.name for info in sorted(gpt_tensors(num_layers=12), key=storage_order)]
    assert names[:3] == ["embed.weight", "optim.exp_avg/embed.weight", "optim.exp_avg_sq/embed.weight"]
    layers = [int(name.split("layers.")[1].split(".")[0]) for name in names if "layers." in name]
    assert layers == sorted(layers)
    assert "norm.weight" in names[-1]


@given(layout=layouts, tied=st.booleans())
def test_the_ranks_of_a_layout_hold_each_element_once(layout: ParallelLayout, tied: bool) -> None:
    tensors = gpt_tensors(num_layers=5, tied=tied)
    counted = {info.name: np.zeros(info.shape, np.int64) for info in tensors}
    for chunks in all_ranks(tensors, 5, layout):
        for info, box, start, stop in chunks:
            window = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            count = np.zeros(math.prod(box.shape), np.int64)
            count[start:stop] = 1
            counted[info.name][window] += count.reshape(box.shape)
    for info in tensors:
        assert (counted[info.name] == (0 if info.placement.tied_to else 1)).all(), info.name
