"""Preprocess from and to URLs: the bytes of a local run, also through an object store that fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from datakit import Recipe, preprocess
from datakit.text.inputs import find_inputs
from tests.datakit.conftest import Cli, begin_upload, files_of, write_jsonl
from threefold.errors import StorageError, UserError
from threefold.storage import Storage, open_storage
from threefold.storage.stale_uploads import abort_stale_uploads
from tools.fault_proxy import Fault, FaultProxy

ROOT = Path(__file__).parents[3]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    """Files of every kind, one of which is large enough to be split."""
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", texts * 4)
    (folder / "b.txt").write_text(texts[150])
    table = pa.table({"id": list(range(300)), "text": texts})
    pq.write_table(table, folder / "c.parquet", row_group_size=40)
    with pa.OSFile(str(folder / "more" / "d.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    jsonl = (folder / "a.jsonl").read_bytes()
    (folder / "more" / "e.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(jsonl))
    (folder / ".hidden.jsonl").write_text("no JSON")
    return folder


def upload(folder: Path, storage: Storage) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            storage.write(str(path.relative_to(folder)), path.read_bytes())


def objects_of(url: str) -> dict[str, bytes]:
    """Every object below a URL, by its key."""
    storage = open_storage(url)
    return {info.key: storage.read(info.key) for info in storage.list()}


def without_input(files: dict[str, bytes]) -> dict[str, object]:
    """Files of a store without what says where its input lay: paths in origins and manifests."""
    manifest = json.loads(files["manifest.json"])
    shards = [{**shard, "origin": None} for shard in manifest["shards"]]
    return {name: content for name, content in files.items() if name.endswith((".bin", ".idx"))} | {"shards": shards}


def test_objects_are_found_like_files(corpus: Path) -> None:
    url = f"local://{corpus}"
    names = {name: f"{url}/{name}" for name in ("a.jsonl", "b.txt", "c.parquet", "more/d.arrow", "more/e.jsonl.zst")}
    assert [file.path for file in find_inputs([url])] == list(names.values())
    assert [file.path for file in find_inputs([f"{url}/"])] == list(names.values())
    assert [file.path for file in find_inputs([f"{url}/*.jsonl"])] == [names["a.jsonl"]]
    assert [file.path for file in find_inputs([f"{url}/**/*.jsonl*"])] == [names["a.jsonl"], names["more/e.jsonl.zst"]]
    [remote], [local] = find_inputs([names["a.jsonl"]]), find_inputs([str(corpus / "a.jsonl")])
    assert (remote.kind, remote.size_bytes) == (local.kind, local.size_bytes)
    for wrong in (f"{url}/nothing", f"{url}/*.gz", f"{url}/nothing/"):
        with pytest.raises(UserError, match="no such input"):
            find_inputs([wrong])
    with pytest.raises(UserError, match="is not a glob"):
        find_inputs([f"{url}/a**b"])


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.slow
def test_any_fsspec_url_gives_the_bytes_of_a_local_run(
    num_workers: int, tmp_path: Path, corpus: Path, tokenizer_path: str
) -> None:
    recipe = Recipe(tokenizer_path, append_eod=True, split=(0.7, 0.3))
    preprocess([str(corpus)], tmp_path / "here", recipe, item_bytes=20_000)
    url = f"local://{tmp_path}/there"
    preprocess([f"local://{corpus}"], url, recipe, item_bytes=20_000, num_workers=num_workers)
    for part in ("train", "valid"):
        assert without_input(files_of(tmp_path / "there" / part)) == without_input(files_of(tmp_path / "here" / part))
    assert {path.name for path in (tmp_path / "there").iterdir()} <= {"train", "valid", ".work", ".sources.json"}
    assert not [path for path in (tmp_path / "there").rglob(".work/**/*") if path.is_file()]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(),
        Fault("503", skip=5, times=6),
        Fault("reset", method="GET", skip=3, times=4, after_bytes=200),
        Fault("reset", method="PUT", skip=3, times=5),
        Fault("stall", method="GET", skip=4, times=1, after_bytes=200),
        Fault("stall", method="PUT", skip=4, times=1),
    ],
    ids=["no fault", "503", "reset GET", "reset PUT", "stall GET", "stall PUT"],
)
@pytest.mark.slow
def test_an_object_store_that_fails_gives_the_same_bytes(
    fault: Fault, s3_url: str, s3_proxy: FaultProxy, tmp_path: Path, corpus: Path, tokenizer_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "3")
    recipe = Recipe(tokenizer_path, append_eod=True)
    preprocess([str(corpus)], tmp_path / "here", recipe, item_bytes=20_000)
    upload(corpus, open_storage(f"{s3_url}/corpus"))
    s3_proxy.fault = fault
    preprocess([f"{s3_url}/corpus"], f"{s3_url}/store", recipe, item_bytes=20_000, num_workers=2)
    assert s3_proxy.num_faults == (fault.times or 0)
    found = objects_of(f"{s3_url}/store")
    assert without_input(found) == without_input(files_of(tmp_path / "here"))
    assert not [key for key in found if key.startswith(".work")]


@pytest.mark.slow
def test_a_killed_run_continues_on_the_object_store(
    s3_url: str, s3_proxy: FaultProxy, tmp_path: Path, corpus: Path, tokenizer_path: str
) -> None:
    recipe = Recipe(tokenizer_path, append_eod=True, dedup=True)
    whole = preprocess([str(corpus)], f"{s3_url}/whole", recipe, item_bytes=10_000)
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.08)  # so that there is a middle to kill in
    command = [sys.executable, "-m", "datakit", "preprocess", str(corpus), "--output", f"{s3_url}/killed",
               "--tokenizer", tokenizer_path, "--append-eod", "--dedup", "--item-size", "10000",
               "--workers", "2"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
    storage = open_storage(f"{s3_url}/killed")
    while sum(1 for _ in storage.list(".work/items/")) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    s3_proxy.fault = Fault()
    assert storage.info("manifest.json") is None
    summary = preprocess([str(corpus)], f"{s3_url}/killed", recipe, item_bytes=10_000)
    assert summary.skipped["duplicate"] > 600
    assert 3 <= summary.num_items_done_before < summary.num_items == whole.num_items
    assert objects_of(f"{s3_url}/killed") == objects_of(f"{s3_url}/whole")
    again = preprocess([str(corpus)], f"{s3_url}/killed/", recipe, item_bytes=10_000)
    assert again.num_items_done_before == again.num_items


@pytest.mark.slow
def test_uploads_that_a_killed_run_left_are_aborted(s3_url: str, corpus: Path, tokenizer_path: str) -> None:
    begin_upload(f"{s3_url}/store/train/shard-000000-000.bin")
    begin_upload(f"{s3_url}/store/mine.bin")
    begin_upload(f"{s3_url}/store-2/train/shard-000000-000.bin")
    preprocess([str(corpus / "b.txt")], f"{s3_url}/store", Recipe(tokenizer_path, split=(0.5, 0.5)))
    left = abort_stale_uploads(open_storage(s3_url), older_than_s=-60.0)
    assert sorted(left) == ["store-2/train/shard-000000-000.bin", "store/mine.bin"]


def test_an_output_that_holds_other_things_is_refused(
    s3_url: str, corpus: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    open_storage(s3_url).write("mine.txt", b"mine")
    assert cli("preprocess", corpus, "--output", s3_url, "--tokenizer", tokenizer_path) == 2
    assert f"error: {s3_url} is not empty: it holds mine.txt" in capsys.readouterr().err
    assert objects_of(s3_url) == {"mine.txt": b"mine"}


def test_another_recipe_is_refused_while_a_store_is_unfinished(s3_url: str, corpus: Path, tokenizer_path: str) -> None:
    from datakit.format.output import Output

    recipe = Recipe(tokenizer_path, append_eod=True)
    preprocess([str(corpus)], f"{s3_url}/other", Recipe(tokenizer_path))
    first, second = Output(f"{s3_url}/new"), Output(f"{s3_url}/new")
    assert first.begin({"of": "one"}) == second.begin({"of": "two"})
    assert second.begin({"of": "two"}).made_of == {"of": "one"}
    assert [info.key for info in open_storage(f"{s3_url}/new").list()] == [".work/recipe.json"]
    with pytest.raises(UserError, match="was made otherwise: its append_eod is False, this one True"):
        preprocess([str(corpus)], f"{s3_url}/other", recipe)


@pytest.mark.slow
def test_a_server_that_is_gone_is_one_clear_error(
    s3_url: str, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with pytest.raises(StorageError, match=r"no answer from http://127.0.0.1:9") as caught:
        preprocess([f"{s3_url}/corpus"], "unused", Recipe(tokenizer_path))
    assert caught.value.hint == "check AWS_ENDPOINT_URL, or --skip-unreadable to go on without it"
