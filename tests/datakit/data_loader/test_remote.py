"""datakit.torch over stores in object storage: workers that are forked are refused, others read the one stream."""

from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datakit import Blend, RemoteStore, archive, write_store
from tests.datakit.support.data_loaders import first_batches
from threefold.errors import StorageError

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
DataLoader = torch.utils.data.DataLoader
StreamDataset = import_module("datakit.torch").StreamDataset
L = 8


@pytest.fixture
def near(tmp_path: Path) -> Blend:
    tokens = np.random.default_rng(0).integers(0, 99, 700)
    return Blend([(write_store(tmp_path / "a", np.array_split(tokens, 7), vocab_size=99), 1)], seq_length=L, seed=5)


@pytest.fixture
def far(near: Blend, s3_url: str, tmp_path: Path) -> Blend:
    """The same stream out of an archive on S3, of which nothing is in the cache."""
    archive(near.stores[0].path, s3_url)
    return Blend([(RemoteStore.at(s3_url, cache=str(tmp_path / "cache"), cache_mib=16), 1)], seq_length=L, seed=5)


def rows(batches: Any, num: int) -> list[Any]:
    return [batch["tokens"].tolist() for batch in first_batches(batches, num)]


def test_forked_workers_are_refused_and_the_parent_reads_on(near: Blend, far: Blend) -> None:
    batches = DataLoader(StreamDataset(far, 2), batch_size=None, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(StorageError, match=r'forked(.|\n)*\nhint: DataLoader.*multiprocessing_context="forkserver"'):
        first_batches(batches, 1)
    assert rows(StreamDataset(far, 2), 3) == rows(StreamDataset(near, 2), 3)


@pytest.mark.slow  # each worker imports torch
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_other_workers_persist_and_share_the_cache(near: Blend, far: Blend, start: str) -> None:
    forkserver._forkserver._stop()  # one that another test began has the environment of then, without this server
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": start}
    batches = DataLoader(StreamDataset(far, 2), batch_size=None, **options)
    for num in (5, 9):
        assert rows(batches, num) == rows(StreamDataset(near, 2), num)
    assert rows(StreamDataset(far, 2), 9) == rows(StreamDataset(near, 2), 9)
    [cache] = far.caches
    assert cache.bytes_added == 0, "the workers filled it"
