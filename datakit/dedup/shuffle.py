"""Shuffle: rows of numbers, put in one after the other, taken out bucket by bucket in the order they were put in.

They are in one file without a name, in runs that are ordered by bucket, so that a bucket is read with one request a
run and a kill leaves nothing. Memory is one run, and 4 bytes a bucket for each run.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from datakit.files.durable import writing
from threefold.closing import Closing
from threefold.errors import StorageError

UInt64s = npt.NDArray[np.uint64]
MAX_BUCKETS = 1 << 16
_WRITE_ROWS = 1 << 18


class Shuffle(Closing):
    """Rows of `num_columns` u64 in `num_buckets` buckets: `add` them all, `finish`, then read; use it in a `with`."""

    def __init__(self, folder: Path, num_buckets: int, num_columns: int, *, run_bytes: int) -> None:
        """Make the file in a folder; a run has at most `run_bytes`."""
        assert 0 < num_buckets <= MAX_BUCKETS, f"{num_buckets} buckets"
        self._folder, self._num_buckets = folder, num_buckets
        self._row_bytes = 8 * num_columns
        num_rows = max(run_bytes // self._row_bytes, 1)
        self._rows = np.empty((num_rows, num_columns), np.uint64)
        self._buckets = np.empty(num_rows, np.uint16)  # 16 bits: numpy then sorts in linear time
        self._filled = 0
        self._first_row = 0  # of the run that is being filled
        self._runs: list[tuple[int, npt.NDArray[np.uint32]]] = []  # first row; where in the run each bucket begins
        with writing(folder):
            self._file: Any = TemporaryFile(dir=folder)  # noqa: SIM115 - closed on exit

    def add(self, buckets: npt.NDArray[np.integer], rows: UInt64s) -> None:
        """Put in some rows, each into its bucket."""
        at = 0
        while at < len(rows):
            stop = min(len(rows), at + len(self._rows) - self._filled)
            end = self._filled + stop - at
            self._rows[self._filled : end] = rows[at:stop]
            self._buckets[self._filled : end] = buckets[at:stop]
            self._filled, at = end, stop
            if self._filled == len(self._rows):
                self._write_run()

    def finish(self) -> None:
        """Put in no more, and let go of the memory."""
        self._write_run()
        with writing(self._folder):
            self._file.flush()
        self._rows, self._buckets = self._rows[:0].copy(), self._buckets[:0].copy()

    def read(self, bucket: int, max_bytes: int) -> Iterator[UInt64s]:
        """Yield the rows of a bucket, in the order they were put in, at most `max_bytes` at a time."""
        max_rows = max(max_bytes // self._row_bytes, 1)
        left = sum(int(begins[bucket + 1] - begins[bucket]) for _, begins in self._runs)
        rows, filled = self._room(min(left, max_rows)), 0
        for first_row, begins in self._runs:
            at, stop = first_row + int(begins[bucket]), first_row + int(begins[bucket + 1])
            while at < stop:
                count = min(stop - at, len(rows) - filled)
                self._read_rows(at, rows[filled : filled + count])
                at, filled = at + count, filled + count
                if filled == len(rows):
                    yield rows
                    left -= filled
                    rows, filled = self._room(min(left, max_rows)), 0

    def _room(self, num_rows: int) -> UInt64s:
        return np.empty((num_rows, self._rows.shape[1]), np.uint64)

    def _write_run(self) -> None:
        count, self._filled = self._filled, 0
        order = np.argsort(self._buckets[:count], kind="stable")
        with writing(self._folder):
            for start in range(0, count, _WRITE_ROWS):
                self._file.write(self._rows[order[start : start + _WRITE_ROWS]].data)
        begins = np.zeros(self._num_buckets + 1, np.uint32)
        np.cumsum(np.bincount(self._buckets[:count], minlength=self._num_buckets), out=begins[1:])
        self._runs.append((self._first_row, begins))
        self._first_row += count

    def _read_rows(self, first: int, rows: UInt64s) -> None:
        try:
            num_bytes = os.preadv(self._file.fileno(), [rows.data], first * self._row_bytes)
        except OSError as error:
            raise StorageError(f"cannot read a temporary file in {self._folder}: {error.strerror}") from error
        if num_bytes != rows.nbytes:
            raise StorageError(f"a temporary file in {self._folder} gave {num_bytes} bytes of {rows.nbytes}")

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
