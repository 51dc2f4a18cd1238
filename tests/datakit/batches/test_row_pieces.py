"""Mapped rows that are not in memory are asked for at once, and those of the next step ahead of it."""

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from datakit import Blend, Loader, TokenStore, write_store
from tests.datakit.support.waiting import wait_until

ROWS, L = 16, 512


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return write_store(tmp_path / "store", [range(1 << 16)] * 64, vocab_size=1 << 16)  # 8 MiB


def drop(store: TokenStore) -> None:
    """Leave nothing of a store's tokens in the page cache, or skip a file system that keeps them."""
    for path in store.path.glob("*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if num_pages(store):
        pytest.skip("the pages of this file system stay in memory")


def num_pages(store: TokenStore) -> int:
    """How many pages of a store's tokens are in memory."""
    shard, libc = TokenStore.open(store.path).shard(0), ctypes.CDLL(None)
    found = np.zeros(-(-len(shard.tokens) * store.itemsize // 4096), np.uint8)
    size = ctypes.c_size_t(len(shard.tokens) * store.itemsize)
    assert libc.mincore(ctypes.c_void_p(shard.address), size, ctypes.c_void_p(found.ctypes.data)) == 0
    return int((found & 1).sum())


def test_pages_are_asked_for_if_some_are_not_in_memory(store: TokenStore) -> None:
    blend = Blend([(store, 1.0)], seq_length=L, seed=1)
    drop(store)
    expected = blend.batch(range(ROWS)).buffer.copy()
    assert blend._batches.table.is_cold
    for _ in range(40):
        again = blend.batch(range(ROWS)).buffer
    assert (again == expected).all()
    assert not blend._batches.table.is_cold


def test_the_next_step_is_asked_for_while_this_one_is_used(store: TokenStore) -> None:
    blend = Blend([(store, 1.0)], seq_length=L, seed=1)
    drop(store)
    rows = blend.cut(range(ROWS))
    blend._batches.table.ask_ahead(rows)
    first = rows.pieces[:, 1] // 4096
    wait_until(lambda: num_pages(store) >= len(set(first.tolist())))


def test_a_loader_asks_for_the_step_after_the_one_it_makes(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[list[int]]()
    monkeypatch.setattr(Blend, "ask_ahead", lambda _, samples: asked.append(samples.tolist()))
    with Loader(Blend([(store, 1.0)], seq_length=L), 2, 2) as loader:
        for _ in range(3):
            loader.next_step()
    assert asked[:3] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
