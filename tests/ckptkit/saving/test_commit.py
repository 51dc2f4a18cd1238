"""Commit waits for every writer, refuses what is not whole, and happens once."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptkit.chunk_table import ChunkTable
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root, part_keys, step_folder
from ckptkit.io.blocks import num_granules
from ckptkit.layout import ParallelLayout
from ckptkit.loading.reader import read_root
from ckptkit.partition import rank_chunks
from ckptkit.plan import plan_files
from ckptkit.runs.catalogue import committed_steps
from ckptkit.saving.commit import Holding, check_complete, commit_root, failed_key, wait_for_parts
from ckptkit.saving.retries import Retries
from tests.ckptkit.saves import NUM_LAYERS, SMALL
from threefold.errors import CheckFailed, StorageError
from threefold.storage import AlreadyExists, Storage, TemporaryFailure, open_storage
from threefold.storage.local import LocalStorage

LAYOUT = ParallelLayout(tp=2, dp=2)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path)


def indexes_of(writer: int, max_chunks: int = 100_000) -> list[PartIndex]:
    chunks = ChunkTable.of(rank_chunks(SMALL, NUM_LAYERS, LAYOUT, LAYOUT.coords(writer)))
    files = plan_files(chunks, SMALL, max_chunks=max_chunks).files
    return [file.index(np.zeros(num_granules(file.size_bytes), np.uint64)) for file in files]


def put(storage: Storage, writer: int, number: int, index: PartIndex) -> None:
    data_key, index_key = part_keys("a", writer, number)
    storage.write(f"{step_folder(7)}/{data_key}", bytes(index.size_bytes))
    storage.write(f"{step_folder(7)}/{index_key}", index.to_bytes())


def now() -> float:
    return 0.0


def test_parts_come_in_the_order_of_writers_and_files(storage: Storage) -> None:
    for writer in (3, 0, 2, 1):
        for number, index in enumerate(indexes_of(writer, max_chunks=12)):
            put(storage, writer, number, index)
    parts = wait_for_parts(storage, 7, "a", 4, now)
    assert len(parts) > 8
    order = [key.removesuffix(".index") for key in (part.index for part, _ in parts)]
    assert [stem.split(".")[0] for stem in order] == sorted(stem.split(".")[0] for stem in order)
    for part, holding in parts:
        size = storage.info(f"{step_folder(7)}/{part.data}").size_bytes
        assert (part.data_bytes, part.data) == (size, part.index.replace(".index", ".safetensors"))
        assert 0 < holding.size_bytes.sum() < size
    check_complete(7, SMALL, [holding for _, holding in parts])


def test_it_waits_for_the_last_writer(storage: Storage) -> None:
    for writer in range(3):
        put(storage, writer, 0, indexes_of(writer)[0])
    late = threading.Timer(0.3, put, (storage, 3, 0, indexes_of(3)[0]))
    late.start()
    assert len(wait_for_parts(storage, 7, "a", 4, lambda: 30.0)) == 4
    late.join()


def test_requests_that_fail_now_and_then_end_no_long_wait(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fails once, at times that are further apart than one may be tried again for."""
    passed: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + sum(passed))
    for writer in range(3):
        for number, index in enumerate(indexes_of(writer)):
            put(storage, writer, number, index)
    usual, failed = LocalStorage.list_keys, list[float]()

    def list_keys(self: LocalStorage, prefix: str) -> Iterator[str]:
        if len(failed) < 4 and sum(passed) > 50.0 * (len(failed) + 1):
            failed.append(sum(passed))
            raise TemporaryFailure("busy")
        if len(failed) == 4:
            put(storage, 3, 0, indexes_of(3)[0])
        return usual(self, prefix)

    monkeypatch.setattr(LocalStorage, "list_keys", list_keys)
    retries = Retries(1.0, sleep=passed.append)
    assert len(wait_for_parts(storage, 7, "a", 4, lambda: 600.0, retries=retries)) == 4
    assert len(failed) == 4
    assert retries.num_attempts == 5


def test_missing_and_failed_writers_are_named(storage: Storage) -> None:
    put(storage, 1, 0, indexes_of(1)[0])
    storage.write(f"{step_folder(7)}/b/part-00000.index", b"of another attempt")
    late = r"step-000000007: writers 0, 2, 3 of 4 were not done within 0\.\d s: a/part-00000\.index is not there"
    with pytest.raises(StorageError, match=f"{late}, nor is its data file") as caught:
        wait_for_parts(storage, 7, "a", 4, now)
    assert caught.value.hint == "look at rank 0; raise checkpoint.deadline_s if it is only slow"
    storage.write(f"{step_folder(7)}/{part_keys('a', 0)[0]}", b"a begin")
    with pytest.raises(StorageError, match=f"{late}, its data file is begun"):
        wait_for_parts(storage, 7, "a", 4, now)
    with pytest.raises(StorageError, match=r"writers 0, 2, 3, .*, 16, \.\.\. of 100"):
        wait_for_parts(storage, 7, "a", 100, now)
    storage.write(f"{step_folder(7)}/{failed_key('a', 2)}", b"disk full")
    with pytest.raises(StorageError, match="writer 2 failed: disk full"):
        wait_for_parts(storage, 7, "a", 4, lambda: 30.0)


def test_a_data_file_that_is_not_as_its_index_says_is_refused(storage: Storage) -> None:
    index = indexes_of(0)[0]
    put(storage, 0, 0, index)
    key = f"{step_folder(7)}/{part_keys('a', 0)[0]}"
    storage.write(key, b"short")
    with pytest.raises(StorageError, match=rf"part-00000\.safetensors has 5 bytes, its index says {index.size_bytes}"):
        wait_for_parts(storage, 7, "a", 1, now)
    storage.delete([key])
    with pytest.raises(StorageError, match="has 0 bytes"):
        wait_for_parts(storage, 7, "a", 1, now)


def test_only_whole_tensors_are_complete() -> None:
    indexes = [Holding.of(index) for writer in range(4) for index in indexes_of(writer)]
    check_complete(7, SMALL, indexes)
    with pytest.raises(
        CheckFailed, match=r"step 7: the pieces of all writers(?s:.*)head.weight: 1216 of 2368(?s:.*)and 17 more"
    ):
        check_complete(7, SMALL, indexes[:-1])
    with pytest.raises(CheckFailed, match=r"embed\.weight: \d+ of 2368 bytes"):
        check_complete(7, SMALL, [*indexes, indexes[0]])
    without = [info for info in SMALL if info.name != "norm.weight"]
    with pytest.raises(CheckFailed, match=r"\n  norm\.weight: 64 of 0 bytes$"):
        check_complete(7, without, indexes)


def test_a_root_is_put_once(storage: Storage) -> None:
    root = Root(7, "a", LAYOUT, NUM_LAYERS, {info.name: info for info in SMALL}, (), {"loss": 1.5})
    commit_root(storage, root)
    commit_root(storage, root)  # its answer was lost: once more
    with pytest.raises(AlreadyExists, match=r"step 7 of .* was committed by another attempt first"):
        commit_root(storage, replace(root, attempt="b"))
    assert committed_steps(storage) == [7]
    assert read_root(storage, 7).attempt == "a"
