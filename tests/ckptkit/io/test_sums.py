"""Sums: what parts of any cut add up to is the CRC of the tensor's bytes, and every change of elements changes it."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.io.blocks import NOWHERE, SumPlaces, checksums
from ckptkit.io.data_files import open_reader, open_writer
from ckptkit.io.sums import ChunkSums
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.tensor import ITEMSIZE, Box, Placement, TensorInfo
from tests.ckptkit.support.checkpoints import cut
from threefold.storage import open_storage

POLYNOMIAL = 0x9A6C9329AC4BC9B5
TABLE = np.arange(256, dtype=np.uint64)
for _ in range(8):
    TABLE = np.where(TABLE & np.uint64(1), TABLE >> np.uint64(1) ^ np.uint64(POLYNOMIAL), TABLE >> np.uint64(1))
PLACES = [int(value) for value in TABLE]
X64 = POLYNOMIAL  # x^64, modulo the polynomial
Chunk = tuple[TensorInfo, Box, int, int]


def crc(data: bytes, register: int = 0) -> int:
    """CRC-64/NVME of some bytes, by the textbook; not inverted at the end."""
    for byte in data:
        register = register >> 8 ^ PLACES[(register ^ byte) & 255]
    return register


def whole(info: TensorInfo) -> Chunk:
    return info, Box((0,) * len(info.shape), info.shape), 0, info.numel


def sums_of(chunks: list[Chunk], arrays: dict[str, np.ndarray], *, begin: int = 4096, carryless: int = -1) -> ChunkSums:
    """The sums of chunks that follow each other in a file, its bytes added in pieces of 64 bytes and more."""
    sums = ChunkSums(ChunkTable.of(chunks), begin)
    data = b"".join(cut(arrays[info.name], box, a, b).tobytes() for info, box, a, b in chunks)
    for start in range(0, len(data), 64):
        piece = data[start : start + 64] if start < 1024 else data[start:]
        sums.add(np.frombuffer(piece, np.uint8), begin + start, carryless=carryless)
        if start >= 1024:
            break
    return sums


def value_of(info: TensorInfo, array: np.ndarray) -> int:
    return int(sums_of([whole(info)], {info.name: array}).values[0])


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorInfo, np.ndarray]:
    """A tensor of any dims and dtype, and its bits."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    if shape and draw(st.booleans()):
        shape = (*shape[:-1], draw(st.integers(10, 300)))
    info = TensorInfo("w", draw(st.sampled_from(sorted(ITEMSIZE))), shape, Placement(0))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = rng.integers(0, 256, info.size_bytes, np.uint8).view(f"u{ITEMSIZE[info.dtype]}")
    return info, bits.reshape(shape)


@st.composite
def cuts(draw: st.DrawFn, info: TensorInfo) -> list[Chunk]:
    """A cut of a tensor into boxes, and of these into ranges, in any order."""
    boxes = [Box((0,) * len(info.shape), info.shape)]
    for _ in range(draw(st.integers(0, 6)) if info.shape else 0):
        box, dim = boxes.pop(0), draw(st.integers(0, len(info.shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for first, length in ((0, at), (at, box.shape[dim] - at)):
            offset = tuple(o + first * (d == dim) for d, o in enumerate(box.offset))
            boxes.append(Box(offset, tuple(length if d == dim else n for d, n in enumerate(box.shape))))
    chunks = []
    for box in boxes:
        bounds = sorted({0, box.numel, *draw(st.lists(st.integers(0, box.numel), max_size=2))})
        chunks += [(info, box, a, b) for a, b in pairwise(bounds)]
    return draw(st.permutations(chunks))


@given(st.data())
def test_parts_of_any_cut_add_up_to_the_crc_of_the_tensor(data: st.DataObject) -> None:
    info, array = data.draw(tensors())
    chunks = data.draw(cuts(info))
    for carryless in (-1, 0):
        found = sums_of(chunks, {"w": array}, carryless=carryless)
        assert found.values.tolist() == [crc(array.tobytes())]
    turn = data.draw(st.integers(0, len(chunks)))
    files = [sums_of(part, {"w": array}) for part in (chunks[:turn], chunks[turn:]) if part]
    assert np.bitwise_xor.reduce([sums.values for sums in files]).tolist() == [crc(array.tobytes())]


@given(st.data())
def test_another_element_or_another_order_is_another_sum(data: st.DataObject) -> None:
    info, array = data.draw(tensors())
    before, flat = value_of(info, array), array.reshape(-1).copy()
    one, other = (data.draw(st.integers(0, info.numel - 1)) for _ in range(2))
    flat[[one, other]] = flat[[other, one]]
    assert (value_of(info, flat.reshape(info.shape)) == before) == np.array_equal(flat, array.reshape(-1))
    flat = array.reshape(-1).copy()
    flat[one] ^= flat.dtype.type(1 << data.draw(st.integers(0, 8 * flat.itemsize - 1)))
    assert value_of(info, flat.reshape(info.shape)) != before


def test_several_tensors_of_a_file_have_a_sum_each() -> None:
    infos = [TensorInfo(f"w{n}", "F32", (n + 2, 3), Placement(0)) for n in range(3)]
    arrays = {info.name: np.arange(info.numel, dtype=np.float32).reshape(info.shape) + 1 for info in infos}
    found = sums_of([whole(info) for info in infos], arrays)
    assert found.values.tolist() == [crc(arrays[info.name].tobytes()) for info in infos]
    assert sums_of([], {}).values.tolist() == []


def test_what_is_outside_of_chunks_adds_nothing() -> None:
    info, array = TensorInfo("w", "U8", (5,), Placement(0)), np.arange(5, dtype=np.uint8)
    sums = ChunkSums(ChunkTable.of([whole(info)]), 4)
    sums.add(np.concatenate([np.full(4, 9, np.uint8), array, np.full(3, 9, np.uint8)]), 0)
    assert sums.values.tolist() == [crc(array.tobytes())]


def test_the_reference_is_the_published_one() -> None:
    assert crc(b"123456789", 2**64 - 1) ^ (2**64 - 1) == 0xAE8B14860A799888


def test_elements_far_into_a_tensor_weigh_what_the_zeros_after_them_make_of_them() -> None:
    """Half way through 16 GiB, by squaring: the textbook would take an hour."""
    info = TensorInfo("w", "F64", (1 << 16, 1 << 15), Placement(0))
    sums = ChunkSums(ChunkTable.of([(info, Box((1 << 15, 0), (1, 1 << 15)), 0, 1)]), 0)
    sums.add(np.array([3], np.uint64), 0)
    expected, square, zeros = crc((3).to_bytes(8, "little")), X64, info.numel // 2 - 1
    while zeros:
        expected = product(expected, square) if zeros & 1 else expected
        square, zeros = product(square, square), zeros >> 1
    assert sums.values.tolist() == [expected]


def product(a: int, b: int) -> int:
    """The product of two values modulo the polynomial; bit 63 weighs x^0."""
    found = 0
    for bit in range(63, -1, -1):
        found ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return found


@pytest.mark.parametrize("carryless", [0, 1])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 383, 384, 5000])
def test_every_length_takes_the_same_sum(size: int, carryless: int) -> None:
    array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    info = TensorInfo("w", "U8", (size,), Placement(0))
    sums = ChunkSums(ChunkTable.of([whole(info)]), 0)
    sums.add(array, 0, carryless=carryless)
    assert sums.values.tolist() == [crc(array.tobytes())]


def test_a_writer_sums_what_it_writes_whatever_its_pieces(tmp_path: Path) -> None:
    shape = (1500, 300)
    info = TensorInfo("w", "F32", shape, Placement("first"))
    chunks = ChunkTable.of([(info, Box((0, 0), shape), 0, 1500 * 300)])
    data = np.random.default_rng(0).integers(0, 256, 1500 * 300 * 4, np.uint8)
    whole = ChunkSums(chunks, 0)
    whole.add(data, 0)
    for name, begins in (("one", [0]), ("many", [0, 100_004, 1_048_576 + 12])):
        written = ChunkSums(chunks, 0)
        ends = [*begins[1:], data.size]
        rows = [(data.ctypes.data + begin, end - begin) for begin, end in zip(begins, ends, strict=True)]
        with open_writer(open_storage(tmp_path), name, data.size, sums=written) as writer:
            found = writer.write(np.array(rows, np.uint64))
        assert found.tolist() == checksums(data).tolist()
        assert written.values.tolist() == whole.values.tolist()


@pytest.mark.parametrize("place", ["disk", "cache", "elsewhere"])
def test_a_reader_sums_what_it_hands_out_once_whatever_its_ranges(place: str, tmp_path: Path) -> None:
    """Also where granules cut elements, and where a granule is kept from one call for the next."""
    info, begin, num_bytes = TensorInfo("w", "F64", (401, 1000), Placement("first")), 13, 401 * 8000
    half = Box((0, 0), (401, 500))
    chunks = ChunkTable.of([(info, half, 0, 401 * 500), (info, Box((0, 500), (401, 500)), 0, 401 * 500)])
    storage = open_storage(f"memory://{tmp_path.name}-sums" if place == "elsewhere" else tmp_path)
    content = np.random.default_rng(1).integers(0, 256, begin + num_bytes, np.uint8)
    storage.write("file", content.tobytes())
    expected = ChunkSums(chunks, begin)
    expected.add(content, 0)
    cuts = [begin, 14, 4000, 1_048_577, 1_900_000, 1_900_008, 3_000_001, begin + num_bytes]
    sums, target = ChunkSums(chunks, 0), np.zeros(num_bytes + begin, np.uint8)
    rows = np.array([(a, b - a, target.ctypes.data + a) for a, b in pairwise(cuts)], np.uint64)
    places = SumPlaces(sums.address, rows[:, 0] - np.uint64(begin))
    reader = open_reader(storage, "file", len(content), checksums(content), from_cache=place == "cache")
    for part in (slice(0, 3), slice(3, 5), slice(5, 7)):
        reader.read(rows[part], sums=places.take(part))
    reader.read(rows, sums=SumPlaces(sums.address, np.full(len(rows), NOWHERE, np.uint64)))
    reader.close()
    assert np.array_equal(target[begin:], content[begin:])
    assert sums.values.tolist() == expected.values.tolist() != [0]
