"""TokenStore: one address space over shards, and refusal of stores that do not fit their manifest."""

import errno
import os
import random
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import datakit.shards.folder_shards
import datakit.store.token_store
from datakit import TokenShard, TokenStore, verify, write_store
from datakit.format.manifest import FILE_NAME, Manifest
from datakit.shards.folder_shards import FolderShards
from threefold.errors import CheckFailed, StorageError, UserError

DOCUMENTS = st.lists(st.lists(st.integers(0, 999), max_size=9), min_size=1, max_size=30)


@given(documents=DOCUMENTS, shard_documents=st.integers(1, 9), vocab_size=st.sampled_from([1000, 65499, 65500]))
def test_shards_make_one_address_space(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard_documents: int, vocab_size: int
) -> None:
    path = tmp_path_factory.mktemp("store") / "s"
    store = write_store(path, documents, vocab_size=vocab_size, shard_documents=shard_documents)
    stream = [token for document in documents for token in document]
    assert store.dtype == ("uint16" if vocab_size < 65500 else "int32")
    assert (store.num_documents, store.num_tokens) == (len(documents), len(stream))
    assert len(store.manifest.shards) == -(-len(documents) // shard_documents)
    assert [store.document(i).tolist() for i in range(len(documents))] == documents
    for _ in range(10):
        start, stop = sorted(random.randint(0, len(stream)) for _ in range(2))
        assert store.tokens(start, stop).tolist() == stream[start:stop]
    owners = [i for i, document in enumerate(documents) for _ in document]
    assert [store.document_at(token) for token in range(len(stream))] == owners


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    documents = [[1, 2], [3]]
    first = write_store(tmp_path / "a", documents, vocab_size=100)
    assert write_store(tmp_path / "b", documents, vocab_size=100).fingerprint == first.fingerprint
    assert write_store(tmp_path / "c", [[1, 2], [4]], vocab_size=100).fingerprint != first.fingerprint


def test_few_shards_of_all_stores_stay_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datakit.shards.folder_shards.OPEN_SHARDS, "most", 3)
    stores = [
        write_store(tmp_path / name, [[i] for i in range(9)], vocab_size=100, shard_documents=1) for name in "abc"
    ]
    for _ in range(2):
        for store in stores:
            assert store.tokens(0, 9).tolist() == list(range(9))
    assert [len(store.shards._shards) for store in stores] == [0, 0, 3]
    maps = Path("/proc/self/maps").read_text()
    assert [maps.count(f"{tmp_path}/{name}/") for name in "abc"] == [0, 0, 6]
    del store, stores
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


MANY_SHARDS = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from datakit import Blend, Loader, TokenStore
from datakit.cli import main
path, merged = sys.argv[1:]
before = len(os.listdir("/proc/self/fd"))
blend = Blend([(TokenStore.open(path), 2), (TokenStore.open(path), 1)], seq_length=8)
with Loader(blend, 70, 1) as loader:
    for _ in range(40):
        loader.next_step()
assert sum(len(store.shards._shards) for store in blend.stores) == 1400
assert all(store.origin(number).line == 1 for store in blend.stores for number in range(0, 700, 7))
assert len(os.listdir("/proc/self/fd")) == before, "a shard keeps a descriptor"
for verb in (["verify", path], ["stats", path], ["merge", path, "--output", merged], ["diff", path, path]):
    assert main(verb) == 0, verb
"""


def test_a_store_of_more_shards_than_a_process_may_open_files(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [range(9)], vocab_size=100)
    [entry] = store.manifest.shards
    names = [f"shard-{number:06}-000" for number in range(700)]
    for name in names[1:]:
        for file, _ in store.files(entry):
            (tmp_path / "a" / name).with_suffix(file.suffix).hardlink_to(file)
    shards = tuple(replace(entry, name=name) for name in names)
    replace(store.manifest, shards=shards).write(tmp_path / "a")
    program = [sys.executable, "-c", MANY_SHARDS, str(tmp_path / "a"), str(tmp_path / "merged")]
    result = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "all checksums hold" in result.stdout


def test_where_no_file_can_be_opened_the_limit_is_named_not_damage(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [[1]], vocab_size=100)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        for read in (lambda: store.tokens(0, 1), lambda: verify(store.path), lambda: TokenStore.open(store.path)):
            with pytest.raises(StorageError, match="Too many open files") as caught:
                read()
            assert caught.value.hint == "ulimit -n 65536"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_where_no_more_can_be_mapped_what_is_open_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "a", [[i] for i in range(9)], vocab_size=100, shard_documents=1)
    opened = FolderShards._open_shard

    def open_if_there_is_room(shards: FolderShards, number: int) -> TokenShard:
        if len(shards._shards) >= 4:
            raise StorageError("cannot read") from OSError(errno.ENOMEM, "Cannot allocate memory")
        return opened(shards, number)

    monkeypatch.setattr(FolderShards, "_open_shard", open_if_there_is_room)
    assert store.tokens(0, 9).tolist() == list(range(9))


@pytest.mark.parametrize("tokens", [[100], [-1]])
def test_tokens_outside_the_vocabulary_are_not_written(tmp_path: Path, tokens: list[int]) -> None:
    with pytest.raises(UserError, match="document 1"):
        write_store(tmp_path / "a", [[1], tokens], vocab_size=100)


@pytest.mark.parametrize("suffix", ["bin", "idx", "origin"])
def test_a_missing_or_shortened_file_is_found_at_opening(tmp_path: Path, suffix: str) -> None:
    write_store(tmp_path / "a", [[1, 2], [3]], vocab_size=100)
    file = tmp_path / "a" / f"shard-000000-000.{suffix}"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckFailed, match=f"{file.name} has"):
        TokenStore.open(tmp_path / "a")
    file.unlink()
    with pytest.raises(StorageError, match=f"cannot read .*{file.name}"):
        TokenStore.open(tmp_path / "a")


def test_a_shard_of_another_store_is_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [[1, 2], [3]], vocab_size=100)
    write_store(tmp_path / "b", [[1], [2, 3], []], vocab_size=100)
    for suffix in ("bin", "idx"):
        name = f"shard-000000-000.{suffix}"
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(CheckFailed, match="its manifest says"):
        store.document(0)


def test_what_is_no_store_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a token store"):
        TokenStore.open(tmp_path / "none")
    write_store(tmp_path / "split" / "train", [[1]], vocab_size=9)
    with pytest.raises(UserError, match="is split") as caught:
        TokenStore.open(tmp_path / "split")
    assert caught.value.hint == str(tmp_path / "split" / "train")
    (tmp_path / "begun" / ".work").mkdir(parents=True)
    with pytest.raises(UserError, match="unfinished"):
        TokenStore.open(tmp_path / "begun")


def manifest_path(folder: Path) -> Path:
    write_store(folder, [[1, 2], [3]], vocab_size=100, eod_id=3)
    return folder / FILE_NAME


def test_a_manifest_survives_a_round_trip(tmp_path: Path) -> None:
    path = manifest_path(tmp_path / "a")
    manifest = Manifest.read(path.parent)
    content = path.read_bytes()
    manifest.write(path.parent)
    assert path.read_bytes() == content


def test_any_changed_byte_of_a_manifest_is_refused(tmp_path: Path) -> None:
    path = manifest_path(tmp_path / "a")
    content = path.read_bytes()
    for at in [at for at, byte in enumerate(content) if byte not in b" \n"]:  # white space means nothing
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckFailed, match=r"manifest\.json"):
            Manifest.read(path.parent)


@pytest.mark.parametrize(
    ("keys", "value", "fault"),
    [
        (["version"], 2, "version 2"),
        (["format"], "mds", "format 'mds'"),
        (["dtype"], "float32", "dtype 'float32'"),
        (["num_tokens"], 4, "num_tokens is 4, its shards give 3"),
        (["tokenizer"], None, "tokenizer is not a JSON object"),
        (["tokenizer", "vocab_size"], -1, "tokenizer.vocab_size is -1"),
        (["tokenizer", "eod_id"], "x", "tokenizer.eod_id is 'x'"),
        (["shards"], {}, "shards is {}"),
        (["shards", 0, "name"], "../../etc/passwd", "is not a shard's name"),
        (["shards", 0, "num_tokens"], True, "num_tokens is True"),
        (["shards", 0, "bin", "size_bytes"], 5, "3 uint16 tokens in 5 bytes"),
        (["shards", 0, "idx"], 5, "idx is not a JSON object"),
        (["settings"], [], "settings is not a JSON object"),
        (["skipped"], [], "skipped is not a JSON object"),
        (["skipped"], {"empty": -1}, "skipped.empty is -1"),
    ],
)
def test_every_field_is_checked(tmp_path: Path, keys: list[str | int], value: object, fault: str) -> None:
    import xxhash

    path = manifest_path(tmp_path / "a")
    content = orjson.loads(path.read_bytes())
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    del content["checksum"]
    content["checksum"] = xxhash.xxh3_64_hexdigest(orjson.dumps(content, option=orjson.OPT_SORT_KEYS))
    path.write_bytes(orjson.dumps(content))
    with pytest.raises(CheckFailed, match=fault):
        Manifest.read(path.parent)


def test_an_oversized_manifest_is_not_read(tmp_path: Path) -> None:
    path = manifest_path(tmp_path / "a")
    os.truncate(path, (512 << 20) + 1)  # zeros that take no disk
    with pytest.raises(CheckFailed, match=f"more than the {512 << 20}"):
        Manifest.read(path.parent)


def test_numpy_documents_are_taken(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [np.arange(3), np.arange(2, dtype=np.uint8)], vocab_size=9)
    assert store.tokens(0, 5).tolist() == [0, 1, 2, 0, 1]
