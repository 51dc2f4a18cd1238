"""Cover: holes, overlaps and pieces that leave their tensor are found, and nothing else, whatever the cut."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.format.part_index import PartIndex
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.ranks import RankChunk
from ckptkit.model.tensor import Box, Placement, TensorInfo
from ckptkit.plan.cover import MAX_SEARCHED, Cover
from tests.ckptkit.plan.test_load_plan import layouts, partitions, shapes
from tests.ckptkit.support.checkpoints import cut, stored_chunks
from tests.ckptkit.support.model_tables import gpt_tensors, rank_chunks
from threefold.errors import CheckFailed

NONE = np.empty(0, np.uint64)
FLAT = TensorInfo("w", "F32", (8, 4), Placement(0))


def index_of(chunks: Sequence[RankChunk]) -> PartIndex:
    return PartIndex(ChunkTable.of(chunks), 0, 0, NONE)


def faults_of(
    tensors: Sequence[TensorInfo], writers: Sequence[Sequence[RankChunk]], *, is_share: bool = False
) -> dict[str, str]:
    """What is wrong with each tensor, given each writer's chunks."""
    indexes = [index_of(chunks) for chunks in writers]
    cover = Cover(tensors, is_share=is_share)
    for index in indexes:
        cover.add(index, "an index")

    def parts() -> Iterable[tuple[int, PartIndex]]:
        return enumerate(indexes)

    return {fault.tensor: fault.what for fault in cover.faults(parts)}


def counts(tensors: Sequence[TensorInfo], writers: Sequence[Sequence[RankChunk]]) -> dict[str, np.ndarray]:
    """How often each element is held, counted one by one."""
    places = {info.name: np.arange(info.numel).reshape(info.shape) for info in tensors}
    found = {info.name: np.zeros(info.numel, np.int64) for info in tensors}
    for info, box, start, stop in (chunk for chunks in writers for chunk in chunks):
        found[info.name][cut(places[info.name], box, start, stop)] += 1
    return found


@st.composite
def tables_and_writers(draw: st.DrawFn) -> tuple[list[TensorInfo], list[list[RankChunk]]]:
    """Tensors cut at random, of which some chunks are left out, doubled, swapped for others or shortened."""
    tensors = [
        TensorInfo(f"t{i}", "F32", shape, Placement(0))
        for i, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=3)))
    ]
    writers: list[list[RankChunk]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for info in tensors:
        chunks = [(info, *chunk) for chunk in draw(partitions(info.shape))]
        for kind in draw(st.lists(st.sampled_from(["drop", "double", "other", "shorten"]), max_size=2)):
            at = draw(st.integers(0, len(chunks) - 1))
            if kind == "double":
                chunks.append(chunks[at])
            elif kind == "other":
                chunks[at] = (info, *draw(st.sampled_from(draw(partitions(info.shape)))))
            elif kind == "shorten":
                _, box, start, stop = chunks[at]
                chunks[at] = (info, box, min(start + 1, stop), stop)
            elif len(chunks) > 1:
                chunks.pop(at)
        for chunk in chunks:
            draw(st.sampled_from(writers)).append(chunk)
    return tensors, writers


@given(tables_and_writers())
def test_what_is_held_once_passes_and_nothing_else(case: tuple[list[TensorInfo], list[list[RankChunk]]]) -> None:
    tensors, writers = case
    counted = counts(tensors, writers)
    wrong = {name for name, count in counted.items() if (count != 1).any()}
    found = faults_of(tensors, writers)
    assert set(found) == wrong
    for name in wrong:
        for num, what in ((counted[name] == 0).sum(), "missing"), ((counted[name] > 1).sum(), "stored more than once"):
            assert (f"{num * 4:,} of {counted[name].size * 4:,} bytes are {what}" in found[name]) == bool(num)
            assert (what in found[name]) == bool(num)
    doubles = {name for name, count in counted.items() if (count > 1).any()}
    assert set(faults_of(tensors, writers, is_share=True)) == doubles


@settings(max_examples=15)
@given(layouts, st.data())
def test_what_the_ranks_of_any_layout_store_is_whole(layout: ParallelLayout, data: st.DataObject) -> None:
    tensors = gpt_tensors(3, tied=True)
    writers = [rank_chunks(tensors, 3, layout, layout.coords(rank)) for rank in range(layout.world_size)]
    assert not faults_of(tensors, writers)
    first = data.draw(st.integers(0, len(writers) - 1))
    assert not faults_of(tensors, writers[first:], is_share=True)
    rank = data.draw(st.sampled_from([rank for rank, chunks in enumerate(writers) if chunks]))
    chunk = data.draw(st.sampled_from(writers[rank]))
    assert set(faults_of(tensors, [*writers, [chunk]])) == {chunk[0].name}
    writers[rank] = [each for each in writers[rank] if each is not chunk]
    assert set(faults_of(tensors, writers)) == {chunk[0].name}


def half(first: int, info: TensorInfo = FLAT) -> RankChunk:
    return info, Box((first, 0), (4, 4)), 0, 16


def test_the_same_half_twice_is_named_with_its_writers() -> None:
    found = faults_of([FLAT], [[half(0)], [], [half(0)]])
    missing = "64 of 128 bytes are missing, first [4:8, 0:4]"
    assert found == {"w": f"{missing}; 64 of 128 bytes are stored more than once, first [0:4, 0:4], by writers 0, 2"}
    cover, index = Cover([FLAT]), index_of([half(0)])
    cover.add(index, "an index")
    with pytest.raises(CheckFailed, match="step 3 does not hold each element of each tensor exactly once:\n  w: 64 of"):
        cover.check("step 3", lambda: [(0, index)])


def test_ranges_of_different_boxes_may_not_meet() -> None:
    """As many elements as the tensor has: rows 0 to 4 and half of row 5, and again columns 0 and 1 from row 3 on."""
    chunks = [(FLAT, Box((0, 0), (8, 4)), 0, 22), (FLAT, Box((3, 0), (5, 2)), 0, 10)]
    assert faults_of([FLAT], [[chunks[0]], [chunks[1]]]) == {
        "w": "24 of 128 bytes are missing, first [5:6, 2:4]; "
        "24 of 128 bytes are stored more than once, first [3:5, 0:2], by writers 0, 1"
    }
    assert "stored more than once" in faults_of([FLAT], [chunks], is_share=True)["w"]


def test_a_chunk_that_leaves_its_tensor_is_refused() -> None:
    found = faults_of([FLAT], [[half(0)], [half(6)]])
    assert found == {"w": "[6:10, 0:4] is stored of shape [8, 4], by writer 1"}
    assert faults_of([FLAT], [[half(6)]], is_share=True)


def test_a_tied_tensor_holds_nothing() -> None:
    tied = TensorInfo("tied", "F32", (8, 4), Placement(0, tied_to="w"))
    whole = [half(0), half(4)]
    assert not faults_of([FLAT, tied], [whole])
    text = "64 of 128 bytes are stored, though it is tied to w, by writer 0"
    assert faults_of([FLAT, tied], [[*whole, half(0, tied)]]) == {"tied": text}


def test_scalars_and_empty_tensors() -> None:
    scalar, empty = TensorInfo("s", "I64", (), Placement(0)), TensorInfo("e", "F32", (0, 5), Placement(0))
    chunk = (scalar, Box((), ()), 0, 1)
    assert not faults_of([scalar, empty], [[chunk], []])
    assert faults_of([scalar, empty], [[]]) == {"s": "8 of 8 bytes are missing, first []"}
    assert faults_of([scalar], [[chunk], [chunk]]) == {
        "s": "8 of 8 bytes are stored more than once, first [], by writers 0, 1"
    }
    assert not faults_of([], [[]])
    assert not faults_of([], [], is_share=True)


def test_many_faulty_tensors_are_all_named() -> None:
    tensors = [TensorInfo(f"t{n}", "F32", (8, 4), Placement(0)) for n in range(MAX_SEARCHED + 3)]
    found = faults_of(tensors, [[half(0, info) for info in tensors]])
    texts = list(found.values())
    assert texts[:MAX_SEARCHED] == ["64 of 128 bytes are missing, first [4:8, 0:4]"] * MAX_SEARCHED
    assert texts[MAX_SEARCHED:] == ["64 of 128 bytes are stored, not each once"] * 3


def test_an_index_of_more_dims_than_the_table() -> None:
    """Its boxes are padded with dims that none of its tensors has."""
    chunks = ChunkTable.of([half(0), half(4)]).with_dims(4)
    index = PartIndex.from_bytes(PartIndex(chunks, 0, 128, np.zeros(1, np.uint64)).to_bytes(), "an index")
    cover = Cover([FLAT])
    cover.add(index, "an index")
    assert not cover.faults(list)
    assert len(stored_chunks([index], [FLAT]).chunks) == 2
