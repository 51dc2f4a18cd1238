"""RemoteReader: verified reads of a data file that no local path leads to; the counterpart of blocks.BlockReader."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ckptkit.io.blocks import GRANULE_BYTES, Columns, DamagedGranule, SumPlaces, place
from threefold.storage import Buffer, Storage
from threefold.storage.second_look import read_checked, say_right

REQUEST_BYTES = 16 << 20
REQUESTS_A_THREAD = 2  # most of a request's time is waiting
BUFFERS_A_THREAD = 3  # one is verified and handed out while the requests go on
Rows = npt.NDArray[np.int64]


class RemoteReader:
    """Reads whole granules of one object and verifies them; the last granule stays for the next, ascending read.

    A granule that is not right is fetched once more on a new connection before it counts as damaged.

    `expected` are the recorded checksums (None reads unverified). Each of several requests at once is verified and
    handed out as it comes, while the others are under way. Several threads may read. Memory: BUFFERS_A_THREAD times
    REQUEST_BYTES a thread, and one granule.
    """

    def __init__(self, storage: Storage, key: str, size_bytes: int, expected: Columns | None) -> None:
        self.storage, self.key, self.size_bytes = storage, key, size_bytes
        self.bytes_read = 0
        self._expected = expected
        self._counting = threading.Lock()
        self._kept: tuple[int, Buffer] = -1, b""  # a granule's number and content

    def read(self, ranges: npt.ArrayLike, *, num_threads: int = 2, sums: SumPlaces | None = None) -> None:
        """Fill memory from ranges (rows of file offset, bytes, target address) that are sorted by offset.

        What is read is added to `sums` in the same pass, if there are any. Raises DamagedGranule before anything of a
        damaged granule is handed out.
        """
        rows = np.ascontiguousarray(ranges, np.int64).reshape(-1, 3)
        has_bytes = rows[:, 1] > 0
        if not has_bytes.any():
            return
        rows, sums = rows[has_bytes], sums and sums.take(has_bytes)
        reach = np.maximum.accumulate(rows[:, 0] + rows[:, 1])
        assert reach[-1] <= self.size_bytes, f"a range leaves {self.key}"
        known = self._kept
        spans = spans_of(rows, known[0])
        requests = threading.Semaphore(REQUESTS_A_THREAD * num_threads)
        with ThreadPoolExecutor(min(BUFFERS_A_THREAD * num_threads, len(spans))) as pool:
            reads = [pool.submit(self._read_span, span, rows, reach, sums, requests, known) for span in spans]
            try:
                for read in reads:
                    last = read.result()
            finally:
                pool.shutdown(cancel_futures=True)
        read_bytes = sum(
            min(stop * GRANULE_BYTES, self.size_bytes) - first * GRANULE_BYTES
            for first, stop in spans
            if first != known[0]
        )
        with self._counting:
            self.bytes_read += read_bytes
        self._kept = spans[-1][1] - 1, last

    def close(self) -> None:
        """Nothing is held open."""

    def _read_span(
        self, span: tuple[int, int], rows: Rows, reach: Rows, sums: SumPlaces | None, requests: threading.Semaphore,
        known: tuple[int, Buffer],
    ) -> Buffer:  # fmt: skip
        """Fetch granules, verify them and copy out what the ranges want; return the last one if no range goes on."""
        first, stop = span
        start, end = first * GRANULE_BYTES, min(stop * GRANULE_BYTES, self.size_bytes)
        expected = None if self._expected is None else self._expected[first:stop]
        if first == known[0]:
            data, expected = known[1], None
        else:
            with requests:
                data = self._fetched(start, end)
        low, high = np.searchsorted(reach, start, "right"), np.searchsorted(rows[:, 0], end, "left")
        rows, sums = rows[low:high], sums and sums.take(slice(low, high))
        damaged = place(data, start, rows, expected, sums)
        while self._expected is not None and damaged is not None:  # nothing from this granule on was handed out
            start, number = damaged * GRANULE_BYTES, damaged
            data = self._fetched_again(start, end)
            damaged = place(data, start, rows, self._expected[number:stop], sums)
            if damaged == number:
                raise DamagedGranule(f"{self.storage.url}/{self.key}", number)
            say_right(f"{self.storage.url}/{self.key}, granule {number},")
        return bytes(memoryview(data)[(stop - 1) * GRANULE_BYTES - start :]) if end >= reach[-1] else b""

    def _fetched(self, start: int, end: int) -> Buffer:
        def read(storage: Storage) -> Buffer:
            [data] = storage.read_ranges(self.key, [(start, end)])
            return data

        return read_checked(self.storage, f"{self.storage.url}/{self.key}", read)

    def _fetched_again(self, start: int, end: int) -> Buffer:
        """Return bytes whose first granule is not right, from a second look if there is one."""
        storage = self.storage.afresh()
        if storage is None:
            raise DamagedGranule(f"{self.storage.url}/{self.key}", start // GRANULE_BYTES)
        [data] = storage.read_ranges(self.key, [(start, end)])
        return data


def spans_of(rows: Rows, kept_granule: int = -1) -> list[tuple[int, int]]:
    """Return the granules [first, stop) that each request fetches, ascending: those that the rows touch, each once.

    A request is within a multiple of REQUEST_BYTES and the next one, as the parts do that a file was sent in: servers
    answer fastest from few of them. The kept granule is a span of its own.
    """
    most = REQUEST_BYTES // GRANULE_BYTES
    spans: list[list[int]] = []
    firsts = (rows[:, 0] // GRANULE_BYTES).tolist()
    stops = (-(-(rows[:, 0] + rows[:, 1]) // GRANULE_BYTES)).tolist()
    for first, stop in zip(firsts, stops, strict=True):
        first = max(first, spans[-1][1]) if spans else first
        while first < stop:
            end = min(stop, (first // most + 1) * most)
            if first == kept_granule:
                end = first + 1
            elif first < kept_granule < end:
                end = kept_granule
            joins = spans and spans[-1][1] == first and first % most and kept_granule not in (first, first - 1)
            if joins:
                spans[-1][1] = end
            else:
                spans.append([first, end])
            first = end
    return [(first, stop) for first, stop in spans]
