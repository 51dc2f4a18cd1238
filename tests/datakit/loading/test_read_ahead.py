"""ReadAhead: which blocks it keeps for steps that this rank, or another, has yet to make."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from datakit import BatchSizes, Blend, RemoteStore, write_store
from datakit.format.shard import Int64s
from datakit.loading.read_ahead import MAPPED_STEPS, ReadAhead
from datakit.shards.cached_shards import Block, CachedShards
from datakit.shards.shard_tokens import ShardTokens
from tests.datakit.shards.conftest import is_idle
from tests.datakit.support.small_blocks import cut_blocks
from tests.datakit.support.waiting import wait_until

NUM_STEPS = 20  # that are planned at a time


def test_blocks_are_kept_for_the_last_steps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_blocks(monkeypatch, 64)
    store = write_store(tmp_path / "store", [range(20)] * 200, vocab_size=300)
    remote = RemoteStore.at(f"file://{store.path}", cache=str(tmp_path / "cache"), cache_mib=8)
    blend = Blend([(remote, 1.0)], seq_length=16, seed=1)

    def blocks_of(step: int) -> set[str]:
        [(_, start, stop)] = blend.cut([step]).ranges()
        numbers = remote.shards.blocks(0, np.array([start]), np.array([stop]))
        return {remote.shards.block(0, number).name for number in numbers}

    def wait_for(step: int) -> None:
        wait_until(lambda: ahead.rows(step) is not None)
        with ahead._changed:  # until its blocks are needed too
            pass

    ahead = ReadAhead(blend, lambda first: np.array([first]), 0, BatchSizes(1), max_steps=NUM_STEPS, max_together=1)
    try:
        wait_for(NUM_STEPS - 1)
        assert set[str]().union(*map(blocks_of, range(NUM_STEPS))) <= remote.cache.needed
        ahead.begin(10, 3)
        wait_for(7 + NUM_STEPS - 1)
        still = set[str]().union(*map(blocks_of, range(7, 7 + NUM_STEPS)))
        assert still <= remote.cache.needed
        over = set[str]().union(*map(blocks_of, range(7))) - still
        assert over
        assert not over & remote.cache.needed
        assert not ahead._to_unmap, "it would grow by each step"
    finally:
        ahead.close()
        ahead.wait(time.monotonic() + 20)
    assert not still & remote.cache.needed


def test_steps_share_requests_and_later_shards_are_open_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps of 2 rows, 8 of which read the blocks of a stretch; shards end inside stretches."""
    cut_blocks(monkeypatch, 64)
    documents = [range(20)] * 400
    store = write_store(tmp_path / "store", documents, vocab_size=300, shard_documents=100)
    remote = RemoteStore.at(f"file://{store.path}", cache=str(tmp_path / "cache"), cache_mib=8)
    blend = Blend([(remote, 1.0)], seq_length=16, seed=1, block_tokens=256)
    runs, opened, opened_before, opened_by = list[list[Block]](), set[int](), list[bool](), set[str]()
    fetch_run, open_tokens = CachedShards.fetch_run, CachedShards._open_tokens

    def fetched(self: CachedShards, run: list[Block]) -> None:
        runs.append(run)
        opened_before.append(run[0].shard in opened)
        fetch_run(self, run)

    def opened_too(self: CachedShards, number: int) -> ShardTokens:
        opened_by.add(threading.current_thread().name)
        tokens = open_tokens(self, number)
        opened.add(number)
        return tokens

    monkeypatch.setattr(CachedShards, "fetch_run", fetched)
    monkeypatch.setattr(CachedShards, "_open_tokens", opened_too)
    num_steps = int(blend.rows[0]) // 2
    ahead = ReadAhead(blend, lambda first: np.arange(first, first + 2), 0, BatchSizes(2))
    try:
        wait_until(lambda: ahead.rows(2 * num_steps - 2) is not None and is_idle(ahead))
    finally:
        ahead.close()
        ahead.wait(time.monotonic() + 20)
    assert all(opened_before)
    assert opened == set(range(4))
    assert opened_by == {"datakit-fetch"}, "by no thread that others wait for"
    blocks = [(block.shard, block.number) for run in runs for block in run]
    assert len(blocks) == len(set(blocks))
    assert len(runs) < num_steps / 4, "without steps that are planned together it is four times as many"


def test_tiny_steps_are_planned_at_once(tmp_path: Path) -> None:
    """So many of them fit into what is read ahead that walking through all would take minutes."""
    store = write_store(tmp_path / "store", [range(20)] * 400, vocab_size=300)
    remote = RemoteStore.at(f"file://{store.path}", cache=str(tmp_path / "cache"), cache_mib=1024)
    goes_on = threading.Event()

    def samples_of(first: int) -> Int64s:
        if first >= 1000:
            goes_on.wait(30)
        return np.array([first])

    ahead = ReadAhead(Blend([(remote, 1.0)], seq_length=8, seed=1), samples_of, 0, BatchSizes(1))
    try:
        wait_until(lambda: ahead.rows(10) is not None)
    finally:
        goes_on.set()
        ahead.close()
        ahead.wait(time.monotonic() + 20)
    assert not any(thread.is_alive() for thread in (ahead._planner, *ahead._threads._threads))


def test_blocks_are_mapped_before_a_step_until_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_blocks(monkeypatch, 64)
    store = write_store(tmp_path / "store", [range(20)] * 2000, vocab_size=300)
    remote = RemoteStore.at(f"file://{store.path}", cache=str(tmp_path / "cache"), cache_mib=8)
    remote.cache.mapped.most = 1000
    blend = Blend([(remote, 1.0)], seq_length=16, seed=1, block_tokens=64)
    opened = blend.stores[0].shards.cached
    assert opened is not None

    def is_mapped(step: int) -> bool:
        _, starts, stops = blend.cut(np.arange(4 * step, 4 * step + 4)).ranges().T
        return {(0, block) for block in opened.blocks(0, starts, stops)} <= {*opened._mapped_blocks._values}

    steps = BatchSizes(4)
    ahead = ReadAhead(blend, lambda first: np.arange(first, first + 4), 0, steps, max_steps=NUM_STEPS, max_together=1)
    try:
        for step in range(100):
            ahead.begin(step, 0)
            wait_until(lambda step=step: ahead.rows(4 * step + 4 * NUM_STEPS - 4) is not None)
            wait_until(lambda: is_idle(ahead))
        wait_until(lambda: is_mapped(99 + MAPPED_STEPS))
        assert not is_mapped(50)
        assert len(opened._mapped_blocks) < 100
    finally:
        ahead.close()
        ahead.wait(time.monotonic() + 20)


@pytest.mark.parametrize(("cache_mib", "comes_whole"), [(2, False), (32, True)])
def test_a_stretch_is_read_ahead_whole_if_the_cache_has_room(tmp_path: Path, cache_mib: int, comes_whole: bool) -> None:
    store = write_store(tmp_path / "store", [[7] * 1000] * 1200, vocab_size=300)
    remote = RemoteStore.at(f"file://{store.path}", cache=str(tmp_path / "cache"), cache_mib=cache_mib)
    blend = Blend([(remote, 1.0)], seq_length=16, seed=1, block_tokens=1 << 20)
    first = next(number for number in range(10_000) if blend.cut([number]).starts[0] < 1 << 19)
    ahead = ReadAhead(blend, lambda first: np.array([first]), first, BatchSizes(1))
    try:
        wait_until(lambda: ahead.rows(first) is not None)
        size = sum(part.size_bytes for part in ahead._parts_of(blend.cut([first]), {}).values())
    finally:
        ahead.close()
        ahead.wait(time.monotonic() + 20)
    assert (size >= 2 << 20) == comes_whole
    assert size < (3 << 20 if comes_whole else 1.6 * 2**20)
