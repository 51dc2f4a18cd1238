"""Waiting for what other threads do, for a bounded time."""

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until_s, "it is so by now"
        time.sleep(0.01)
