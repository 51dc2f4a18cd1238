"""A store, and the same behind a URL in small blocks."""

from collections.abc import Iterator

import numpy as np
import pytest

from datakit import TokenStore, write_store
from datakit.loading.read_ahead import NUM_THREADS, ReadAhead
from datakit.shards.cached_shards import CachedShards
from tests.datakit.support.small_blocks import cut_blocks

BLOCK_BYTES = 512


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Documents of all lengths, empty ones and one of several blocks too, in six shards."""
    rng = np.random.default_rng(3)
    sizes = [0, 0, 3000, 1, *rng.integers(0, 90, 200), 0]
    path = tmp_path_factory.mktemp("remote") / "store"
    return write_store(path, [rng.integers(0, 300, size) for size in sizes], vocab_size=300, shard_documents=40)


@pytest.fixture(scope="module")
def remote(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedShards]:
    """The shards of the store behind a URL."""
    with pytest.MonkeyPatch.context() as patch:
        cut_blocks(patch, BLOCK_BYTES)
        yield CachedShards.open(f"file://{store.path}", tmp_path_factory.mktemp("cache"), 64)


def is_idle(ahead: ReadAhead) -> bool:
    """Return whether all that it asked for is done."""
    return len(ahead._threads._idle) == NUM_THREADS
