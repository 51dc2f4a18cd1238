"""The blocks of CachedShards: which hold what, where they end, which come together, and what of them is mapped."""

import ctypes
from bisect import bisect_right
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import TokenStore
from datakit.shards.cached_shards import MAPPED_PART, CachedShards
from tests.datakit.shards.conftest import BLOCK_BYTES


@given(data=st.data())
def test_the_blocks_of_ranges_are_those_that_hold_their_bytes(remote: CachedShards, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, len(remote.manifest.shards) - 1))
    bounds = remote._tokens.get(shard, remote._open_tokens).bounds
    pairs = data.draw(st.lists(st.lists(st.integers(0, bounds[-1]), min_size=2, max_size=2, unique=True), max_size=5))
    starts, stops = np.sort(np.array(pairs, np.int64).reshape(-1, 2)).T
    inside = {byte for start, stop in zip(starts, stops, strict=True) for byte in range(start, stop)}
    expected = {bisect_right(bounds, byte) - 1 for byte in inside}
    assert remote.blocks(shard, starts, stops) == sorted(expected)


@given(data=st.data())
def test_ranges_are_in_mapped_blocks_if_these_are_read_enough(remote: CachedShards, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, len(remote.manifest.shards) - 1))
    bounds = remote._tokens.get(shard, remote._open_tokens).bounds
    pairs = data.draw(
        st.lists(st.lists(st.integers(0, bounds[-1] // 2), min_size=2, max_size=2, unique=True), min_size=1, max_size=5)
    )
    starts, stops = 2 * np.sort(np.array(pairs, np.int64)).T  # whole tokens
    blocks = [remote.block(shard, number) for number in remote.blocks(shard, starts, stops)]
    mapped = data.draw(st.sets(st.sampled_from(blocks)))
    for block in blocks:
        remote.fetch(block)
        remote.unmap(block)
    remote.map_blocks(mapped)
    found = remote.mapped(shard, starts, stops)
    size = sum(block.size_bytes for block in set(blocks) - mapped)
    assert (found is None) == ((stops - starts).sum() * MAPPED_PART < size)
    if found:
        for address, start, stop in zip(found[0].tolist(), starts.tolist(), stops.tolist(), strict=True):
            assert ctypes.string_at(address, stop - start) == remote.read_tokens(shard, start, stop).tobytes()


@given(data=st.data())
def test_the_stretch_of_a_row_has_all_its_blocks(remote: CachedShards, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([300, 1000, 5000]))
    shards, itemsize = remote.in_stretches_of(size), remote.itemsize
    shard = data.draw(st.integers(0, len(remote.manifest.shards) - 1))
    first, end = remote.token_starts[shard : shard + 2]
    start = data.draw(st.integers(first, end - 1))
    stop = data.draw(st.integers(start + 1, min(end, start // size * size + size + 1)))
    begin, after = ((np.array([token]) - first) * itemsize for token in (start, stop))
    assert shards.stretches(shard, begin) == [start // size]
    blocks = [block.number for block in shards.blocks_of_stretch(shard, start // size)]
    assert set(shards.blocks(shard, begin, after)) <= set(blocks)
    assert blocks == list(range(blocks[0], blocks[-1] + 1))
    edges = shards._tokens.get(shard, shards._open_tokens).edges // itemsize + first
    assert edges[blocks[0] + 1] > start // size * size  # none of them is before the stretch or behind it
    assert edges[blocks[-1]] <= start // size * size + size


@pytest.mark.parametrize("stretch_tokens", [300, 1000, 5000])
def test_blocks_end_where_stretches_do(store: TokenStore, remote: CachedShards, stretch_tokens: int) -> None:
    """A stretch is fetched with no more than the documents at its ends, whose checksums are of the whole of them."""
    shards = remote.in_stretches_of(stretch_tokens)
    assert TokenStore(shards).tokens(0, store.num_tokens).tolist() == store.tokens(0, store.num_tokens).tolist()
    for number, shard in enumerate(map(store.shard, range(len(store.manifest.shards)))):
        edges = shards._tokens.get(number, shards._open_tokens).edges
        starts, lengths = shard.index.pointers, shard.index.lengths.astype(np.int64)
        assert np.isin(edges[:-1], starts).all()
        first, end = store.token_starts[number : number + 2]
        for begin in range(-(-first // stretch_tokens) * stretch_tokens, end, stretch_tokens):
            start, stop = 2 * (begin - first), 2 * (min(begin + stretch_tokens + 1, end) - first)
            blocks = shards.blocks(number, np.array([start]), np.array([stop]))
            inside = (starts < stop) & (starts + 2 * lengths > start)
            assert sum(edges[block + 1] - edges[block] for block in blocks) == 2 * lengths[inside].sum()
        assert np.diff(edges).max() <= 1.5 * BLOCK_BYTES + 2 * lengths.max()


def test_a_file_that_may_not_be_held_is_closed_by_no_other_reader(
    remote: CachedShards, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread reads the same block just after its file was opened."""
    expected = store.tokens(0, 8)
    remote._open_blocks._values.clear()
    monkeypatch.setattr(remote.cache.folder, "may_hold", lambda num_bytes, kind: False)
    usual = remote.cache.opened.used

    def used(owner: Any, number: int) -> None:
        monkeypatch.setattr(remote.cache.opened, "used", usual)
        usual(owner, number)
        remote.read_tokens(0, 0, 8 * remote.itemsize)

    monkeypatch.setattr(remote.cache.opened, "used", used)
    assert np.array_equal(remote.read_tokens(0, 0, 8 * remote.itemsize), expected)
    assert not len(remote._open_blocks)
