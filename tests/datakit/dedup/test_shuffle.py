"""Shuffle: every bucket has its rows in the order they were put in, whatever the runs and the pieces."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.dedup.shuffle import Shuffle
from threefold.errors import StorageError

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**64 - 1)), max_size=60)


@given(ROWS, st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_buckets_keep_the_order_of_their_rows(
    rows: list[tuple[int, int]], run_rows: int, batch: int, piece: int
) -> None:
    with TemporaryDirectory() as folder, Shuffle(Path(folder), 5, 2, run_bytes=16 * run_rows) as shuffle:
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            values = np.array([(value, at) for at, (_, value) in enumerate(part, start)], np.uint64)
            shuffle.add(np.array([bucket for bucket, _ in part]), values)
        shuffle.finish()
        assert not os.listdir(folder)
        for bucket in range(5):
            pieces = list(shuffle.read(bucket, 16 * piece))
            assert all(len(each) == piece for each in pieces[:-1])
            assert all(0 < len(each) <= piece for each in pieces[-1:])
            found = [tuple(row) for each in pieces for row in each.tolist()]
            assert found == [(value, at) for at, (each, value) in enumerate(rows) if each == bucket]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        Shuffle(tmp_path / "none", 1, 1, run_bytes=8)
