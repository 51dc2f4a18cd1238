"""MakingThread and MadeAhead: things in order, errors with those who take them, and no thread left behind."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from datakit import Blend, Loader, write_store
from datakit.loading.making_thread import MadeAhead, MakingThread
from tests.datakit.support.waiting import wait_until
from threefold.errors import UserError


def started(name: str = "maker") -> MakingThread:
    thread = MakingThread(name)
    thread.start()
    return thread


def test_things_are_made_in_order_on_one_other_thread() -> None:
    thread, ahead, seen = started(), MadeAhead[int](), list[int]()
    for number in range(50):
        thread.want(ahead.make, lambda number=number: seen.append(threading.get_ident()) or number)
    ahead.wait_for(20)
    assert len(seen) >= 20
    assert [ahead.take() for _ in range(50)] == list(range(50))
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()
    thread.close()
    thread.wait()


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_an_error_comes_in_its_turn_and_is_not_kept(is_waited_for: bool) -> None:
    class Large:
        pass

    def fail() -> None:
        large = Large()
        references.append(ref(large))
        raise KeyError("here")

    thread, ahead, references, after = started(), MadeAhead[Any](), list[ref[Large]](), list[int]()
    for make in (lambda: 2, fail, lambda: after.append(3)):
        thread.want(ahead.make, make)
    if is_waited_for:
        ahead.wait_for(3)
    assert ahead.take() == 2
    with pytest.raises(KeyError, match="here"):
        ahead.take()
    thread.close()
    thread.wait()
    assert not after, "what follows a thing that failed is not made"
    assert references[0]() is None


def test_what_is_over_is_not_made() -> None:
    thread, may_go, is_begun, numbers = started(), threading.Event(), threading.Event(), list[int]()
    first, second = MadeAhead[Any](), MadeAhead[Any]()
    thread.want(first.make, lambda: is_begun.set() or may_go.wait())
    thread.want(first.make, lambda: numbers.append(1))
    thread.want(second.make, lambda: numbers.append(2))
    assert is_begun.wait(20)
    first.is_over = True
    may_go.set()
    second.take()
    assert numbers == [2]
    assert first.take(), "what was under way was made"
    thread.close()


def test_the_thread_ends_with_the_last_reference() -> None:
    thread, ahead = started("maker that is let go"), MadeAhead[int]()
    thread.want(ahead.make, lambda: 1)
    assert ahead.take() == 1
    del thread
    gc.collect()
    wait_until(lambda: all(each.name != "maker that is let go" for each in threading.enumerate()))


def test_a_program_ends_after_what_is_being_made() -> None:
    program = (
        "import time\n"
        "from datakit.loading.making_thread import MakingThread\n"
        "thread = MakingThread('maker')\n"
        "thread.start()\n"
        "thread.want(lambda text: (time.sleep(0.3), print(text, flush=True)), 'made')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "made\n", "")


def test_the_thread_takes_no_processor_from_others() -> None:
    thread, ahead = started(), MadeAhead[int]()
    thread.want(ahead.make, lambda: os.sched_getscheduler(0))
    assert ahead.take() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) != os.SCHED_BATCH
    thread.close()


def test_a_closed_loader_says_so(tmp_path: Path) -> None:
    blend = Blend([(write_store(tmp_path / "store", [range(90)], vocab_size=90), 1.0)], seq_length=4)
    loader = Loader(blend, 2, 1)
    loader.next_step()
    for _ in range(2):
        loader.close()
    for call in (loader.next_step, loader.prefetch):
        with pytest.raises(UserError, match="the loader is closed"):
            call()
    with Loader(blend, 2, 1, cursor=loader.cursor) as other:
        assert other.next_step().first_sample == 2
