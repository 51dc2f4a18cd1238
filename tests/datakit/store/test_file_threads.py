"""FileThreads: results in order, and one fault that ends the work on all other files."""

import itertools
import threading
from collections.abc import Iterator

import pytest

from datakit.store.archiving import FileThreads
from threefold.errors import UserError


@pytest.mark.parametrize("num_workers", [1, 3, 20])
def test_results_come_in_the_files_order(num_workers: int) -> None:
    assert FileThreads(num_workers).map(lambda file: file * 2, range(10), print) == list(range(0, 20, 2))
    assert FileThreads(num_workers).map(str, [], print) == []


def test_a_fault_ends_the_others_between_two_blocks_and_is_the_one_that_is_raised() -> None:
    threads, begun, num_given = FileThreads(2), threading.Event(), 0

    def endless() -> Iterator[bytes]:
        nonlocal num_given
        while True:
            num_given += 1
            begun.set()
            yield b"block"

    def work(file: str) -> None:
        if file == "endless":
            for _ in threads.until_ended(endless()):
                pass
        begun.wait()
        raise CheckError(file)

    with pytest.raises(CheckError, match="faulty"):
        threads.map(work, ["endless", "faulty", "never begun"], print)
    assert num_given > 0


class CheckError(Exception):
    """A fault of one file."""


def test_a_kill_in_a_thread_is_raised() -> None:
    def work(file: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FileThreads(2).map(work, range(4), print)


def test_no_workers() -> None:
    with pytest.raises(UserError, match="0 workers"):
        FileThreads(0)


def test_after_a_fault_no_file_is_begun() -> None:
    begun = []

    def work(file: int) -> None:
        begun.append(file)
        if file == 2:
            raise CheckError

    with pytest.raises(CheckError):
        FileThreads(1).map(work, range(100), print)
    assert begun == [0, 1, 2]


def test_an_interrupt_ends_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, begun = FileThreads(1), threading.Event()

    def interrupt(*_: object, **__: object) -> None:
        begun.wait()
        raise KeyboardInterrupt

    def work(file: int) -> None:
        begun.set()
        for _ in threads.until_ended(itertools.repeat(b"")):
            pass

    monkeypatch.setattr("datakit.store.archiving.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        threads.map(work, range(3), print)


def test_progress_is_told_while_files_are_worked_on() -> None:
    threads, told, lines = FileThreads(1, report_every_s=0.01), threading.Event(), list[str]()

    def report(line: str) -> None:
        lines.append(line)
        if line == "1/2 files, 3.0 MB":
            told.set()

    def work(file: int) -> None:
        list(threads.until_ended([bytes(1_000_000)] * (2 - file)))
        if file:
            assert told.wait(60)

    threads.map(work, [0, 1], report)
    assert lines[-1] == "1/2 files, 3.0 MB"
