"""FetchThreads: everything is done, by as few threads as there is work for."""

import threading
import time

import pytest

from datakit.loading.fetch_threads import FetchThreads
from tests.datakit.support.waiting import wait_until


def wait_until_idle(threads: FetchThreads) -> None:
    wait_until(lambda: len(threads._idle) == len(threads._threads))


def test_one_thread_does_what_comes_one_after_the_other() -> None:
    threads, seen = FetchThreads(4), list[int]()
    for _ in range(20):
        wait_until_idle(threads)
        threads.want(lambda: seen.append(threading.get_ident()))
    wait_until_idle(threads)
    assert len(seen) == 20
    assert len(set(seen)) == 1
    threads.close()
    threads.wait(time.monotonic() + 20)
    assert not any(thread.is_alive() for thread in threads._threads)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_more_things_than_threads_are_begun_in_their_order(num_threads: int) -> None:
    threads, all_work = FetchThreads(num_threads), threading.Barrier(num_threads + 1)
    may_go, done = threading.Event(), list[int]()

    def hold() -> None:
        all_work.wait(20)
        may_go.wait(20)

    for _ in range(num_threads):
        threads.want(hold)
    all_work.wait(20)
    is_last = threading.Event()
    for number in range(50):
        threads.want(lambda number=number: done.append(number))
    threads.want(is_last.set)
    assert not done
    may_go.set()
    assert is_last.wait(20)
    wait_until_idle(threads)
    assert sorted(done) == list(range(50))
    if num_threads == 1:  # of several, which are done in any order
        assert done == list(range(50))
    threads.close()


def test_what_waits_is_not_done_after_close() -> None:
    threads, is_begun, may_go, done = FetchThreads(1), threading.Event(), threading.Event(), list[int]()
    threads.want(lambda: is_begun.set() or may_go.wait(20))
    threads.want(lambda: done.append(1))
    assert is_begun.wait(20)
    threads.close()
    threads.want(lambda: done.append(2))
    may_go.set()
    threads.wait(time.monotonic() + 20)
    assert not done
