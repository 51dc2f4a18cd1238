"""Shard writers: documents give the same three files in whatever batches they come; a shard ends where it is full."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.format.shard import TokenShard
from datakit.store.writer import StoreShardWriter
from tests.datakit.conftest import files_of

DOCUMENTS = st.lists(st.lists(st.integers(0, 65499), max_size=9), min_size=1, max_size=30)


@given(documents=DOCUMENTS, dtype=st.sampled_from(["uint16", "int32"]), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_batches_leave_no_trace(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    for name in ("single", "batched"):
        (folder / name).mkdir()
    tokens = [np.array(document, dtype).tobytes() for document in documents]
    offsets, lines = [7 * number for number in range(len(tokens))], list(range(len(tokens)))

    single = StoreShardWriter(folder / "single" / "shard", dtype)
    for content, offset, line in zip(tokens, offsets, lines, strict=True):
        single.add(content, f"file {line > 3}", offset, line)
    batched = StoreShardWriter(folder / "batched" / "shard", dtype)
    for start, stop in pairwise(
        sorted({0, min(4, len(tokens)), *(min(cut, len(tokens)) for cut in cuts), len(tokens)})
    ):
        lengths = [len(document) for document in documents[start:stop]]
        batched.extend(
            b"".join(tokens[start:stop]), lengths, f"file {start > 3}", offsets[start:stop], lines[start:stop]
        )

    assert single.finish() == batched.finish()
    assert files_of(folder / "single") == files_of(folder / "batched")
    shard = TokenShard(folder / "batched" / "shard")
    assert [shard.document(number).tolist() for number in range(shard.num_documents)] == documents


@given(lengths=st.lists(st.integers(0, 9), max_size=30), max_bytes=st.integers(1, 90), max_documents=st.integers(1, 20))
def test_room_is_what_fits_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], max_bytes: int, max_documents: int
) -> None:
    writer = StoreShardWriter(tmp_path_factory.mktemp("shard") / "shard", "uint16", max_documents, max_bytes)
    room, added = writer.room(lengths), 0
    for length in lengths:
        if writer.is_full:
            break
        writer.add(bytes(2 * length), "file", 0, added)
        added += 1
    writer.abandon()
    assert room == added


def test_a_shard_is_full_at_its_bytes_or_its_documents(tmp_path: Path) -> None:
    writer = StoreShardWriter(tmp_path / "shard", "uint16", max_documents=5, max_bytes=8)
    assert [writer.room([2] * 9), writer.room([100, 1]), writer.room([0] * 9), writer.room([])] == [2, 1, 5, 0]
    writer.extend(bytes(6), [3], "file", [0], [0])
    assert not writer.is_full
    assert writer.room([1, 1]) == 1
    writer.extend(bytes(2), [1], "file", [9], [1])
    assert writer.is_full
    writer.abandon()
    assert files_of(tmp_path) == {}
