"""The part index: round trip, and refusal of every damaged or hostile file before its numbers are used."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.format.data_file import DataFile
from ckptkit.format.part_index import DTYPES, PartIndex
from ckptkit.io.blocks import num_granules, xxh3_64
from ckptkit.model.chunk_table import ChunkTable, TensorColumns
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import ITEMSIZE, Box, Piece, Placement, TensorInfo
from ckptkit.plan.save_plan import plan_save
from tests.ckptkit.support.model_tables import gpt_tensors, rank_chunks
from threefold.errors import CheckFailed, UserError


def make_index() -> PartIndex:
    tensors = gpt_tensors(hidden=256)
    layout = ParallelLayout(tp=2, dp=2)
    pieces = [Piece(i.name, box, a, b, None) for i, box, a, b in rank_chunks(tensors, 3, layout, layout.coords(0))]
    file = plan_save(pieces, tensors).files[0]
    sums = np.arange(len(file.chunks.names), dtype=np.uint64)
    return file.index(np.arange(num_granules(file.size_bytes), dtype=np.uint64), sums)


INDEX = make_index()
DATA = INDEX.to_bytes()


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<Q", xxh3_64(body))


def test_round_trip() -> None:
    index = PartIndex.from_bytes(DATA, "here")
    for name in ("names", "dtypes", "ndims"):
        assert getattr(index.chunks.tensors, name) == getattr(INDEX.chunks.tensors, name)
    for name in ("tensor", "offset", "shape", "start", "stop"):
        assert np.array_equal(getattr(index.chunks, name), getattr(INDEX.chunks, name)), name
    assert (index.data_offset, index.size_bytes) == (INDEX.data_offset, INDEX.size_bytes)
    assert np.array_equal(index.checksums, INDEX.checksums)
    assert np.array_equal(index.offsets, INDEX.offsets)
    assert index.chunks.tensors.shapes == INDEX.chunks.tensors.shapes
    assert index.sums is not None
    assert index.sums.tolist() == list(range(len(INDEX.chunks.names)))
    assert index.to_bytes() == DATA


def test_version_1_has_no_shapes_and_sums() -> None:
    data = replace(INDEX, sums=None).to_bytes()
    found = PartIndex.from_bytes(data, "here")
    assert (data[8], DATA[8], found.chunks.tensors.shapes, found.sums) == (1, 2, None, None)
    assert found.to_bytes() == data
    assert len(DATA) - len(data) == 8 * len(INDEX.chunks.names) * 2


def test_a_box_that_leaves_its_tensor_is_refused() -> None:
    chunks = ChunkTable.of([(TensorInfo("w", "U8", (4, 2), Placement(0)), Box((2, 0), (3, 2)), 0, 6)])
    index = PartIndex(chunks, 0, 6, np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    with pytest.raises(CheckFailed, match="chunk 0 of w has an impossible box or range"):
        PartIndex.from_bytes(index.to_bytes(), "here")


def test_an_index_of_no_chunks() -> None:
    empty = PartIndex(ChunkTable.of([]), 4096, 4096, np.zeros(1, np.uint64))
    assert len(PartIndex.from_bytes(empty.to_bytes(), "here").chunks) == 0
    found = PartIndex.from_bytes(DataFile.of(ChunkTable.of([])).draft_index().to_bytes(), "here")
    assert (found.chunks.tensors.shapes, len(found.sums if found.sums is not None else "no sums")) == ((), 0)


def test_numbers_past_32_bits_take_8_bytes() -> None:
    shape = (1 << 17, 1 << 17)
    wide = ChunkTable.of([(TensorInfo("w", "U8", shape, Placement(0)), Box((0, 0), shape), (1 << 34) - 5, 1 << 34)])
    data = PartIndex(wide, 4096, 4101, np.zeros(1, np.uint64)).to_bytes()
    found = PartIndex.from_bytes(data, "here").chunks
    assert (found.start[0], found.stop[0]) == ((1 << 34) - 5, 1 << 34)
    assert (DATA[14], data[14]) == (4, 8)


def test_equal_tensor_columns_are_shared() -> None:
    known: dict[bytes, TensorColumns] = {}
    first, second = (PartIndex.from_bytes(DATA, "here", known) for _ in range(2))
    assert first.chunks.tensors is second.chunks.tensors
    assert PartIndex.from_bytes(PartIndex(ChunkTable.of([]), 0, 0, first.checksums[:0]).to_bytes(), "here", known)
    assert len(known) == 2


def test_dtype_codes_are_those_of_the_format() -> None:
    assert set(DTYPES) == set(ITEMSIZE)
    assert DTYPES[:4] == ("F64", "F32", "F16", "BF16")


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_any_flipped_byte_is_found(at: int, flip: int) -> None:
    data = bytearray(DATA)
    data[at] ^= flip
    with pytest.raises(UserError, match="here"):
        PartIndex.from_bytes(bytes(data), "here")


@given(st.integers(0, len(DATA) - 1))
def test_any_truncation_is_found(length: int) -> None:
    with pytest.raises(CheckFailed, match="here"):
        PartIndex.from_bytes(DATA[:length], "here")


@given(st.lists(st.tuples(st.integers(0, len(DATA) - 9), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_hostile_index_is_refused_or_consistent(edits: list[tuple[int, int]]) -> None:
    body = bytearray(DATA[:-8])
    for at, value in edits:
        body[at] = value
    try:
        found = PartIndex.from_bytes(sealed(bytes(body)), "here")
    except UserError:
        return
    chunks = found.chunks
    assert ((chunks.start >= 0) & (chunks.start <= chunks.stop)).all()
    assert int(found.offsets[-1] + chunks.size_bytes[-1]) == found.size_bytes


@given(st.integers(0, 6), st.integers(0, 2**64 - 1))
def test_hostile_counts_allocate_nothing(field: int, value: int) -> None:
    body = bytearray(DATA[:-8])
    struct.pack_into("<Q", body, 16 + 8 * min(field, 5), value) if field else struct.pack_into(
        "<I", body, 12, value % 2**32
    )
    if bytes(body) == DATA[:-8]:
        return
    with pytest.raises(CheckFailed, match="here"):
        PartIndex.from_bytes(sealed(bytes(body)), "here")


def test_another_format_version_is_refused_by_name() -> None:
    body = bytearray(DATA[:-8])
    struct.pack_into("<I", body, 8, 3)
    with pytest.raises(UserError, match="format version 3, this program reads 1 and 2"):
        PartIndex.from_bytes(sealed(bytes(body)), "here")


def test_the_tensors_of_a_byte_range() -> None:
    first, second = INDEX.chunks.names[INDEX.chunks.tensor[0]], INDEX.chunks.names[INDEX.chunks.tensor[1]]
    assert INDEX.tensors_between(0, INDEX.data_offset) == ()
    edge = int(INDEX.offsets[1])
    assert INDEX.tensors_between(edge - 1, edge) == (first,)
    assert INDEX.tensors_between(edge - 1, edge + 1) == (first, second)
