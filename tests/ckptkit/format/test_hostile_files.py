"""Roots and part indexes of random bytes, flipped bits, and numbers and texts replaced under repaired checksums.

Whatever comes, a parser gives what it checked or a CheckFailed (a UserError for a newer version); it allocates no more
than a small multiple of the file, and no name that it gives leads out of the step's folder.
"""

import contextlib
import json
import mmap
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.format.keys import part_keys
from ckptkit.format.part_index import MAX_INDEX_BYTES, PartIndex
from ckptkit.format.root import MAX_ROOT_BYTES, Part, Root
from ckptkit.io.blocks import xxh3_64
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Piece
from ckptkit.plan.load_plan import plan_load
from ckptkit.plan.save_plan import plan_save
from tests.ckptkit.support.checkpoints import stored_chunks
from tests.ckptkit.support.model_tables import gpt_tensors, rank_chunks
from threefold.errors import CheckFailed, UserError

TENSORS = gpt_tensors()
LAYOUT = ParallelLayout(tp=2, dp=2)


def index_of(rank: int) -> PartIndex:
    chunks = rank_chunks(TENSORS, 3, LAYOUT, LAYOUT.coords(rank))
    file = plan_save([Piece(i.name, box, a, b, None) for i, box, a, b in chunks], TENSORS).files[0]
    return file.draft_index()


INDEXES = [index_of(rank) for rank in range(4)]
INDEX = INDEXES[0].to_bytes()
PARTS = tuple(Part(part_keys("a1", n)[0], 4096, part_keys("a1", n)[1], 900, n) for n in range(4))
ROOT = Root(100, "a1", LAYOUT, 3, {t.name: t for t in TENSORS}, PARTS, {"tokens": 5}).to_bytes()
MAX_MEMORY_BYTES = 4 << 20  # both files are below 20 KB
PARSERS = [(INDEX, PartIndex.from_bytes), (ROOT, Root.from_bytes)]
EDGES = [
    0,
    1,
    2,
    3,
    7,
    8,
    255,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**47,
    2**48,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def parsed(parse: Callable[[bytes, str], Any], data: bytes) -> Any:
    """What a parser makes of data, None where it refuses; any other error, and much memory, fail the test."""
    tracemalloc.start()
    try:
        with contextlib.suppress(UserError):
            return parse(data, "here")
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MAX_MEMORY_BYTES + 64 * len(data)


@pytest.mark.parametrize(("sound", "parse"), PARSERS)
@given(data=st.data())
def test_random_bytes_and_flipped_bits_are_refused(sound: bytes, parse: Any, data: st.DataObject) -> None:
    assert parsed(parse, sound) is not None
    assert parsed(parse, data.draw(st.binary(max_size=3000))) is None
    assert parsed(parse, sound[:64] + data.draw(st.binary(max_size=3000))) is None
    spoiled = bytearray(sound)
    for at in data.draw(st.lists(st.integers(0, 8 * len(sound) - 1), min_size=1, max_size=4, unique=True)):
        spoiled[at // 8] ^= 1 << at % 8
    assert parsed(parse, bytes(spoiled)) is None


@given(st.data())
def test_an_index_with_numbers_replaced_is_refused_or_plannable(data: st.DataObject) -> None:
    """What passes the parser can be planned with: the plan finds all elements once, or says that it does not."""
    body = bytearray(INDEX[:-8])
    for _ in range(data.draw(st.integers(1, 3))):
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        header = data.draw(st.booleans())
        at = data.draw(st.integers(2, 15) if header else st.integers(16, len(body) // 4 - 2)) * 4
        value = data.draw(st.sampled_from(EDGES) | st.integers(0, 2**64 - 1)) % 2 ** (8 * width)
        body[at : at + width] = value.to_bytes(width, "little")
    reread = parsed(PartIndex.from_bytes, bytes(body) + struct.pack("<Q", xxh3_64(bytes(body))))
    if reread is None:
        return
    assert int(reread.offsets[-1] + reread.chunks.size_bytes[-1]) == reread.size_bytes
    with contextlib.suppress(UserError):
        stored = stored_chunks([reread, *INDEXES[1:]], TENSORS)
        wanted = ChunkTable.of(rank_chunks(TENSORS, 3, ParallelLayout(), ParallelLayout().coords(0)))
        plan = plan_load(wanted, stored)
        assert int(plan.size.sum()) == int(wanted.size_bytes.sum())
        sizes = np.array([reread.size_bytes, *(index.size_bytes for index in INDEXES[1:])])
        assert (plan.source >= 0).all()
        assert (plan.source + plan.size <= sizes[plan.part]).all()


def sealed(document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()[:-1]
    return body + f',\n"checksum": "{xxh3_64(body):016x}"\n}}\n'.encode()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


DOCUMENT = {key: value for key, value in json.loads(ROOT).items() if key != "checksum"}
PLACES = [place for place in places(DOCUMENT) if place]
strange = (
    st.sampled_from([*EDGES, -1, 1.5, None, True, "", "..", "../x", "/etc/passwd", "a1/../x", "a1/x/y", "\0", "tp"])
    | st.integers() | st.text(max_size=4) | st.just([]) | st.just({}) | st.just([1] * 9)
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(PLACES), strange), min_size=1, max_size=2), st.booleans())
def test_a_root_with_values_replaced_is_refused_or_harmless(changes: list[tuple[Any, Any]], drop: bool) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    for path, value in changes:
        with contextlib.suppress(KeyError, IndexError, TypeError):  # a change before took the place away
            at = document
            for key in path[:-1]:
                at = at[key]
            if drop and isinstance(at, dict):
                del at[path[-1]]
            else:
                at[path[-1]] = value
    root = parsed(Root.from_bytes, sealed(document))
    if root is None:
        return
    for part in root.parts:
        for key in (part.data, part.index):
            assert key.startswith(f"{root.attempt}/part-")
            assert ".." not in key
            assert key.count("/") == 1
        assert 0 <= part.data_bytes <= 1 << 50
        assert 0 <= part.index_bytes <= 1 << 30
    for info in root.tensors.values():
        assert 0 <= info.numel <= 1 << 48
        if info.placement.tied_to is not None:
            target = root.tensors[info.placement.tied_to]
            assert (target.dtype, target.shape) == (info.dtype, info.shape)
    assert 0 <= root.step <= 10**15


@pytest.mark.parametrize(
    ("sound", "most_bytes", "read", "fault"),
    [
        (ROOT, MAX_ROOT_BYTES, Root.from_bytes, "more than a checkpoint's root may have"),
        (INDEX, MAX_INDEX_BYTES, PartIndex.from_bytes, r"part index \(1073741825 bytes\)"),
    ],
)
def test_a_file_past_its_cap_is_refused_unread(sound: bytes, most_bytes: int, read: Any, fault: str) -> None:
    with mmap.mmap(-1, most_bytes + 1) as memory:  # of zeros, which take none
        memory[: len(sound)] = sound
        with pytest.raises(CheckFailed, match=fault):
            read(memory, "here")


def test_chunks_that_overlap_are_refused() -> None:
    wanted = ChunkTable.of(rank_chunks(TENSORS, 3, ParallelLayout(), ParallelLayout().coords(0)))
    for indexes in ([*INDEXES, INDEXES[0]], INDEXES[1:]):
        with pytest.raises(UserError, match="each wanted element exactly once"):
            plan_load(wanted, stored_chunks(indexes, TENSORS))
