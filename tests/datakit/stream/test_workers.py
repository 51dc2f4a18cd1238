"""Workers: everything is done, by as few threads as there is work for."""

import threading
import time

from datakit.stream.workers import Workers


def wait_until_idle(workers: Workers, num_threads: int) -> None:
    until_s = time.monotonic() + 20
    while len(workers._idle) < num_threads:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_one_thread_does_what_comes_one_after_the_other() -> None:
    workers, seen = Workers(4, "worker"), list[int]()
    for _ in range(20):
        wait_until_idle(workers, 4)
        workers.want(lambda: seen.append(threading.get_ident()))
    wait_until_idle(workers, 4)
    assert len(seen) == 20
    assert len(set(seen)) == 1
    workers.close()
    workers.wait(time.monotonic() + 20)
    assert not any(thread.is_alive() for thread in workers._threads)


def test_more_things_than_threads_are_done_in_their_order() -> None:
    workers, all_work, may_go, done = Workers(4, "worker"), threading.Barrier(5), threading.Event(), list[int]()

    def hold() -> None:
        all_work.wait(20)
        may_go.wait(20)

    for _ in range(4):
        workers.want(hold)
    all_work.wait(20)
    is_last = threading.Event()
    for number in range(50):
        workers.want(lambda number=number: done.append(number))
    workers.want(is_last.set)
    assert not done
    may_go.set()
    assert is_last.wait(20)
    wait_until_idle(workers, 4)
    assert sorted(done) == list(range(50))
    assert done[0] == 0
    workers.close()


def test_what_waits_is_not_done_after_close() -> None:
    workers, is_begun, may_go, done = Workers(1, "worker"), threading.Event(), threading.Event(), list[int]()
    workers.want(lambda: is_begun.set() or may_go.wait(20))
    workers.want(lambda: done.append(1))
    assert is_begun.wait(20)
    workers.close()
    workers.want(lambda: done.append(2))
    may_go.set()
    workers.wait(time.monotonic() + 20)
    assert not done
