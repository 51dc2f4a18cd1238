"""Storages that stand in for others or wrap them: in memory, failing on purpose, logging, changing nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from threefold.errors import StorageError
from threefold.storage import AlreadyExists, Storage, TemporaryFailure, open_storage
from threefold.storage.conformance import StorageConformance
from threefold.storage.dry_run import DryRunStorage
from threefold.storage.fault import Fault, FaultStorage
from threefold.storage.memory import MemoryStorage
from threefold.storage.repeating import RepeatingStorage
from threefold.storage.request_log import Answer, LoggingStorage
from threefold.storage.wrapping import Request


class TestMemoryStorage(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()


class TestFaultStorageWithoutFaults(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return FaultStorage(open_storage(tmp_path))


class TestLoggingStorage(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return LoggingStorage(MemoryStorage(), lambda answer: None)


class TestRepeatingStorage(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return RepeatingStorage(MemoryStorage())


def test_a_fault_strikes_the_operations_and_keys_it_names() -> None:
    within = MemoryStorage()
    fault = Fault(StorageError("on fire"), ("write", "delete"), "step-*/root.json")
    storage = FaultStorage(within, fault)
    storage.write("step-1/a", b"x")
    for call in (
        lambda: storage.write("step-1/root.json", b"x"),
        lambda: storage.delete(["other", "step-1/root.json"]),
    ):
        with pytest.raises(StorageError, match="on fire"):
            call()
    assert storage.info("step-1/root.json") is None
    assert [*within.list_keys()] == ["step-1/a"]
    assert fault.num_met == 2


def test_a_fault_strikes_after_some_requests_and_for_some() -> None:
    storage = FaultStorage(MemoryStorage(), Fault(TemporaryFailure("busy"), ("info",), after=2, times=2))
    failed = []
    for number in range(6):
        try:
            storage.info("key")
        except TemporaryFailure:
            failed.append(number)
    assert failed == [2, 3]


def test_threads_share_a_fault() -> None:
    fault = Fault(TemporaryFailure("busy"), after=5, times=7)
    storage, barrier = FaultStorage(MemoryStorage(), fault), threading.Barrier(8)

    def ask(_: int) -> int:
        barrier.wait()
        failures = 0
        for _ in range(10):
            try:
                storage.info("key")
            except TemporaryFailure:
                failures += 1
        return failures

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) == fault.num_met == 7


def test_a_served_request_may_lose_its_answer() -> None:
    lost = Fault(StorageError("no answer"), ("write",), served=True, times=1)
    storage = FaultStorage(MemoryStorage(), lost)
    with pytest.raises(StorageError, match="no answer"):
        storage.write("root", b"x", if_absent=True)
    storage.write("root", b"x", if_absent=True)
    with pytest.raises(AlreadyExists):
        storage.write("root", b"y", if_absent=True)


def test_a_fault_of_no_operation_is_refused() -> None:
    with pytest.raises(AssertionError, match="'put'"):
        Fault(StorageError("x"), ("put",))


def test_each_request_is_logged_once_it_is_answered() -> None:
    answers: list[Answer] = []
    within = FaultStorage(MemoryStorage("memory://run"), Fault(StorageError("gone"), ("copy",)))
    storage = LoggingStorage(within, answers.append)
    storage.write("a/x", b"12345")
    storage.write("b", iter([b"12"]), size_bytes=2)
    assert storage.read_ranges("a/x", [(1, 3), (0, 2)]) == [b"23", b"12"]
    assert [*storage.list_keys("a/")] == ["a/x"]
    with pytest.raises(StorageError, match="gone"):
        storage.copy("b", "c")
    storage.delete(["b", "c", "d"])
    assert [answer.request for answer in answers] == [
        Request("write", ("a/x",), 5),
        Request("write", ("b",), 2),
        Request("read_ranges", ("a/x",), 4),
        Request("list_keys", ("a/",)),
        Request("copy", ("b", "c")),
        Request("delete", ("b", "c", "d")),
    ]
    assert [answer.error is None for answer in answers] == [True] * 4 + [False, True]
    assert str(Answer("memory://run", Request("write", ("a/x",), 12345), 0.0123)) == (
        "write memory://run a/x 12,345 bytes 12.3 ms"
    )
    assert str(Answer("u", Request("delete", ("b", "c", "d")), 0.0, StorageError("x"))) == (
        "delete u b c and 1 more 0.0 ms: StorageError"
    )


def test_a_dry_run_reads_and_changes_nothing(tmp_path: Path) -> None:
    within = open_storage(tmp_path)
    within.write("root", b"first")
    storage = DryRunStorage(within)
    storage.write("new", iter([b"ab", b"cde"]))
    storage.write("root", b"second")
    storage.write("root", iter([b"fi", b"rst"]), if_absent=True)
    storage.copy("root", "copied")
    storage.delete(["root", "nothing"])
    assert storage.changes == [
        Request("write", ("new",), 5),
        Request("write", ("root",), 6),
        Request("write", ("root",), 5),
        Request("copy", ("root", "copied"), 5),
        Request("delete", ("root", "nothing")),
    ]
    assert (storage.read("root"), [*storage.list_keys()], [*storage.list_folders()]) == (b"first", ["root"], [])
    assert storage.local_path("root") is None


def test_a_dry_run_refuses_what_the_storage_would(tmp_path: Path) -> None:
    storage = DryRunStorage(open_storage(tmp_path))
    open_storage(tmp_path).write("root", b"first")
    with pytest.raises(AlreadyExists, match="root exists already"):
        storage.write("root", b"second", if_absent=True)
    with pytest.raises(StorageError, match="missing does not exist"):
        storage.copy("missing", "target")
    for call in (lambda: storage.write("../up", b""), lambda: storage.delete(["a//b"])):
        with pytest.raises(AssertionError, match="not a storage key"):
            call()
    assert storage.changes == []
