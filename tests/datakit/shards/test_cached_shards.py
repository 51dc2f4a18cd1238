"""CachedShards: the stream of a store behind a URL is that of the local one, and every damage is named or mended."""

import itertools
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datakit import Blend, Loader, RemoteStore, TokenStore, blame, where
from datakit.store.archiving import archive
from tests.datakit.conftest import files_of
from tests.datakit.shards.conftest import BLOCK_BYTES
from tests.datakit.support.small_blocks import cut_blocks
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy

L = 16
LONG = ("503", "reset", "cut", "stall")
RECORDS = {"store": "manifest.json", "archive": "archive.json"}
Opener = Callable[[str], RemoteStore]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, short_pauses: None) -> None:
    cut_blocks(monkeypatch, BLOCK_BYTES)


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Open a URL with a cache of its own that is large enough."""
    return lambda url: RemoteStore.at(url, cache=str(tmp_path / "cache"), cache_mib=64)


def put(store: TokenStore, kind: str, url: str) -> str:
    if kind == "archive":
        archive(store.path, url, frame_bytes=BLOCK_BYTES)
    else:
        storage = open_storage(url)
        for name, content in files_of(store.path).items():
            storage.write(name, content)
    return url


def stream(store: TokenStore) -> Blend:
    return Blend([(store, 1.0)], seq_length=L, seed=1)


@pytest.mark.parametrize("kind", ["store", "archive"])
def test_every_row_document_and_origin_is_that_of_the_local_store(
    store: TokenStore, tmp_path: Path, opened: Opener, kind: str
) -> None:
    remote = opened(put(store, kind, f"file://{tmp_path / 'there'}"))
    assert remote.fingerprint == store.fingerprint
    rows = range(int(stream(store).rows[0]))
    assert (stream(remote).batch(rows).buffer == stream(store).batch(rows).buffer).all()
    assert remote.tokens(0, store.num_tokens).tolist() == store.tokens(0, store.num_tokens).tolist()
    for number in range(store.num_documents):
        assert remote.document(number).tolist() == store.document(number).tolist()
        assert remote.origin(number) == store.origin(number)
    passages = [blame(stream(each), rows).rows() for each in (store, remote)]
    assert passages[0] == passages[1]
    assert where(stream(remote), 0, 2, 500).rows() == where(stream(store), 0, 2, 500).rows()
    again = pickle.loads(pickle.dumps(remote))
    assert (stream(again).batch([3]).buffer == stream(store).batch([3]).buffer).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=st.lists(st.integers(0, 5000), min_size=1, max_size=40), cache_bytes=st.integers(40 << 10, 100 << 10))
def test_any_cache_has_the_same_batches(
    store: TokenStore, tmp_path: Path, samples: list[int], cache_bytes: int
) -> None:
    """Small ones drop blocks all the time, those that a batch needs too."""
    cache = tmp_path / str(cache_bytes)
    remote = RemoteStore.at(f"file://{store.path}", cache=str(cache), cache_mib=64)
    remote.cache.folder.max_bytes = cache_bytes
    assert (stream(remote).batch(samples).buffer == stream(store).batch(samples).buffer).all()
    blocks = [path for path in cache.glob("*/*") if path.is_file() and not path.name.startswith(".")]
    assert sum(path.stat().st_size for path in blocks) <= cache_bytes


def test_blocks_that_follow_each_other_are_one_request(
    store: TokenStore, opened: Opener, s3_url: str, s3_proxy: FaultProxy
) -> None:
    remote = opened(put(store, "store", s3_url))
    numbers = remote.shards.blocks(0, np.array([0]), np.array([store.manifest.shards[0].bin.size_bytes]))
    run = [remote.shards.block(0, number) for number in numbers]
    remote.shards.fetch(run[3])
    s3_proxy.fault = Fault("delay", method="GET", target=".bin", delay_s=0)
    remote.shards.fetch_run(run)
    assert len(run) > 6
    assert s3_proxy.num_faults == 2  # before the block that was there, and after it
    remote.shards.fetch_run(run)
    assert s3_proxy.num_faults == 2


def test_a_loader_resumes_and_reads_ahead(store: TokenStore, opened: Opener) -> None:
    remote, local = stream(opened(f"file://{store.path}")), stream(store)
    with Loader(remote, 2, 2, dp_rank=1, dp_size=3) as found, Loader(local, 2, 2, dp_rank=1, dp_size=3) as expected:
        for _ in range(20):
            assert (found.next_step().buffer == expected.next_step().buffer).all()
        state = expected.state_dict()
        found.load_state_dict(state)  # of the local store: the stream does not know where a store is
        assert (found.next_step().buffer == expected.next_step().buffer).all()
    with Loader(remote, 1, 1) as early:
        early.load_state_dict(state)
        early.next_step()


def test_a_program_that_ends_takes_its_threads_along(store: TokenStore, tmp_path: Path) -> None:
    """None may come back to an interpreter that is gone, as one of native code would abort it."""
    program = (
        "import atexit, sys, threading, time\n"
        "atexit.register(lambda: print(*(each.name for each in threading.enumerate())))\n"  # after all later ones
        "from datakit import Blend, Loader, RemoteStore\n"
        "store = RemoteStore.at(sys.argv[1], cache=sys.argv[2], cache_mib=64)\n"
        "fetch = store.shards.fetch_run\n"
        "store.shards.fetch_run = lambda run: (time.sleep(0.3), fetch(run))\n"
        "loader = Loader(Blend([(store, 1.0)], seq_length=8), 2, 1)\n"
        "loader.next_step()\n"
    )
    words = [sys.executable, "-c", program, f"file://{store.path}", tmp_path / "cache"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["MainThread"]), done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["store", "archive"])
@pytest.mark.parametrize("fault", ["flip", *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_faults_of_a_server_do_not_change_the_stream(
    store: TokenStore, opened: Opener, s3_url: str, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch,
    kind: str, fault: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "1")
    put(store, kind, s3_url)
    remote, local = stream(opened(s3_url)), stream(store)
    for first in range(5):  # the index, the origins or the table of frames, then blocks
        s3_proxy.fault = Fault(fault, method="GET", target="shard-", times=1, after_bytes=40)
        num_faults, samples = s3_proxy.num_faults, range(3 * first, 3 * first + 3)
        assert (remote.batch(samples).buffer == local.batch(samples).buffer).all()
        assert s3_proxy.num_faults == num_faults + 1
        if fault == "stall" and first == 1:
            break
    with Loader(remote, 4, 1) as found, Loader(local, 4, 1) as expected:
        s3_proxy.fault = Fault(fault, method="GET", target="shard-", times=1, after_bytes=40)
        for _ in range(12):
            assert (found.next_step().buffer == expected.next_step().buffer).all()


@pytest.mark.parametrize("kind", ["store", "archive"])
def test_lasting_damage_is_named(store: TokenStore, tmp_path: Path, opened: Opener, kind: str) -> None:
    copy = tmp_path / "there"
    put(store, kind, f"file://{copy}")
    damaged = copy / ("shard-000000-000.bin" + (".zst" if kind == "archive" else ""))
    content = bytearray(damaged.read_bytes())
    content[1000] ^= 4
    damaged.write_bytes(content)
    remote = opened(f"file://{copy}")
    with pytest.raises(CheckFailed, match=r"shard-000000-000\.bin.*(document 2|frame \d+)") as caught:
        remote.tokens(0, 2000)
    assert caught.value.hint
    damaged.write_bytes(content[:-5])
    with pytest.raises(CheckFailed, match=r"shard-000000-000\.bin.* bytes"):
        opened(f"file://{copy}").tokens(0, 2000)
    damaged.unlink()
    with pytest.raises(CheckFailed, match=r"shard-000000-000\.bin.* is missing"):
        opened(f"file://{copy}").tokens(0, 2000)


@pytest.mark.parametrize("suffix", ["origin", "idx"])
def test_damage_of_an_index_is_named(store: TokenStore, tmp_path: Path, opened: Opener, suffix: str) -> None:
    shutil.copytree(store.path, tmp_path / "there")
    path = tmp_path / "there" / f"shard-000001-000.{suffix}"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckFailed, match=rf"shard-000001-000\.{suffix} is damaged"):
        stream(opened(f"file://{tmp_path / 'there'}")).batch(range(300))


@pytest.mark.parametrize("suffix", ["origin", "idx"])
def test_an_index_that_is_cut_or_missing_is_named(
    store: TokenStore, tmp_path: Path, opened: Opener, suffix: str
) -> None:
    shutil.copytree(store.path, tmp_path / "there")
    path = tmp_path / "there" / f"shard-000001-000.{suffix}"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckFailed, match=rf"shard-000001-000\.{suffix} has \d+ bytes, manifest.json says \d+"):
        stream(opened(f"file://{tmp_path / 'there'}")).batch(range(300))
    path.unlink()
    with pytest.raises(CheckFailed, match=rf"shard-000001-000\.{suffix} is missing"):
        stream(opened(f"file://{tmp_path / 'there'}")).batch(range(300))


def test_bits_that_flip_in_a_manifest_are_named(
    store: TokenStore, opened: Opener, s3_url: str, s3_proxy: FaultProxy
) -> None:
    put(store, "store", s3_url)
    size = (store.path / "manifest.json").stat().st_size
    for place in range(0, size, size // 7):
        s3_proxy.fault = Fault("flip", method="GET", target="manifest.json", after_bytes=place)
        with pytest.raises(UserError, match=r"manifest\.json"):
            opened(s3_url)
        s3_proxy.fault = Fault("flip", method="GET", target="manifest.json", times=1, after_bytes=place)
        assert opened(s3_url).fingerprint == store.fingerprint


@pytest.mark.ci
@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("fault", ["503", "reset", "cut", pytest.param("stall", marks=pytest.mark.slow)])
def test_what_opens_a_store_is_read_through_passing_faults(
    store: TokenStore, opened: Opener, s3_url: str, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch,
    kind: str, fault: str,
) -> None:  # fmt: skip
    put(store, kind, s3_url)
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the client's own pauses are long
    for method, after_bytes in (("HEAD", 0), ("GET", 0), ("GET", 40)):  # nothing of the answer, or a part of its body
        s3_proxy.num_faults = 0
        s3_proxy.fault = Fault(fault, method=method, target=RECORDS[kind], times=1, after_bytes=after_bytes)
        assert opened(s3_url).fingerprint == store.fingerprint
        assert s3_proxy.num_faults == 1


@pytest.mark.ci
@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("fault", ["503", "reset", pytest.param("stall", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_lasting_faults_of_what_opens_a_store_are_one_error_that_names_it(
    store: TokenStore, opened: Opener, s3_url: str, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch,
    kind: str, fault: str, method: str,
) -> None:  # fmt: skip
    put(store, kind, s3_url)
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3_proxy.fault = Fault(fault, method=method, target=RECORDS[kind], after_bytes=40 * (method == "GET"))
    doing = {"HEAD": "look up", "GET": "read"}[method]
    with pytest.raises(StorageError, match=rf"^cannot {doing} {s3_url}/{RECORDS[kind]}: \S"):
        opened(s3_url)
    assert 2 <= s3_proxy.num_faults <= 5  # repeated, and not for ever


def test_a_store_that_vanishes_is_named_by_the_step_that_needs_it(
    store: TokenStore, tmp_path: Path, opened: Opener
) -> None:
    there = tmp_path / "there"
    shutil.copytree(store.path, there)
    with Loader(stream(opened(f"file://{there}")), 2, 1) as loader:
        shutil.rmtree(there)
        with pytest.raises(UserError, match=r"there/shard-\S+ (is missing|does not exist)"):
            list(itertools.islice(loader, 300))


def test_what_cannot_be_opened(store: TokenStore, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with pytest.raises(UserError, match="is not a token store or archive"):
        RemoteStore.at(f"file://{tmp_path}", cache=cache)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot use the cache"):
        RemoteStore.at(f"file://{store.path}", cache=str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"cannot use the cache /proc"):
        RemoteStore.at(f"file://{store.path}", cache="/proc/cache")
    small = RemoteStore.at(f"file://{store.path}", cache=cache)
    small.cache.folder.max_bytes = 1000
    with pytest.raises(UserError, match="does not fit into a quarter of the cache") as caught:
        stream(small).batch([0])
    assert "--data.cache-mib" in str(caught.value.hint)
    assert not [name for name in os.listdir("/dev/shm") if "datakit" in name]
