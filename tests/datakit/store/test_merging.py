"""Merge: the documents of all stores in order, with their sources, whatever their cut; a killed one is continued."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from datakit import Recipe, TokenStore, preprocess, unarchive, verify, write_store
from datakit.format.manifest import Manifest
from datakit.format.output import Output
from datakit.store.merging import merge, plan_merge
from tests.datakit.conftest import Cli, begin_upload, files_of, write_jsonl
from threefold.errors import CheckFailed, UserError
from threefold.storage import open_storage
from threefold.storage.stale_uploads import abort_stale_uploads


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_path: str) -> list[Path]:
    folder = tmp_path_factory.mktemp("merge")
    for name, part in (("a", texts), ("b", texts[50:])):
        write_jsonl(folder / f"{name}.jsonl", part)
        preprocess([str(folder / f"{name}.jsonl")], folder / name, Recipe(tokenizer_path), item_bytes=20_000)
    return [folder / "a", folder / "b"]


def assert_merged(store: TokenStore, paths: Sequence[Path]) -> None:
    parts = [TokenStore.open(path) for path in paths]
    assert not verify(store.path)
    assert store.num_documents == sum(part.num_documents for part in parts)
    expected = np.concatenate([part.tokens(0, part.num_tokens) for part in parts])
    assert np.array_equal(store.tokens(0, store.num_tokens), expected)
    numbers = iter(range(store.num_documents))
    for part in parts:
        for number in range(part.num_documents):
            merged = next(numbers)
            assert np.array_equal(store.document(merged), part.document(number))
            assert store.origin(merged) == part.origin(number)
    names = [shard.name for shard in store.manifest.shards]
    assert names == sorted(set(names))
    assert {path.name.split(".")[0] for path in store.path.iterdir()} == {
        *names,
        "manifest",
        *(["tokenizer"] if store.manifest.tokenizer_files else []),
    }


@pytest.mark.parametrize("copy", [False, True])
def test_a_merge_holds_all_documents_in_order(stores: list[Path], tmp_path: Path, copy: bool) -> None:
    order = [stores[1], stores[0], stores[1]]
    merged = merge(order, tmp_path / "m", copy=copy)
    assert len(merged.manifest.shards) > 3
    assert max(shard.first_line for shard in merged.manifest.shards) > 0
    assert_merged(merged, order)
    first = TokenStore.open(stores[1]).manifest.shards[0].name
    assert os.path.samefile(merged.path / "shard-000000-000.bin", stores[1] / f"{first}.bin") != copy
    assert_merged(merge([merged.path, stores[0]], tmp_path / "mm"), [*order, stores[0]])


def test_empty_stores_and_shards_are_merged(tmp_path: Path) -> None:
    documents: list[list[list[int]]] = [[], [[1, 2], [], [3]], [[]]]
    paths = [write_store(tmp_path / str(i), found, vocab_size=9).path for i, found in enumerate(documents)]
    assert_merged(merge(paths, tmp_path / "m"), paths)


def test_settings_say_what_was_merged(stores: list[Path], tmp_path: Path) -> None:
    parts = [Manifest.read(path) for path in stores]
    settings = merge(stores, tmp_path / "m").manifest.settings
    assert settings["append_eod"] is False
    assert "input" not in settings
    assert [part["fingerprint"] for part in settings["merged"]] == [part.fingerprint for part in parts]
    assert settings["merged"][1]["settings"] == {"input": parts[1].settings["input"]}
    again = merge([tmp_path / "m", tmp_path / "m"], tmp_path / "mm").manifest.settings["merged"]
    assert [part["settings"]["merged"] for part in again] == [settings["merged"]] * 2


@pytest.mark.parametrize("copy", [False, True])
def test_a_merge_killed_after_any_file_is_continued(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: bool
) -> None:
    whole = files_of(merge(stores, tmp_path / "whole", copy=copy).path)
    place, left = Output.place_file, 0

    def place_some(self: Output, *arguments: object, **options: object) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        place(self, *arguments, **options)  # type: ignore[arg-type]

    for steps in range(0, len(whole) - 1, 4):
        output = tmp_path / str(steps)
        left = steps
        with monkeypatch.context() as patch:
            patch.setattr(Output, "place_file", place_some)
            with pytest.raises(KeyboardInterrupt):
                merge(stores, output, copy=copy)
        with pytest.raises(UserError, match="is unfinished"):
            TokenStore.open(output)
        if steps:
            with pytest.raises(UserError, match="begun from other sources"):
                merge(stores[::-1], output, copy=copy)
        merge(stores, output, copy=copy)
        assert files_of(output) == whole


KILLED = """
import os, signal, sys
from datakit import merge
from datakit.files import durable
left = int(sys.argv[1])
flush = durable.flush_to_disk
def flush_or_die(file):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(file)
durable.flush_to_disk = flush_or_die
merge(sys.argv[3:], sys.argv[2], copy=True)
"""


@pytest.mark.ci
@pytest.mark.slow
def test_a_copy_killed_in_the_middle_of_a_file_is_continued(stores: list[Path], tmp_path: Path) -> None:
    for num_flushes in (0, 4):
        command = [sys.executable, "-c", KILLED, str(num_flushes), tmp_path / "m", *stores]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
        assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "m").glob("shard-*"))) == 4
    assert_merged(merge(stores, tmp_path / "m", copy=True), stores)


KILLED_UPLOAD = """
import os, signal, sys
from datakit import merge
from datakit.format.output import Output
left, upload = int(sys.argv[1]), Output.upload
def upload_or_die(self, key, blocks, **options):
    global left
    left -= 1
    def until_killed():
        for block in blocks():
            yield block
            os.kill(os.getpid(), signal.SIGKILL)
    upload(self, key, blocks if left >= 0 else until_killed, **options)
Output.upload = upload_or_die
merge(sys.argv[3:], sys.argv[2])
"""


def objects_of(url: str) -> dict[str, bytes]:
    storage = open_storage(url)
    return {info.key: storage.read(info.key) for info in storage.list()}


@pytest.mark.ci
@pytest.mark.slow
def test_a_merge_to_s3_killed_in_an_upload_is_continued(
    stores: list[Path], tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for num_uploads in (0, 4):
        command = [sys.executable, "-c", KILLED_UPLOAD, str(num_uploads), s3_url, *stores]
        done = subprocess.run(command, cwd=Path(__file__).parents[3], check=False)
        assert done.returncode == -signal.SIGKILL
    keys = set(objects_of(s3_url))
    assert len(keys) == 5
    assert ".work/assembly.json" in keys
    begin_upload(f"{s3_url}/shard-000001-000.bin")
    with pytest.raises(UserError, match="begun from other sources"):
        merge(stores[::-1], s3_url)
    with pytest.raises(UserError, match="is not a token store or archive"):
        unarchive(s3_url, tmp_path / "u")
    merged = merge(stores, s3_url)
    local = merge(stores, tmp_path / "m")
    assert (merged.place, merged.fingerprint) == (s3_url, local.fingerprint)
    assert objects_of(s3_url) == files_of(local.path)
    assert not verify(s3_url)
    assert not abort_stale_uploads(open_storage(s3_url), older_than_s=-60.0)
    assert not list(tmp_path.glob("datakit-*"))
    with pytest.raises(UserError, match="is not a local folder"):
        merged.document(0)
    assert merge(stores, s3_url).fingerprint == local.fingerprint
    with pytest.raises(UserError, match="is not empty: it holds manifest"):
        merge(stores[:1], s3_url)


def test_damage_is_not_merged_into_a_url(tmp_path: Path) -> None:
    store, url = write_store(tmp_path / "s", [[1, 2, 3]], vocab_size=9).path, f"memory://{uuid.uuid4().hex}"
    file = store / "shard-000000-000.bin"
    sound = file.read_bytes()
    file.write_bytes(bytes([7]) + sound[1:])
    with pytest.raises(CheckFailed, match="is damaged"):
        merge([store], url)
    assert not objects_of(url)
    file.write_bytes(sound)
    merge([store], url)
    assert not verify(url)


def test_a_kill_after_the_manifest_is_continued(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("datakit.format.output.Output.remove_work", kill)
        with pytest.raises(KeyboardInterrupt):
            merge(stores, tmp_path / "m")
    for _ in range(2):  # the second finds it complete
        assert_merged(merge(stores, tmp_path / "m"), stores)
    with pytest.raises(UserError, match="is not empty"):
        merge(stores[:1], tmp_path / "m")


def test_stores_that_do_not_fit_are_reported_one_by_one(stores: list[Path], tmp_path: Path) -> None:
    other = write_store(tmp_path / "o", [[1]], vocab_size=9).path
    wide = write_store(tmp_path / "w", [[1]], vocab_size=70_000).path
    with pytest.raises(UserError) as caught:
        merge([stores[0], other, stores[1], wide], tmp_path / "m")
    [first, *lines] = caught.value.message.splitlines()
    assert first == f"2 of 4 stores do not fit {stores[0]}:"
    assert [line.split(":")[0].strip() for line in lines] == [str(other), str(wide)]
    assert "its tokenizer's eod_token is None, not '<|endoftext|>'" in lines[0]
    assert "its dtype is 'int32', not 'uint16'" in lines[1]
    assert not (tmp_path / "m").exists()
    with pytest.raises(UserError, match="eod_id"):
        plan_merge(
            [("a", Manifest.read(other)), ("b", write_store(tmp_path / "e", [], vocab_size=9, eod_id=1).manifest)]
        )


def test_an_output_that_holds_something_is_refused(stores: list[Path], tmp_path: Path) -> None:
    before = files_of(stores[0])
    with pytest.raises(UserError, match="is not empty"):
        merge(stores, stores[0])
    assert files_of(stores[0]) == before


def test_a_copy_of_damage_is_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[1, 2, 3]], vocab_size=9).path
    file = store / "shard-000000-000.bin"
    file.write_bytes(bytes([7]) + file.read_bytes()[1:])
    with pytest.raises(CheckFailed, match="is damaged"):
        merge([store], tmp_path / "m", copy=True)


@pytest.mark.ci
@pytest.mark.slow
def test_the_verb(
    stores: list[Path], tmp_path: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("merge", *stores, "--output", tmp_path / "m", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fingerprint"] == TokenStore.open(tmp_path / "m").fingerprint
    assert cli("verify", tmp_path / "m") == 0
    assert cli("merge", *stores, "--output", tmp_path / "m") == 0
    assert cli("merge", stores[0], "--output", tmp_path / "m") == 2
    errors = capsys.readouterr().err
    assert errors.count("error: ") == errors.count("hint: ") == 1
    source = stores[0].parent / "a.jsonl"
    assert cli("preprocess", source, "--output", tmp_path / "e", "--tokenizer", tokenizer_path, "--append-eod") == 0
    assert cli("merge", stores[0], tmp_path / "e", "--output", tmp_path / "mixed") == 0
    output = capsys.readouterr()
    assert "warning: " in output.err
    assert "600 documents" in output.out


@pytest.mark.ci
@pytest.mark.slow
def test_a_merge_counts_what_its_parts_skipped(tmp_path: Path, tokenizer_path: str) -> None:
    for name, number in (("a", 2), ("b", 3)):
        write_jsonl(tmp_path / f"{name}.jsonl", ["one", "two", *[" "] * number])
        preprocess([str(tmp_path / f"{name}.jsonl")], tmp_path / name, Recipe(tokenizer_path, skip_empty=True))
    assert merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m").manifest.skipped == {"empty": 5}
