"""A thread sees that no rank makes progress, and reports it once; what is slow and works is left alone."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.trainer.job.test_whereabouts import Notes
from trainer.job.page import RankPage
from trainer.job.rendezvous import Board
from trainer.job.stall import Stall
from trainer.job.watch import Berth, Toil, Watch, others_s, state_of, this_host

STALL_S = 0.4


class Counting(Notes):
    """A store that counts too."""

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(self.get(key).decode()) + amount if key in self else amount).encode()
        return int(self[key])


class Ranks:
    """Pages of ranks that are all this process, on hosts by name, and the stalls that were reported."""

    def __init__(self, hosts: list[str], *, spins: bool = False) -> None:
        self.pages = [RankPage(rank, len(hosts), on_gpu=spins) for rank in range(len(hosts))]
        berths = [Berth(page.rank, host, page.path, os.getpid()) for page, host in zip(self.pages, hosts, strict=True)]
        self.calls = [page.group("world", range(len(hosts))) for page in self.pages]
        self.stalls: list[tuple[int, Stall]] = []
        board = Board(Counting())  # type: ignore[arg-type]
        self._watches = [
            Watch(
                page,
                berths,
                board,
                self._taking(page.rank),
                stall_s=STALL_S,
                spins=spins,
                on_device=page.first_pending,
            )
            for page in self.pages
        ]

    def _taking(self, rank: int) -> Callable[[Stall], None]:
        return lambda stall: self.stalls.append((rank, stall))

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        for page in self.pages:
            page.close()


@contextmanager
def ranks(*hosts: str, spins: bool = False) -> Iterator[Ranks]:
    made = Ranks(list(hosts), spins=spins)
    try:
        yield made
    finally:
        made.close()


def until(is_done: Callable[[], object], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_done() and time.monotonic() < end_s:
        time.sleep(0.02)


@pytest.mark.parametrize("hosts", [("a", "a", "a"), ("a", "a", "b", "b")])
def test_a_stall_is_reported_once_by_the_first_rank(hosts: tuple[str, ...]) -> None:
    with ranks(*hosts) as job:
        for rank, page in enumerate(job.pages):
            page.note(4, "waits for its device")  # all of them are this process, whose work would count
            if rank != 1:
                job.calls[rank].begin("all_reduce", waits=True)
        until(lambda: job.stalls)
        time.sleep(STALL_S)
        ((reporter, stall),) = job.stalls
    assert reporter == 0
    assert sorted(stall.sights) == list(range(len(hosts)))
    assert (stall.step, stall.late) == (4, (1,))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_progress_of_any_rank_is_progress(hosts: tuple[str, ...]) -> None:
    with ranks(*hosts) as job:
        job.pages[0].note(1, "trains")
        job.calls[0].begin("all_reduce", waits=True)
        for microbatch in range(40):
            job.pages[1].act("F", 0, microbatch)
            time.sleep(STALL_S / 10)
        assert not job.stalls
        job.pages[1].note(1, "waits for its device")
        until(lambda: job.stalls)
    assert job.stalls[0][1].late == (1,)


def test_work_without_an_event_is_progress_and_a_wait_that_spins_is_none() -> None:
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin, daemon=True)
    with ranks("a") as works, ranks("a") as waits:
        works.pages[0].note(1, "saves")
        waits.pages[0].note(1, "waits for its device")
        thread.start()
        until(lambda: waits.stalls)
        time.sleep(STALL_S)
        over.set()
        assert waits.stalls
        assert not works.stalls
    thread.join()


def test_a_full_queue_of_a_gpu_is_no_work_but_in_the_first_step() -> None:
    over = threading.Event()
    thread = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(over.is_set, True)], daemon=True)
    with ranks("a", spins=True) as first, ranks("a", spins=True) as second:
        for job in (first, second):
            job.pages[0].note(1, "trains")
        time.sleep(STALL_S / 4)
        second.pages[0].note(2, "trains")
        thread.start()
        until(lambda: second.stalls)
        over.set()
        assert second.stalls
        assert not first.stalls
    thread.join()


@pytest.mark.slow
@pytest.mark.ci
def test_a_gpu_that_goes_on_is_progress_of_a_host_that_waits_for_it() -> None:
    class Mark:
        is_past = False

    marks = [Mark() for _ in range(40)]
    with ranks("a", spins=True) as job:
        for microbatch, mark in enumerate(marks):
            job.pages[0].mark(mark, "F", 0, microbatch)
        job.pages[0].note(2, "waits for its device")
        for mark in marks[:-1]:
            mark.is_past = True
            time.sleep(STALL_S / 10)
        assert not job.stalls
        until(lambda: job.stalls)
    assert job.stalls[0][1].sights[0].device == "the end of F of stage 0, micro-batch 39"


def test_the_work_of_a_process_that_was_started_is_seen() -> None:
    program = "import time\nwhile True: sum(range(1000))"
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: others_s(os.getpid()).get(child.pid, 0.0) > 0.05)
        assert others_s(os.getpid())[child.pid] > 0.05
        work = Toil()
        assert not work.is_done(0.0)
        time.sleep(0.2)
        assert work.is_done(0.0)
        assert state_of(child.pid) == ""
    finally:
        child.kill()
        child.wait()
    assert state_of(child.pid) == "gone"


def test_a_stopped_process_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child.send_signal(19)
        until(lambda: state_of(child.pid))
        assert state_of(child.pid) == "stopped (by SIGSTOP)"
    finally:
        child.kill()
        child.wait()


def test_this_host_is_named_first() -> None:
    with suppress(OSError):
        assert this_host().split()[0] == Path("/proc/sys/kernel/hostname").read_text().strip()
