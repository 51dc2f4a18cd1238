"""Commit waits for every writer, refuses what is not whole, and happens once."""

import errno
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.format.keys import Seat, part_keys, step_folder
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.io.blocks import num_granules, xxh3_64
from ckptkit.loading.roots import committed_attempt, read_root
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.cover import Cover
from ckptkit.plan.save_plan import plan_files, storage_rows
from ckptkit.runs.catalogue import committed_steps
from ckptkit.writer.commit import (
    KILLED,
    LOOKS_PER_S,
    NO_ANSWER,
    NotCommitted,
    await_commit,
    commit_root,
    wait_for_parts,
)  # fmt: skip
from ckptkit.writer.retries import Retries
from ckptkit.writer.step import is_full
from tests.ckptkit.support.model_tables import rank_chunks
from tests.ckptkit.support.saves import NUM_LAYERS, SMALL
from threefold.errors import CheckFailed, StorageError
from threefold.storage import AlreadyExists, ObjectInfo, Storage, TemporaryFailure, open_storage
from threefold.storage.fault import Fault, FaultStorage
from threefold.storage.memory import MemoryStorage
from threefold.storage.request_log import Answer, LoggingStorage

LAYOUT = ParallelLayout(tp=2, dp=2)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path)


def seat(num_writers: int, writer: int = 0, attempt: str = "a") -> Seat:
    return Seat("", 7, attempt, writer, num_writers)


def indexes_of(writer: int, max_chunks: int = 100_000) -> list[PartIndex]:
    chunks = ChunkTable.of(rank_chunks(SMALL, NUM_LAYERS, LAYOUT, LAYOUT.coords(writer)))
    files = plan_files(chunks, storage_rows(chunks, SMALL), max_chunks=max_chunks).files
    return [file.index(np.zeros(num_granules(file.size_bytes), np.uint64)) for file in files]


def put(storage: Storage, writer: int, number: int, index: PartIndex) -> None:
    data_key, index_key = part_keys("a", writer, number)
    storage.write(f"{step_folder(7)}/{data_key}", bytes(index.size_bytes))
    storage.write(f"{step_folder(7)}/{index_key}", index.to_bytes())


def now() -> float:
    return 0.0


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_writer_that_removes_its_files_meanwhile_is_named_or_the_attempt_that_won(is_committed: bool) -> None:
    class Losing(MemoryStorage):
        """The second writer learns that it lost between the leader's two listings."""

        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            self.delete([f"{step_folder(7)}/{key}" for key in part_keys("a", 1)])
            return super().list(prefix)

    storage = Losing()
    for writer in (0, 1):
        put(storage, writer, 0, indexes_of(writer)[0])
    if is_committed:
        commit_root(storage, Root(7, "b", LAYOUT, NUM_LAYERS, {}, (), {}))
    with pytest.raises(StorageError, match="another attempt first" if is_committed else "writer 1 removed") as error:
        wait_for_parts(storage, seat(2), now, cover=Cover(SMALL))
    assert isinstance(error.value, AlreadyExists) == is_committed


def test_parts_come_in_the_order_of_writers_and_files(storage: Storage) -> None:
    for writer in (3, 0, 2, 1):
        for number, index in enumerate(indexes_of(writer, max_chunks=12)):
            put(storage, writer, number, index)
    parts = wait_for_parts(storage, seat(4), now, cover=Cover(SMALL))
    assert len(parts) > 8
    order = [part.index.removesuffix(".index") for part in parts]
    assert [stem.split(".")[0] for stem in order] == sorted(stem.split(".")[0] for stem in order)
    for part in parts:
        size = storage.info(f"{step_folder(7)}/{part.data}").size_bytes
        assert (part.data_bytes, part.data) == (size, part.index.replace(".index", ".safetensors"))


def test_it_waits_for_the_last_writer(storage: Storage) -> None:
    for writer in range(3):
        put(storage, writer, 0, indexes_of(writer)[0])
    late = threading.Timer(0.3, put, (storage, 3, 0, indexes_of(3)[0]))
    late.start()
    assert len(wait_for_parts(storage, seat(4), lambda: 30.0)) == 4
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
    faults = [Fault(TemporaryFailure("busy"), ("list_keys",), after=looks, times=1) for looks in (40, 50, 60, 70)]

    def sleep(pause_s: float) -> None:
        passed.append(pause_s)
        if faults[-1].num_met:
            put(storage, 3, 0, indexes_of(3)[0])

    retries = Retries(1.0, sleep=sleep)
    busy = FaultStorage(storage, *faults)
    assert len(wait_for_parts(busy, seat(4), lambda: 600.0, retries=retries)) == 4
    assert [fault.num_met for fault in faults] == [1] * 4
    assert retries.num_attempts == 5


def test_missing_and_failed_writers_are_named(storage: Storage) -> None:
    put(storage, 1, 0, indexes_of(1)[0])
    storage.write(f"{step_folder(7)}/b/part-00000.index", b"of another attempt")
    late = r"step-000000007: writers 0, 2, 3 of 4 were not done within 0\.\d s: a/part-00000\.index is not there"
    with pytest.raises(StorageError, match=f"{late}, nor is its data file") as caught:
        wait_for_parts(storage, seat(4), now)
    assert caught.value.hint == "look at rank 0; raise checkpoint.deadline_s if it is only slow"
    storage.write(f"{step_folder(7)}/{part_keys('a', 0)[0]}", b"a begin")
    with pytest.raises(StorageError, match=f"{late}, its data file is begun"):
        wait_for_parts(storage, seat(4), now)
    with pytest.raises(StorageError, match=r"writers 0, 2, 3, .*, 16, \.\.\. of 100"):
        wait_for_parts(storage, seat(100), now)
    storage.write(seat(4, 2).failed_key, b"disk full")
    with pytest.raises(StorageError, match="writer 2 failed: disk full"):
        wait_for_parts(storage, seat(4), lambda: 30.0)


def root_of(attempt: str) -> Root:
    return Root(7, attempt, LAYOUT, NUM_LAYERS, {info.name: info for info in SMALL}, (), {"loss": 1.5})


@pytest.mark.parametrize("is_put", [False, True], ids=["before its name", "after its name"])
def test_a_root_that_may_be_there_is_no_want_of_room(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, *, is_put: bool
) -> None:
    write = storage.write

    def full(key: str, data: bytes, *, if_absent: bool = False) -> None:
        if is_put:
            write(key, data, if_absent=if_absent)
        raise StorageError("the disk is full") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "write", full)
    with pytest.raises(StorageError, match="the disk is full") as caught:
        commit_root(storage, root_of("b"))
    assert (type(caught.value) is NotCommitted) is not is_put
    assert is_full(caught.value) is not is_put, "else the step is saved a second time elsewhere"


def test_every_writer_learns_how_a_save_ended(storage: Storage) -> None:
    key = seat(4).failed_key
    with pytest.raises(StorageError, match=r"writer 0 neither committed it nor said why not within 0\.\d s"):
        await_commit(storage, seat(4), now)
    storage.write(key, b"no room")
    with pytest.raises(NotCommitted, match=r"step 7 of .* is not committed: writer 0 failed: no room"):
        await_commit(storage, seat(4), lambda: 30.0)
    for word in (KILLED, f"{NO_ANSWER}503"):
        storage.write(key, word.encode())
        with pytest.raises(StorageError, match=word) as caught:
            await_commit(storage, seat(4), lambda: 30.0)
        assert not isinstance(caught.value, NotCommitted), "a root may name its files"
    threading.Timer(0.2, commit_root, (storage, root_of("b"))).start()
    await_commit(storage, seat(4, attempt="b"), lambda: 30.0)
    with pytest.raises(AlreadyExists, match="committed by another attempt first"):
        await_commit(storage, seat(4), now)


def test_thousands_of_writers_ask_a_bounded_number_of_times(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 writers that wait ten minutes: 200 looks a second in all, of two small requests, and never in step."""
    passed, asked = [], list[Answer]()
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + sum(passed))
    watched = LoggingStorage(storage, asked.append)
    firsts = set()
    for _ in range(3):
        passed.clear()
        with pytest.raises(StorageError, match="nor said why not within 600"):
            await_commit(watched, seat(4096), lambda: 600.0, retries=Retries(sleep=passed.append))
        firsts.add(passed[0])
    assert len(firsts) == 3
    assert len(asked) / 2 < 3 * (600 * LOOKS_PER_S / 4096 * 1.5 + 2)
    asked.clear()
    passed.clear()
    with pytest.raises(StorageError, match="nor said why not within 60"):
        await_commit(watched, seat(2), lambda: 60.0, retries=Retries(sleep=passed.append))
    assert passed[0] < 0.05
    assert len(asked) / 2 < 100


@pytest.mark.parametrize("indent", [None, 1])
def test_the_attempt_of_a_root_is_read_from_its_first_bytes(storage: Storage, indent: int | None) -> None:
    """Also where its fields stand otherwise than this program writes them."""
    assert committed_attempt(storage, 7) is None
    data = replace(root_of("a-0001"), metadata={"attempt": "none", "text": '\n"attempt": "b",\n'}).to_bytes()
    if indent:
        fields = sorted((item for item in json.loads(data).items() if item[0] != "checksum"), reverse=True)
        body = json.dumps(dict(fields), indent=indent)[:-2]
        data = f'{body},\n"checksum": "{xxh3_64(body.encode()):016x}"\n}}\n'.encode()
    storage.write(f"{step_folder(7)}/root.json", data)
    assert committed_attempt(storage, 7) == "a-0001"


@pytest.mark.parametrize("after", [None, "b"])
def test_a_root_that_goes_between_two_looks_is_looked_for_again(after: str | None) -> None:
    """Behind a network a root that names another attempt is read once more, whole."""
    key = f"{step_folder(7)}/root.json"

    class Changing(MemoryStorage):
        """Its root is pruned after its head was read, and then another attempt commits."""

        def read_ranges(self, *arguments: Any) -> list[Any]:
            found = super().read_ranges(*arguments)
            if b"a-0001" in bytes(found[0]):
                self.delete([key])
            return found

        def info(self, key: str) -> ObjectInfo | None:
            found = super().info(key)
            if found is None and after:
                commit_root(self, root_of(after))
            return found

    storage = Changing()
    commit_root(storage, root_of("a-0001"))
    assert committed_attempt(storage, 7, "other") == after


def test_a_data_file_that_is_not_as_its_index_says_is_refused(storage: Storage) -> None:
    index = indexes_of(0)[0]
    put(storage, 0, 0, index)
    key = f"{step_folder(7)}/{part_keys('a', 0)[0]}"
    storage.write(key, b"short")
    with pytest.raises(StorageError, match=rf"part-00000\.safetensors has 5 bytes, its index says {index.size_bytes}"):
        wait_for_parts(storage, seat(1), now)
    storage.delete([key])
    with pytest.raises(StorageError, match="has 0 bytes"):
        wait_for_parts(storage, seat(1), now)


def test_only_whole_tensors_are_complete(storage: Storage) -> None:
    """As many bytes as there are elements do not do: writers 0 and 1 hold the same half of each tensor."""
    for writer in range(4):
        put(storage, writer, 0, indexes_of(writer // 2 * 2)[0])
    with pytest.raises(CheckFailed) as caught:
        wait_for_parts(storage, seat(4), now, cover=Cover(SMALL))
    lines = caught.value.message.splitlines()
    assert lines[0].endswith("step-000000007 does not hold each element of each tensor exactly once:")
    missing, double = (
        "1,152 of 2,368 bytes are missing, first [19:37, 0:16]",
        "1,216 of 2,368 bytes are stored more than once",
    )
    assert lines[1] == f"  embed.weight: {missing}; {double}, first [0:19, 0:16], by writers 0, 1"
    put(storage, 1, 0, indexes_of(1)[0])
    put(storage, 3, 0, indexes_of(3)[0])
    without = [info for info in SMALL if info.name != "norm.weight"]
    with pytest.raises(CheckFailed, match=r"part-0000\d\.index holds norm\.weight .* unlike the tensor table"):
        wait_for_parts(storage, seat(4), now, cover=Cover(without))
    assert len(wait_for_parts(storage, seat(4), now, cover=Cover(SMALL))) == 4


def test_a_root_is_put_once(storage: Storage) -> None:
    root = root_of("a")
    commit_root(storage, root)
    commit_root(storage, root)  # its answer was lost: once more
    with pytest.raises(AlreadyExists, match=r"step 7 of .* was committed by another attempt first"):
        commit_root(storage, replace(root, attempt="b"))
    assert committed_steps(storage) == [7]
    assert read_root(storage, 7).attempt == "a"
