"""Shared by the stream's tests: no worker of a DataLoader outlives its test."""

import gc
import multiprocessing
from collections.abc import Iterator

import pytest

from tests.datakit.support.data_loaders import end_iteration


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    """End the iterations that their loaders keep."""
    yield
    for each in gc.get_objects() if multiprocessing.active_children() else ():
        if hasattr(type(each), "_shutdown_workers"):
            end_iteration(each)
