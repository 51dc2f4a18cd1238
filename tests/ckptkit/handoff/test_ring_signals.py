"""Counts that two processes share, and the wait for them."""

import os
import threading

from ckptkit.handoff.ring_signals import RingSignals, Signal, readable


def test_a_count_is_taken_once_by_whoever_shares_it() -> None:
    own = Signal()
    other = Signal(os.dup(own.fd))
    assert not other.is_set
    own.add(2)
    own.add()
    assert other.is_set
    assert other.take() == 3
    assert not own.is_set
    assert own.take() == 0
    own.close()
    other.close()


def test_a_wait_ends_with_the_first_signal_and_with_the_end_of_a_pipe() -> None:
    one, two = Signal(), Signal()
    assert readable([one, two], 0.01) == []
    adding = threading.Timer(0.05, two.add)
    adding.start()
    assert readable([one, two], 30.0) == [two]
    adding.join()
    reading, writing = map(os.fdopen, os.pipe(), "rw")
    writing.close()
    assert readable([one, reading], 30.0) == [reading]
    for each in (one, two, reading):
        each.close()


def test_a_reset_leaves_nothing_of_the_save_before() -> None:
    signals = RingSignals()
    for signal in (signals.staged, signals.released, signals.stop):
        signal.add(5)
    same = RingSignals(signals.fds)
    signals.reset()
    assert [signal.take() for signal in (same.staged, same.released, same.stop)] == [0, 0, 0]
    signals.close()
