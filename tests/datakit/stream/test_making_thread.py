"""MakingThread: things in order, errors with those who asked, and no thread left behind."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from weakref import ref

import pytest

from datakit import Blend, Loader, write_store
from datakit.stream.making_thread import MakingThread
from threefold.errors import UserError


def test_things_are_made_in_order_on_one_other_thread() -> None:
    thread, seen = MakingThread("maker"), []
    wanted = [thread.submit(lambda number=number: seen.append(threading.get_ident()) or number) for number in range(50)]
    assert [each.result() for each in wanted] == list(range(50))
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()
    thread.close()
    thread.wait()


def test_an_error_goes_to_who_asked_and_is_not_kept() -> None:
    class Large:
        pass

    def fail() -> None:
        large = Large()
        kept.append(ref(large))
        raise KeyError("here")

    thread, kept = MakingThread("maker"), list[ref[Large]]()
    failed, after = thread.submit(fail), thread.submit(lambda: 3)
    with pytest.raises(KeyError, match="here"):
        failed.result()
    assert after.result() == 3
    del failed
    gc.collect()
    assert kept[0]() is None
    thread.close()


def test_what_is_cancelled_is_not_made() -> None:
    thread, may_go, made = MakingThread("maker"), threading.Event(), []
    first = thread.submit(may_go.wait)
    second, third = thread.submit(lambda: made.append(2)), thread.submit(lambda: made.append(3))
    second.cancel()
    may_go.set()
    assert first.result()
    third.result()
    assert made == [3]
    thread.close()


def test_the_thread_ends_with_the_last_reference() -> None:
    thread = MakingThread("maker that is let go")
    assert thread.submit(lambda: 1).result() == 1
    del thread
    gc.collect()
    until_s = time.monotonic() + 10
    while any(each.name == "maker that is let go" for each in threading.enumerate()):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_program_ends_after_what_is_being_made() -> None:
    program = (
        "import time\n"
        "from datakit.stream.making_thread import MakingThread\n"
        "thread = MakingThread('maker')\n"
        "thread.submit(lambda: (time.sleep(0.3), print('made', flush=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "made\n", "")


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
