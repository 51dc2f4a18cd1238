"""Loader of remote stores: steps that are made ahead, and what the first one waits for."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datakit import BatchSizes, Blend, HostBatch, Loader, RemoteStore, TokenStore, write_store
from datakit.loading import read_ahead
from datakit.loading.loader import MOST_REMOTE_STEPS_AHEAD, REMOTE_STEPS_AHEAD
from datakit.loading.read_ahead import ReadAhead
from datakit.shards.cached_shards import Block, CachedShards
from datakit.shards.store_source import StoreSource
from datakit.store.archiving import archive
from tests.datakit.shards.conftest import BLOCK_BYTES, is_idle
from tests.datakit.support.small_blocks import cut_blocks
from tests.datakit.support.waiting import wait_until
from threefold.errors import CheckFailed


def remote_blend(store: TokenStore, tmp_path: Path, **options: Any) -> Blend:
    remote = RemoteStore.at(f"file://{store.path}", cache=str(tmp_path / "cache"), cache_mib=64)
    return Blend([(remote, 1.0)], seq_length=16, **options)


@pytest.mark.parametrize(
    ("rows", "dp_size", "most"),
    [
        (4, 1, MOST_REMOTE_STEPS_AHEAD),
        (100_000, 1, 64 * 2**20 // (100_000 * 17 * 8)),
        (300_000, 1, REMOTE_STEPS_AHEAD),
        (4, 2, REMOTE_STEPS_AHEAD),
    ],
)
def test_few_large_steps_are_made_ahead_or_many_small_ones(
    store: TokenStore, tmp_path: Path, rows: int, dp_size: int, most: int
) -> None:
    with Loader(remote_blend(store, tmp_path), rows, 1, 0, dp_size) as loader:
        assert loader._most_ahead == most


def test_the_first_step_is_given_out_with_those_after_it(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts, step_at = list[int](), Loader.step_at

    def noted(self: Loader, first: int, out: Any = None) -> HostBatch:
        firsts.append(first)
        return step_at(self, first, out)

    monkeypatch.setattr(Loader, "step_at", noted)
    with Loader(remote_blend(store, tmp_path), 4, 1) as loader:
        assert loader.next_step().first_sample == 0
        assert firsts[:MOST_REMOTE_STEPS_AHEAD] == [4 * step for step in range(MOST_REMOTE_STEPS_AHEAD)]
        for step in range(1, 20):
            assert loader.next_step().first_sample == 4 * step
    assert firsts == [4 * step for step in range(len(firsts))]


def test_the_first_step_is_given_out_though_one_after_it_fails(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_at = Loader.step_at

    def failing(self: Loader, first: int, out: Any = None) -> HostBatch:
        if first == 8:
            raise CheckFailed("the third step")
        return step_at(self, first, out)

    monkeypatch.setattr(Loader, "step_at", failing)
    with Loader(remote_blend(store, tmp_path), 4, 1) as loader:
        assert [loader.next_step().first_sample for _ in range(2)] == [0, 4]
        for _ in range(2):
            with pytest.raises(CheckFailed, match="the third step"):
                loader.next_step()
        monkeypatch.undo()
        assert loader.next_step().first_sample == 8


def test_requests_for_what_is_read_much_later_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cache that holds some two dozen blocks, of which none is over."""
    cut_blocks(monkeypatch, 1 << 15)
    store = write_store(tmp_path / "store", [range(1 << 10)] * 2048, vocab_size=1 << 10)
    remote = RemoteStore.at(f"file://{store.path}", cache=str(tmp_path / "cache"), cache_mib=1)
    blend = Blend([(remote, 1.0)], seq_length=1 << 10, seed=1, block_tokens=1 << 14)
    lock, may_go, under_way, num_now = threading.Lock(), threading.Event(), list[int](), 0
    fetch_run = CachedShards.fetch_run

    def counted(self: CachedShards, run: list[Block]) -> None:
        nonlocal num_now
        with lock:
            num_now += 1
            under_way.append(num_now)
        may_go.wait(20)
        fetch_run(self, run)
        with lock:
            num_now -= 1

    monkeypatch.setattr(CachedShards, "fetch_run", counted)
    ahead = ReadAhead(blend, lambda first: np.arange(first, first + 16), 0, BatchSizes(16), max_together=1)
    try:
        wait_until(lambda: ahead._ahead_bytes > 0.9 * ahead._most_bytes)
        wait_until(lambda: len(under_way) == read_ahead.NUM_THREADS)
        may_go.set()
        wait_until(lambda: not ahead._to_fetch and is_idle(ahead))
    finally:
        may_go.set()
        ahead.close()
        ahead.wait(time.monotonic() + 20)
    assert under_way[-1] <= read_ahead.LEAST_AT_ONCE


@pytest.mark.parametrize("kind", ["store", "archive"])
def test_shards_are_opened_without_looking_them_up(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each look-up is a request more before anything of a shard can be read."""
    cut_blocks(monkeypatch, BLOCK_BYTES)
    place = store
    if kind == "archive":
        archive(store.path, str(tmp_path / "archive"), frame_bytes=BLOCK_BYTES)
    url = f"file://{place.path if kind == 'store' else tmp_path / 'archive'}"

    def looked_up(self: StoreSource, file: object) -> None:
        raise AssertionError(f"{file} is looked up")

    monkeypatch.setattr(StoreSource, "check_size", looked_up)
    remote = RemoteStore.at(url, cache=str(tmp_path / "cache"), cache_mib=64)
    assert remote.tokens(0, store.num_tokens).tolist() == store.tokens(0, store.num_tokens).tolist()
    assert remote.origin(0) == store.origin(0)


def test_a_first_step_imports_no_masked_arrays(store: TokenStore, tmp_path: Path) -> None:
    """They take as long as several requests, and np.unique needs them at its first use."""
    program = (
        "import sys\n"
        "from datakit import Blend, Loader, RemoteStore\n"
        f"remote = RemoteStore.at({store.path.as_uri()!r}, cache={str(tmp_path / 'cache')!r}, cache_mib=64)\n"
        "with Loader(Blend([(remote, 1.0)], seq_length=16, block_tokens=64), 4, 1) as loader:\n"
        "    loader.next_step()\n"
        "print('numpy.ma' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_steps_of_a_batch_that_grows_are_read_ahead(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [range(200)] * 40, vocab_size=300)
    sizes, local = BatchSizes(16, (4, 4, 40)), Blend([(store, 1.0)], seq_length=16)
    with Loader(remote_blend(store, tmp_path), 4, sizes) as loader, Loader(local, 4, sizes) as expected:
        for _ in range(12):
            assert (loader.next_step().tokens == expected.next_step().tokens).all()
        reading = loader._reading
        assert reading is not None
        first = sizes.samples_after(0, 40)
        assert (reading.number(first), reading.number(first + 4)) == (40, None)
