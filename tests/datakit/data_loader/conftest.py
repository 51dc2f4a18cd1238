"""Shared by the stream's tests: no worker of a DataLoader outlives its test."""

from collections.abc import Iterator

import pytest

from tests.datakit.support.data_loaders import end_kept


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    end_kept()
