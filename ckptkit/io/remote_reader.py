"""RemoteReader: verified reads of a data file that no local path leads to; the counterpart of blocks.BlockReader."""

import numpy as np
import numpy.typing as npt

from ckptkit.io.blocks import GRANULE_BYTES, Columns, DamagedGranule, checksums, copy_many
from threefold.storage import Storage

MAX_REQUEST_BYTES = 16 << 20
MAX_BATCH_BYTES = 32 << 20  # read by one call of the storage, which asks for its ranges side by side


class RemoteReader:
    """Reads whole granules of one object and verifies them; the last granule stays for the next, ascending read.

    `expected` are the recorded checksums (None reads unverified). Memory: one batch of requests and one granule.
    """

    def __init__(self, storage: Storage, key: str, size_bytes: int, expected: Columns | None) -> None:
        self.storage, self.key, self.size_bytes = storage, key, size_bytes
        self.bytes_read = 0
        self._expected = expected
        self._kept_granule = -1
        self._kept = b""

    def read(self, ranges: npt.ArrayLike, *, num_threads: int = 2) -> None:
        """Fill memory from ranges (rows of file offset, bytes, target address) that are sorted by offset.

        Raises DamagedGranule before anything of a damaged granule is handed out.
        """
        rows = np.ascontiguousarray(ranges, np.int64).reshape(-1, 3)
        rows = rows[rows[:, 1] > 0]
        reach = np.maximum.accumulate(rows[:, 0] + rows[:, 1])
        assert not len(rows) or reach[-1] <= self.size_bytes, f"a range leaves {self.key}"
        batch: list[tuple[int, int]] = []
        for span in self._spans(rows):
            if batch and sum(b - a for a, b in batch) + span[1] - span[0] > MAX_BATCH_BYTES:
                self._read_spans(batch, rows, reach)
                batch = []
            batch.append(span)
        if batch:
            self._read_spans(batch, rows, reach)

    def close(self) -> None:
        """Nothing is held open."""

    def _spans(self, rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """The byte ranges of the granules touched, each granule once; the kept granule is a span of its own."""
        spans: list[list[int]] = []  # granules
        for first, stop in zip(
            (rows[:, 0] // GRANULE_BYTES).tolist(),
            (-(-(rows[:, 0] + rows[:, 1]) // GRANULE_BYTES)).tolist(),
            strict=True,
        ):
            first = max(first, spans[-1][1]) if spans else first
            while first < stop:
                end = min(stop, first + MAX_REQUEST_BYTES // GRANULE_BYTES)
                if first == self._kept_granule:
                    end = first + 1
                elif first < self._kept_granule < end:
                    end = self._kept_granule
                joins = (
                    spans
                    and spans[-1][1] == first
                    and self._kept_granule not in (first, first - 1)
                    and end - spans[-1][0] <= MAX_REQUEST_BYTES // GRANULE_BYTES
                )
                if joins:
                    spans[-1][1] = end
                else:
                    spans.append([first, end])
                first = end
        return [(a * GRANULE_BYTES, min(b * GRANULE_BYTES, self.size_bytes)) for a, b in spans]

    def _read_spans(
        self, spans: list[tuple[int, int]], rows: npt.NDArray[np.int64], reach: npt.NDArray[np.int64]
    ) -> None:
        kept = (self._kept_granule * GRANULE_BYTES, self._kept)
        missing = [span for span in spans if span[0] != kept[0]]
        found = dict(zip((a for a, _ in missing), self.storage.read_ranges(self.key, missing), strict=True))
        self.bytes_read += sum(b - a for a, b in missing)
        for start, stop in spans:
            data = found.get(start, kept[1])
            if start in found:
                self._verify(start, data)
            first, last = np.searchsorted(reach, start, "right"), np.searchsorted(rows[:, 0], stop, "left")
            offset, size, target = rows[first:last].T
            begin, end = np.maximum(offset, start), np.minimum(offset + size, stop)
            base = np.frombuffer(data, np.uint8).ctypes.data
            copies = np.stack([base + begin - start, target + begin - offset, end - begin], axis=1)
            copy_many(copies[end > begin].astype(np.uint64))
            tail = (stop - 1) // GRANULE_BYTES
            self._kept_granule, self._kept = tail, data[tail * GRANULE_BYTES - start :]

    def _verify(self, start: int, data: bytes) -> None:
        if self._expected is None:
            return
        found, first = checksums(data), start // GRANULE_BYTES
        wrong = np.flatnonzero(found != self._expected[first : first + len(found)])
        if len(wrong):
            raise DamagedGranule(f"{self.storage.url}/{self.key}", first + int(wrong[0]))
