"""Shared by the stream's tests: no worker of a DataLoader outlives its test."""

from collections.abc import Iterator

import pytest

from tests.datakit.shards.conftest import store
from tests.datakit.support.data_loaders import end_kept

__all__ = ["store"]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    end_kept()
