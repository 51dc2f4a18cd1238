"""ReadAhead: which blocks it keeps for steps that this rank, or another, has yet to make."""

import time
from pathlib import Path

import numpy as np
import pytest

from datakit import Blend, RemoteStore, write_store
from datakit.remote import shard_tokens
from datakit.stream import read_ahead
from datakit.stream.read_ahead import ReadAhead

NUM_STEPS = 20  # that are planned at a time


def test_blocks_are_kept_for_the_last_steps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_tokens, "BLOCK_BYTES", 64)
    monkeypatch.setattr(read_ahead, "MAX_STEPS", NUM_STEPS)
    store = write_store(tmp_path / "store", [range(20)] * 200, vocab_size=300)
    remote = RemoteStore.at(f"file://{store.path}", cache=str(tmp_path / "cache"), cache_mib=8)
    blend = Blend([(remote, 1.0)], seq_length=16, seed=1)

    def blocks_of(step: int) -> set[str]:
        [(_, start, stop)] = blend.cut([step]).ranges()
        numbers = remote.blocks(0, np.array([start]), np.array([stop]))
        return {remote.block(0, number).name for number in numbers}

    def wait_for(step: int) -> None:
        until_s = time.monotonic() + 20
        while ahead.rows(step) is None:
            assert time.monotonic() < until_s, "steps are planned"
            time.sleep(0.01)
        with ahead._changed:  # until its blocks are needed too
            pass

    ahead = ReadAhead(blend, lambda first: np.array([first]), 0, 1)
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
    finally:
        ahead.close()
        ahead.wait(time.monotonic() + 20)
    assert not still & remote.cache.needed
