"""Waiting for what other threads do, for a bounded time."""

import time
from collections.abc import Callable

from tests.support.checks import require


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not is_so():
        require(time.monotonic() < until_s, "it is not so by now")
        time.sleep(0.01)
