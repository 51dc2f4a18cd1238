"""Remote reads: few large requests, several under way at once, and no more in memory than is said."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.io.blocks import GRANULE_BYTES, DamagedGranule, checksums
from ckptkit.io.remote_reader import REQUEST_BYTES, REQUESTS_A_THREAD, RemoteReader, spans_of
from threefold.storage import Buffer
from threefold.storage.local import LocalStorage

SIZE = 37 * GRANULE_BYTES + 5
CONTENT = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)


class SlowStorage(LocalStorage):
    """Each request takes a moment; counts those under way."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lock, self.under_way, self.most_under_way, self.requests = threading.Lock(), 0, 0, 0

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        assert sum(stop - start for start, stop in ranges) <= REQUEST_BYTES
        with self.lock:
            self.requests += 1
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        time.sleep(0.05)
        found = super().read_ranges(key, ranges)
        with self.lock:
            self.under_way -= 1
        return found


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=9), st.integers(-1, 60))
def test_requests_cover_the_granules_once_and_are_bounded(pieces: list[tuple[int, int]], num_kept: int) -> None:
    rows = np.array([(a * GRANULE_BYTES + 7, n * GRANULE_BYTES - 7, 0) for a, n in sorted(pieces)], np.int64)
    spans = spans_of(rows, num_kept)
    covered = [granule for first, stop in spans for granule in range(first, stop)]
    assert covered == sorted({granule for a, n in pieces for granule in range(a, a + n)})
    most = REQUEST_BYTES // GRANULE_BYTES
    assert all(first < stop and first // most == (stop - 1) // most for first, stop in spans)
    if num_kept not in covered:  # no more requests than that takes
        apart = sum(granule % most == 0 or granule - 1 not in covered for granule in covered)
        assert len(spans) == apart
    if num_kept in covered:
        assert (num_kept, num_kept + 1) in spans


def test_several_requests_are_under_way_at_once_and_no_more(tmp_path: Path) -> None:
    storage = SlowStorage(tmp_path)
    storage.write("f", CONTENT.tobytes())
    target = np.zeros(SIZE, np.uint8)
    RemoteReader(storage, "f", SIZE, checksums(CONTENT)).read([(0, SIZE, target.ctypes.data)], num_threads=1)
    assert np.array_equal(target, CONTENT)
    assert storage.requests == 3
    assert 1 < storage.most_under_way <= REQUESTS_A_THREAD


def test_damage_in_any_request_is_told_and_nothing_of_it_handed_out(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    damaged = CONTENT.copy()
    damaged[20 * GRANULE_BYTES + 3] ^= 1
    storage.write("f", damaged.tobytes())
    target = np.zeros(SIZE, np.uint8)
    reader = RemoteReader(storage, "f", SIZE, checksums(CONTENT))
    with pytest.raises(DamagedGranule) as caught:
        reader.read([(0, SIZE, target.ctypes.data)])
    assert caught.value.granule == 20
    assert not target[20 * GRANULE_BYTES : 21 * GRANULE_BYTES].any()
    after = np.zeros(5, np.uint8)
    reader.read([(25 * GRANULE_BYTES, 5, after.ctypes.data)])
    assert np.array_equal(after, CONTENT[25 * GRANULE_BYTES : 25 * GRANULE_BYTES + 5])
