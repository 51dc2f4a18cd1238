"""PackedRemoteStore: packed rows of a store behind a URL are those of the local one, wherever the index is."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from datakit import (
    Blend,
    Loader,
    PackedRemoteStore,
    PackedStore,
    RunStream,
    TokenStore,
    blame,
    pack,
    where,
    write_store,
)
from datakit.reports.provenance import Passages
from datakit.store.archiving import archive
from tests.datakit.conftest import files_of
from tests.datakit.support.small_blocks import cut_blocks
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy

L = 16
NAME = f"packing-best_fit-{L}"
ARRAYS = ("tokens", "labels", "positions", "loss_mask", "cu_seqlens")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, short_pauses: None) -> None:
    cut_blocks(monkeypatch, 512)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    """Documents of all lengths in six shards, and the index in their folder."""
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 299, size) for size in (0, 300, 1, *rng.integers(0, 90, 200))]
    write_store(tmp_path / "s", documents, vocab_size=300, eod_id=299, shard_documents=40)
    pack(tmp_path / "s", seq_length=L, packing="best_fit")
    return PackedStore.of(tmp_path / "s", packing="best_fit", seq_length=L)


def opened(url: str, tmp_path: Path, **named: object) -> TokenStore:
    place = {"packing": "best_fit", "seq_length": L, "cache": str(tmp_path / "cache"), "cache_mib": 64}
    return PackedRemoteStore.packed_at(url, **(place | named))  # type: ignore[arg-type]


def stream(store: TokenStore) -> Blend:
    return Blend([(store, 1.0)], seq_length=L, seed=1, block_tokens=4 * L)


def assert_same(remote: TokenStore, local: TokenStore) -> None:
    rows = range(2 * local.num_rows(L))
    found, expected = (stream(each).batch(rows) for each in (remote, local))
    for name in ARRAYS:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    passages: list[Passages] = [blame(stream(each), rows) for each in (remote, local)]
    assert passages[0].rows() == passages[1].rows()
    assert passages[0].origins(stream(remote)) == passages[1].origins(stream(local))
    assert where(stream(remote), 0, 1, 500).rows() == where(stream(local), 0, 1, 500).rows()


def test_rows_and_their_documents_are_those_of_the_local_store(store: TokenStore, tmp_path: Path) -> None:
    remote = opened(f"file://{store.path}", tmp_path)
    assert (remote.fingerprint, remote.packing) == (store.fingerprint, "best_fit")
    assert_same(remote, store)
    assert_same(pickle.loads(pickle.dumps(remote)), store)


def test_an_archive_has_its_index_elsewhere(store: TokenStore, tmp_path: Path) -> None:
    archive(store.path, f"file://{tmp_path}/there")
    with pytest.raises(UserError, match=f"there/{NAME} is not there"):
        opened(f"file://{tmp_path}/there", tmp_path)
    for index in (str(store.path / NAME), f"file://{store.path}/{NAME}"):
        assert_same(opened(f"file://{tmp_path}/there", tmp_path, index=index), store)


def upload(store: TokenStore, url: str) -> None:
    storage = open_storage(url)
    for name, content in files_of(store.path).items():
        storage.write(name, content)


@pytest.fixture
def uploaded(store: TokenStore, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the store behind a server that is given up on soon."""
    upload(store, s3_url)
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the client's own pauses are long
    return s3_url


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["503", "reset", "cut", pytest.param("stall", marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", ["packing.json", "starts.bin", "ends.bin"])
def test_an_index_is_read_through_passing_faults(
    store: TokenStore, tmp_path: Path, uploaded: str, s3_proxy: FaultProxy, file: str, fault: str
) -> None:
    for number, (method, after_bytes) in enumerate((("HEAD", 0), ("GET", 0), ("GET", 40))):
        s3_proxy.num_faults = 0
        s3_proxy.fault = Fault(fault, method=method, target=f"{NAME}/{file}", times=1, after_bytes=after_bytes)
        remote = opened(uploaded, tmp_path, cache=str(tmp_path / f"cache{number}"))
        assert remote.fingerprint == store.fingerprint
        assert s3_proxy.num_faults == 1


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["503", "reset", pytest.param("stall", marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", ["packing.json", "starts.bin", "ends.bin"])
def test_lasting_faults_of_an_index_are_one_error_that_names_the_file(
    tmp_path: Path, uploaded: str, s3_proxy: FaultProxy, file: str, fault: str
) -> None:
    for method, doing in (("HEAD", "look up"), ("GET", "read")):
        s3_proxy.num_faults = 0
        s3_proxy.fault = Fault(fault, method=method, target=f"{NAME}/{file}", after_bytes=40 * (method == "GET"))
        with pytest.raises(StorageError, match=rf"^cannot {doing} {uploaded}/{NAME}/{file}: \S"):
            opened(uploaded, tmp_path)
        assert 2 <= s3_proxy.num_faults <= 5  # repeated, and not for ever


def test_a_loader_reads_ahead_as_a_run_configures_it(store: TokenStore, tmp_path: Path, s3_url: str) -> None:
    upload(store, s3_url)
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\nstores = ["{s3_url}"]\npacking = "best_fit"\nshuffle = "blocks"\nblock_tokens = {4 * L}\n'
        f'cache = "{tmp_path}/cache"\n[train]\nseq_length = {L}\nglobal_batch_size = 6\nseed = 1\n'
    )
    blend = RunStream.read(str(config)).open()
    with Loader(blend, 2, 1, 1, 3) as found, Loader(stream(store), 2, 1, 1, 3) as expected:
        for _ in range(20):
            steps = found.next_step(), expected.next_step()
            assert all(np.array_equal(*(getattr(step, name) for step in steps)) for name in ARRAYS)
        found.load_state_dict(json.loads(json.dumps(expected.state_dict())))


def test_an_index_that_is_damaged_or_of_another_store_is_named(store: TokenStore, tmp_path: Path) -> None:
    copy = tmp_path / "there"
    shutil.copytree(store.path, copy)
    url = f"file://{copy}"
    for name in ("starts.bin", "ends.bin"):
        file, place = copy / NAME / name, str(tmp_path / name)  # in another's cache it would be sound
        sound = file.read_bytes()
        for content, fault in (
            (sound[:-1] + bytes([sound[-1] ^ 1]), "is damaged: its checksum does not hold"),
            (sound[:-1], f"has {len(sound) - 1} bytes, its record says {len(sound)}"),
            (None, "is missing"),
        ):
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(CheckFailed, match=f"{name} {fault}"):
                opened(url, tmp_path, cache=place)
        file.write_bytes(sound)
    (copy / NAME / "packing.json").write_bytes(b"{}")
    with pytest.raises(CheckFailed, match="format"):
        opened(url, tmp_path)
    with pytest.raises(UserError, match=r"packed by best_fit into rows of 16 tokens, not by best_fit into rows of 8"):
        opened(url, tmp_path, seq_length=8, index=str(store.path / NAME))
    other = write_store(tmp_path / "other", [range(40)], vocab_size=300, eod_id=299)
    pack(other.path, seq_length=L, packing="best_fit")
    with pytest.raises(UserError, match="is the index of another store"):
        opened(f"file://{store.path}", tmp_path, index=f"file://{other.path}/{NAME}")
