"""Staging: batches of stores that are read with pread equal those of mapped ones, within few open files."""

import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import Blend, MegatronBlend, MegatronOrder, PackedStore, TokenStore, pack, write_store
from datakit.batches.staging import MAX_GAP_BYTES, plan
from datakit.shards.shard_file import OPEN_FILES
from threefold.errors import CheckFailed, StorageError

NUM_SHARDS = 90
ARRAYS = ("tokens", "labels", "positions", "loss_mask")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two stores of uint16 and int32 in many shards, each also packed into rows of 8."""
    folder, rng = tmp_path_factory.mktemp("stores"), np.random.default_rng(0)
    contents = []
    for name, vocab_size in (("a", 100), ("b", 70_000)):
        documents = [rng.integers(0, vocab_size, rng.integers(0, 40)) for _ in range(2 * NUM_SHARDS)]
        store = write_store(folder / name, documents, vocab_size=vocab_size, eod_id=0, shard_documents=2)
        pack(store.path, seq_length=8, packing="best_fit")
        contents.append(store.path)
    return contents


def open_all(folders: list[Path], reading: Any, packing: str) -> list[TokenStore]:
    if packing == "concat":
        return [TokenStore.open(path, reading=reading) for path in folders]
    return [PackedStore.of(path, packing=packing, seq_length=8, reading=reading) for path in folders]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@given(data=st.data(), size=st.integers(1, 150))
def test_batches_do_not_depend_on_how_they_are_read(
    folders: list[Path], packing: str, data: st.DataObject, size: int
) -> None:
    mapped, read = (
        Blend([(store, 1.0) for store in open_all(folders, reading, packing)], seq_length=8)
        for reading in ("mmap", "pread")
    )
    first = data.draw(st.integers(0, 10_000))
    expected, found = (blend.batch(range(first, first + size)) for blend in (mapped, read))
    assert not read.stores[0].is_mapped
    assert len(read.stores[0].shards._shards) == 0  # nothing was mapped
    for name in ARRAYS:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200_000), st.integers(1, 9000)), min_size=1, max_size=40))
def test_a_plan_reads_every_range_once_in_order(drawn: list[tuple[int, int, int]]) -> None:
    ranges = np.array([(shard, start, start + size) for shard, start, size in drawn])
    runs, places = plan(ranges)
    end = 0
    for *_, size, place in runs.tolist():
        assert place == end
        end += size
    for (shard, start, size, _), (next_shard, next_start, *_) in pairwise(runs.tolist()):
        assert (shard, start + size + MAX_GAP_BYTES) < (next_shard, next_start) or shard < next_shard
    for (shard, start, stop), place in zip(ranges.tolist(), places.tolist(), strict=True):
        [run] = [run for run in runs.tolist() if run[3] <= place < run[3] + run[2]]
        assert run[0] == shard
        assert run[1] + place - run[3] == start
        assert stop <= run[1] + run[2]


def test_the_order_of_megatron_is_read_too(folders: list[Path]) -> None:
    batches = [
        MegatronBlend(
            [TokenStore.open(folders[0], reading=reading)], [], seq_length=8, seed=1, order=MegatronOrder(50)
        ).batch(range(50))
        for reading in ("mmap", "pread")
    ]
    assert np.array_equal(batches[0].tokens, batches[1].tokens)


def test_a_pickled_store_is_read_as_before(folders: list[Path]) -> None:
    for packing in ("concat", "best_fit"):
        [store, _] = open_all(folders, "pread", packing)
        again = pickle.loads(pickle.dumps(store))
        assert (again.is_mapped, again.fingerprint) == (False, store.fingerprint)


def test_few_open_files_suffice(folders: list[Path]) -> None:
    program = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
        "from datakit import Blend, TokenStore\n"
        "held = [os.open(os.devnull, os.O_RDONLY) for _ in range(12)]\n"
        "blend = Blend([(TokenStore.open(path, reading='pread'), 1.0) for path in sys.argv[1:]], seq_length=8)\n"
        "print(blend.batch(range(1000)).tokens.sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *folders], capture_output=True, text=True, check=False)
    expected = Blend([(TokenStore.open(path), 1.0) for path in folders], seq_length=8).batch(range(1000))
    assert done.stdout.strip() == str(expected.tokens.sum()), done.stderr


def test_kept_files_are_bounded_and_closed(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPEN_FILES, "most", 5)
    blend = Blend([(TokenStore.open(path, reading="pread"), 1.0) for path in folders], seq_length=8)
    before = len(os.listdir("/proc/self/fd"))
    blend.batch(range(500))
    assert 0 < len(os.listdir("/proc/self/fd")) - before <= 5
    del blend
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_shrank_is_named(tmp_path: Path, is_open: bool) -> None:
    store = write_store(tmp_path / "a", [range(100)], vocab_size=500)
    blend = Blend([(TokenStore.open(store.path, reading="pread"), 1.0)], seq_length=8)
    if is_open:
        blend.batch([0])
    os.truncate(store.path / "shard-000000-000.bin", 150)
    with pytest.raises(CheckFailed, match=r"shard-000000-000\.bin"):
        blend.batch(range(12))


def test_a_refused_read_is_named(folders: list[Path]) -> None:
    store = TokenStore.open(folders[0], reading="pread")
    blend = Blend([(store, 1.0)], seq_length=8)
    [piece] = store.shards.file_pieces(3, 0, 2)
    folder = os.open(folders[0], os.O_RDONLY)
    os.dup2(folder, piece.file.descriptor)  # reads of a folder are refused
    os.close(folder)
    with pytest.raises(StorageError, match=r"cannot read .*shard-000003-000.bin: Is a directory"):
        blend.batch(range(300))
