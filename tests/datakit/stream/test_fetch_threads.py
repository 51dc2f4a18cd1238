"""FetchThreads: everything is done, by as few threads as there is work for."""

import threading
import time

from datakit.stream.fetch_threads import FetchThreads


def wait_until_idle(threads: FetchThreads, num_threads: int) -> None:
    until_s = time.monotonic() + 20
    while len(threads._idle) < num_threads:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_one_thread_does_what_comes_one_after_the_other() -> None:
    threads, seen = FetchThreads(4), list[int]()
    for _ in range(20):
        wait_until_idle(threads, 4)
        threads.want(lambda: seen.append(threading.get_ident()))
    wait_until_idle(threads, 4)
    assert len(seen) == 20
    assert len(set(seen)) == 1
    threads.close()
    threads.wait(time.monotonic() + 20)
    assert not any(thread.is_alive() for thread in threads._threads)


def test_more_things_than_threads_are_done_in_their_order() -> None:
    threads, all_work, may_go, done = FetchThreads(4), threading.Barrier(5), threading.Event(), list[int]()

    def hold() -> None:
        all_work.wait(20)
        may_go.wait(20)

    for _ in range(4):
        threads.want(hold)
    all_work.wait(20)
    is_last = threading.Event()
    for number in range(50):
        threads.want(lambda number=number: done.append(number))
    threads.want(is_last.set)
    assert not done
    may_go.set()
    assert is_last.wait(20)
    wait_until_idle(threads, 4)
    assert sorted(done) == list(range(50))
    assert done[0] == 0
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
