"""Preprocess: the tokenizer's own tokens, the same bytes with any number of workers, continuation, every refusal."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import zstandard
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from datakit import Origin, Recipe, TokenStore, preprocess, verify
from datakit.preprocessing.meter import Meter
from datakit.text.inputs import FileSlice, InputFile, WorkItem
from datakit.tokenization.tokenizer_training import train_tokenizer
from tests.datakit.conftest import Cli, files_of, write_jsonl
from threefold.errors import CheckFailed, UserError

ROOT = Path(__file__).parents[3]
EOD = 0


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """Four files, in name order: plain jsonl, txt, jsonl.gz, jsonl.zst of the texts' quarters; blank lines too."""
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "a.jsonl", texts[:100])
    with (folder / "a.jsonl").open("a") as file:
        file.write("\n \n" + json.dumps({"text": "after blank lines"}) + "\n\n")
    (folder / "b.txt").write_text(texts[150])
    jsonl = [write_jsonl(folder / "part", texts[start : start + 50]).read_bytes() for start in (150, 200)]
    (folder / "part").unlink()
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(jsonl[0], mtime=0))
    (folder / "d.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(jsonl[1]))
    return folder


@pytest.fixture(scope="session")
def expected(texts: list[str]) -> list[str]:
    """The corpus's documents in order."""
    return [*texts[:100], "after blank lines", texts[150], *texts[150:250]]


def test_tokens_and_origins_are_exact_in_every_format(
    tmp_path: Path, corpus: Path, expected: list[str], tokenizer_path: str
) -> None:
    library = Library.from_file(tokenizer_path)
    summary = preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path, append_eod=True), item_bytes=700)
    store = TokenStore.open(tmp_path / "s")
    assert summary.num_documents == store.num_documents == len(expected)
    assert summary.num_tokens == store.num_tokens
    assert len(store.manifest.shards) > 5
    assert not verify(tmp_path / "s")
    plain = {path.name: path.read_bytes() for path in corpus.iterdir()}
    plain["c.jsonl.gz"] = gzip.decompress(plain["c.jsonl.gz"])
    plain["d.jsonl.zst"] = zstandard.ZstdDecompressor().decompress(plain["d.jsonl.zst"])
    for number, text in enumerate(expected):
        assert store.document(number).tolist() == [*library.encode(text).ids, EOD]
        origin = store.origin(number)
        content = plain[Path(origin.path).name]
        if origin.path.endswith(".txt"):
            assert (origin.offset_bytes, origin.line) == (0, 1)
        else:
            assert json.loads(content[origin.offset_bytes :].split(b"\n")[0])["text"] == text
            assert json.loads(content.split(b"\n")[origin.line - 1])["text"] == text


def test_without_eod_and_with_lines_of_txt(tmp_path: Path, tokenizer_path: str) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo three\n\nfour")
    preprocess([str(tmp_path / "a.txt")], tmp_path / "s", Recipe(tokenizer_path, txt_split="line"), item_bytes=5)
    store = TokenStore.open(tmp_path / "s")
    library = Library.from_file(tokenizer_path)
    found = [store.document(i).tolist() for i in range(store.num_documents)]
    assert found == [library.encode(text).ids for text in ["one", "two three", "", "four"]]
    assert store.origin(3) == Origin(str(tmp_path / "a.txt"), 15, 4)
    assert store.eod_id == EOD


def test_a_large_vocabulary_is_stored_as_int32(tmp_path: Path) -> None:
    library = Library(models.WordLevel({f"word{i}": i for i in range(65_600)}, unk_token="word0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "t.json"))
    write_jsonl(tmp_path / "a.jsonl", ["x word65599 word7"])
    preprocess([str(tmp_path / "a.jsonl")], tmp_path / "s", Recipe(str(tmp_path / "t.json")))
    store = TokenStore.open(tmp_path / "s")
    assert store.dtype == "int32"
    assert store.document(0).tolist() == [0, 65_599, 7]


def test_the_bytes_are_the_same_with_any_number_of_workers(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    recipe = Recipe(tokenizer_path, append_eod=True, split=(0.8, 0.2))
    for workers in (1, 3):
        preprocess([str(corpus)], tmp_path / str(workers), recipe, num_workers=workers, item_bytes=2000)
    one = files_of(tmp_path / "1")
    assert len(one) > 20
    assert files_of(tmp_path / "3") == one


@pytest.mark.ci
@pytest.mark.slow
def test_split_shares_the_documents_by_their_text(
    tmp_path: Path, corpus: Path, expected: list[str], tokenizer_path: str
) -> None:
    preprocess([str(corpus)], tmp_path / "whole", Recipe(tokenizer_path))
    summary = preprocess([str(corpus)], tmp_path / "split", Recipe(tokenizer_path, split=(0.7, 0.3)), item_bytes=500)
    whole = TokenStore.open(tmp_path / "whole")
    train, valid = (TokenStore.open(tmp_path / "split" / part) for part in ("train", "valid"))
    documents = [
        [tuple(store.document(i).tolist()) for i in range(store.num_documents)] for store in (whole, train, valid)
    ]
    assert sorted(documents[0]) == sorted(documents[1] + documents[2])
    assert not set(documents[1]) & set(documents[2])
    assert 0.15 < len(documents[2]) / len(expected) < 0.45
    assert [store.num_documents for store in summary.stores] == [train.num_documents, valid.num_documents]


def test_shards_end_where_they_are_full(tmp_path: Path, corpus: Path, tokenizer_path: str, texts: list[str]) -> None:
    from datakit.format.output import Output
    from datakit.preprocessing.task import ItemEncoder
    from datakit.store.item_records import read_records
    from datakit.text.inputs import cut, find_inputs
    from datakit.tokenization.encoder import ReferenceEncoder
    from datakit.tokenization.tokenizer import identify, open_tokenizer

    tokenizer = open_tokenizer(tokenizer_path)
    identity = identify(tokenizer, tokenizer_path, "<|endoftext|>", required=True)
    output = Output(str(tmp_path))
    [item] = cut(find_inputs([str(corpus / "a.jsonl")]), 1 << 30, split_txt=False)
    encoder = ReferenceEncoder(tokenizer)
    ItemEncoder(output, Recipe(tokenizer_path), encoder, identity, max_shard_documents=30).seal(item)
    [record] = read_records(output, [item])
    assert record is not None
    assert [shard.num_documents for shard in record.shards[""]] == [30, 30, 30, 11]
    assert [shard.name for shard in record.shards[""]] == [f"shard-000000-{i:03}" for i in range(4)]


@pytest.mark.parametrize("note", [b"{", b"[]", b'{"tokenizer": {}, "settings": 3}'])
def test_a_damaged_note_of_what_was_begun_is_told(
    tmp_path: Path, corpus: Path, tokenizer_path: str, note: bytes
) -> None:
    file = tmp_path / "s" / ".work" / "recipe.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(note)
    with pytest.raises(CheckFailed, match=r"recipe\.json is damaged"):
        preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path))


def test_a_complete_store_is_left_alone_and_changed_settings_are_refused(
    tmp_path: Path, corpus: Path, tokenizer_path: str, texts: list[str]
) -> None:
    recipe = Recipe(tokenizer_path, append_eod=True)
    output = tmp_path / "s"
    preprocess([str(corpus)], output, recipe)
    before = files_of(output)
    again = preprocess([str(corpus)], output, recipe)
    assert again.num_items_done_before == again.num_items
    write_jsonl(tmp_path / "b.jsonl", texts)
    train_tokenizer([str(tmp_path / "b.jsonl")], str(tmp_path / "other.json"), vocab_size=300)
    for other, fault in [
        (Recipe(tokenizer_path), "its append_eod is True, this one False"),
        (Recipe(str(tmp_path / "other.json"), append_eod=True), "its tokenizer is"),
        (Recipe(tokenizer_path, append_eod=True, text_key="id"), "its text_key is 'text', this one 'id'"),
        (Recipe(tokenizer_path, append_eod=True, split=(0.5, 0.5)), "is a store already"),
    ]:
        with pytest.raises(UserError, match=fault):
            preprocess([str(corpus)], output, other)
    with pytest.raises(UserError, match="its input is"):
        preprocess([str(tmp_path / "b.jsonl")], output, recipe)
    assert files_of(output) == before


@pytest.mark.ci
@pytest.mark.slow
def test_what_is_skipped_is_counted_and_the_same_with_any_number_of_workers(
    tmp_path: Path, texts: list[str], tokenizer_path: str
) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", texts).read_bytes().splitlines()
    lines = [line for each in good for line in (each, b'{"body": 1}', b"\xff", each)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    recipe = Recipe(tokenizer_path, split=(0.8, 0.2), skip_invalid=True, skip_empty=True, max_chars=400)
    for workers in (1, 3):
        summary = preprocess(
            [str(tmp_path / "a.jsonl")], tmp_path / str(workers), recipe, num_workers=workers, item_bytes=9000
        )
    one = files_of(tmp_path / "1")
    assert files_of(tmp_path / "3") == one
    kept_texts = [text for text in texts if text.strip() and len(text) <= 400]
    num_empty = sum(not text.strip() for text in texts)
    expected = {
        "empty": 2 * num_empty, "invalid": 2 * len(texts), "too_long": 2 * (len(texts) - len(kept_texts) - num_empty),
    }  # fmt: skip
    assert summary.skipped == expected
    assert summary.num_documents == 2 * len(kept_texts)
    for part in ("train", "valid"):
        store = TokenStore.open(tmp_path / "1" / part)
        assert store.manifest.skipped == expected
        assert not verify(store.path)
        for document in range(store.num_documents):
            assert json.loads(lines[store.origin(document).line - 1])["text"] in kept_texts
    again = preprocess([str(tmp_path / "a.jsonl")], tmp_path / "1", recipe, item_bytes=9000)
    assert again.skipped == expected
    for other, fault in [
        (Recipe(tokenizer_path, split=(0.8, 0.2)), "its skip_invalid is True, this one None"),
        (Recipe(tokenizer_path, split=(0.8, 0.2), skip_invalid=True, skip_empty=True), "its max_chars is 400"),
    ]:
        with pytest.raises(UserError, match=fault):
            preprocess([str(tmp_path / "a.jsonl")], tmp_path / "1", other, item_bytes=9000)


def test_without_rules_that_skip_nothing_of_them_is_in_the_manifest(
    tmp_path: Path, corpus: Path, tokenizer_path: str
) -> None:
    preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path))
    assert b"skip" not in (tmp_path / "s" / "manifest.json").read_bytes()
    assert b"max_chars" not in (tmp_path / "s" / "manifest.json").read_bytes()


def test_an_input_of_which_nothing_is_left_is_refused(tmp_path: Path, tokenizer_path: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["too long", "", "also too long"])
    with pytest.raises(UserError, match="0 documents without any text, 3 skipped"):
        preprocess([str(source)], tmp_path / "s", Recipe(tokenizer_path, skip_empty=True, max_chars=3))


def test_a_folder_with_other_files_is_refused(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        preprocess([str(corpus)], tmp_path, Recipe(tokenizer_path))
    assert files_of(tmp_path) == {"thesis.tex": b"x"}


@pytest.mark.ci
@pytest.mark.slow
def test_a_fault_keeps_what_is_sealed_and_a_repaired_input_continues(
    tmp_path: Path, texts: list[str], tokenizer_path: str
) -> None:
    for name, part in (("a", texts[100:200]), ("b", texts[:100])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    good = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "b.jsonl").write_bytes(good + b'{"text": "\xff"}\n')
    inputs, recipe = [str(tmp_path / "*.jsonl")], Recipe(tokenizer_path)
    item_bytes = max(path.stat().st_size for path in tmp_path.glob("*.jsonl"))
    for _ in range(2):
        with pytest.raises(UserError, match=r"b\.jsonl, line 101: invalid UTF-8"):
            preprocess(inputs, tmp_path / "s", recipe, item_bytes=item_bytes)
    with pytest.raises(UserError, match="unfinished"):
        TokenStore.open(tmp_path / "s")
    with pytest.raises(UserError, match="its append_eod is False, this one True"):
        preprocess(inputs, tmp_path / "s", Recipe(tokenizer_path, append_eod=True), item_bytes=item_bytes)
    (tmp_path / "b.jsonl").write_bytes(good)
    summary = preprocess(inputs, tmp_path / "s", recipe, item_bytes=item_bytes)
    assert (summary.num_items, summary.num_items_done_before) == (2, 1)
    preprocess(inputs, tmp_path / "whole", recipe, item_bytes=item_bytes)
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")


def command(corpus: Path, output: Path, tokenizer_path: str, *flags: str) -> list[str]:
    return [
        sys.executable, "-m", "datakit", "preprocess", str(corpus), "--output", str(output),
        "--tokenizer", tokenizer_path, "--append-eod", *flags,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def large_corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """About 9 MB of jsonl: some seconds of work."""
    folder = tmp_path_factory.mktemp("large")
    write_jsonl(folder / "a.jsonl", [f"{i} {text}" for i in range(100) for text in texts])
    return folder


def num_shard_files(folder: Path) -> int:
    return sum(name.endswith(".bin") for _, _, names in os.walk(folder) for name in names)  # some go meanwhile


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "worker"])
def test_killed_at_any_moment_and_rerun_gives_the_same_bytes(
    tmp_path: Path, large_corpus: Path, tokenizer_path: str, victim: str
) -> None:
    flags = ["--workers", "2", "--split", "0.9,0.1", "--item-size", "256KiB"]
    subprocess.run(command(large_corpus, tmp_path / "whole", tokenizer_path, *flags), check=True, cwd=ROOT, timeout=200)
    for attempt in range(5):
        words = command(large_corpus, tmp_path / "killed", tokenizer_path, *flags)
        process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        while not (workers := psutil.Process(process.pid).children()) or (
            num_shard_files(tmp_path / "killed") < 12 * attempt  # of two files for each of 70 items
        ):
            assert process.poll() is None
            time.sleep(0.02)
        chosen = process.pid if victim == "parent" else workers[attempt % len(workers)].pid
        os.kill(chosen, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        psutil.wait_procs(workers, timeout=20)
        assert not any(worker.is_running() for worker in workers)
        if chosen != process.pid:
            assert process.returncode == 3
            assert "killed by signal 9" in errors
    last = subprocess.run(
        command(large_corpus, tmp_path / "killed", tokenizer_path, *flags, "--json"),
        check=True, cwd=ROOT, timeout=200, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert json.loads(last.stdout)["num_items_done_before"] > 0
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


@pytest.mark.ci
@pytest.mark.slow
def test_a_killed_worker_is_told_and_the_rerun_continues(
    tmp_path: Path, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch, cli: Cli,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    words = ["preprocess", corpus, "--tokenizer", tokenizer_path, "--item-size", "500", "--output"]
    strace = "strace -f -qq -o /dev/null -e inject=fsync:signal=KILL:when=3"  # in the middle of sealing
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {strace} {sys.executable} "$@"\n')
    fake.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(fake))
        assert cli(*words, tmp_path / "s", "--workers", "1") == 3
    message = capsys.readouterr().err
    assert "in work item" in message
    assert "hint: rerun the same command" in message
    assert cli(*words, tmp_path / "s") == 0
    assert cli(*words, tmp_path / "t") == 0
    assert files_of(tmp_path / "s") == files_of(tmp_path / "t")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.ci
@pytest.mark.slow
def test_a_full_disk_is_told_and_a_rerun_with_room_continues(
    small_disk: Path,
    tmp_path: Path,
    texts: list[str],
    tokenizer_path: str,
    cli: Cli,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [f"{i} {text}" for i in range(9) for text in texts])
    words = ["--tokenizer", tokenizer_path, "--workers", "2", "--item-size", "200KiB"]
    assert cli("preprocess", tmp_path / "a.jsonl", "--output", small_disk / "s", *words) == 3
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert str(small_disk / "s") in message
    assert list(small_disk.glob("s/shard-*.bin"))
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert cli("preprocess", tmp_path / "a.jsonl", "--output", small_disk / "s", *words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_items_done_before"] > 0
    assert cli("preprocess", tmp_path / "a.jsonl", "--output", tmp_path / "t", *words) == 0
    assert files_of(small_disk / "s") == files_of(tmp_path / "t")


def test_a_disk_that_is_full_before_the_first_note_is_told_and_left_as_it_was(
    small_disk: Path, corpus: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    with (small_disk / "full").open("wb", buffering=0) as file, suppress(OSError):
        file.write(bytes(1 << 20))
    assert cli("preprocess", corpus, "--output", small_disk / "s", "--tokenizer", tokenizer_path) == 3
    message = capsys.readouterr().err
    assert f"cannot write {small_disk}/s/.work/recipe.json: No space left on device" in message
    assert "hint: free some space" in message
    assert [path.name for path in small_disk.iterdir()] == ["full"]


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    with pytest.raises(UserError, match="no such tokenizer"):
        preprocess([str(corpus)], tmp_path / "s", Recipe(str(tmp_path / "nothing.json")))
    with pytest.raises(UserError, match="is read by tokenizers, not by sentencepiece"):
        preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path), backend="sentencepiece")
    assert not (tmp_path / "s").exists()


def test_sealed_items_of_another_recipe_are_refused_where_only_the_manifest_is_missing(
    tmp_path: Path, corpus: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("datakit.preprocessing.preprocess._Job.finish", killed)
        with pytest.raises(KeyboardInterrupt):
            preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path))
    with pytest.raises(UserError, match="was made otherwise: its append_eod is False, this one True"):
        preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path, append_eod=True))
    summary = preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path))
    assert summary.num_items_done_before == summary.num_items


@pytest.mark.parametrize("place", ["tmp_path", "s3_url"])
def test_the_hint_of_a_key_that_is_missing_makes_the_store(
    place: str, request: pytest.FixtureRequest, tmp_path: Path, tokenizer_path: str, cli: Cli,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    output = f"{request.getfixturevalue(place)}/s"
    (tmp_path / "c.jsonl").write_text('{"body": "first"}\n{"body": "second"}\n')
    command = ["preprocess", str(tmp_path / "c.jsonl"), "--output", output, "--tokenizer", tokenizer_path]
    assert cli(*command, "--text-key", "txet") == 2
    assert "hint: --text-key body" in capsys.readouterr().err
    assert cli(*command, "--text-key", "body") == 0
    assert "2 documents" in capsys.readouterr().out


def test_one_run_at_a_time_writes_into_a_store(
    tmp_path: Path, corpus: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import fcntl

    monkeypatch.setattr("datakit.preprocessing.preprocess.PATIENCE_S", 0.0)
    (tmp_path / "s" / ".work").mkdir(parents=True)
    with (tmp_path / "s" / ".work" / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert cli("preprocess", corpus, "--output", tmp_path / "s", "--tokenizer", tokenizer_path) == 3
    assert "another run is writing" in capsys.readouterr().err
    assert cli("preprocess", corpus, "--output", tmp_path / "s", "--tokenizer", tokenizer_path) == 0


def test_the_line_of_progress_tells_what_is_left(tmp_path: Path) -> None:
    files = [InputFile(str(tmp_path / name), "txt", "", size, 0) for name, size in (("a", 100), ("b", 300))]
    items = [WorkItem(number, (FileSlice(file, 0, file.size_bytes),)) for number, file in enumerate(files)]
    meter = Meter(items)
    meter.update(items[0], {"progress": {"input_bytes": 50, "num_tokens": 10, "num_by_reference": 0}})
    assert meter.line().startswith("0/2 work items, 0.0 MB, ")
    assert "left" not in meter.line()
    assert meter.share == 0
    meter.update(items[0], {"sealed": 0, "progress": {"input_bytes": 100, "num_tokens": 20, "num_by_reference": 0}})
    assert meter.line().endswith("0:00:00 left")
    assert meter.share == 0.25
    meter.update(items[1], {"sealed": 1, "progress": {"input_bytes": 300, "num_tokens": 60, "num_by_reference": 3}})
    assert meter.line() == "2/2 work items, 0.0 MB"
    assert meter.share == 1
    assert meter.num_by_reference == 3


def test_the_work_of_another_verb_is_left_alone(tmp_path: Path, corpus: Path, tokenizer_path: str) -> None:
    work = tmp_path / "s" / ".work"
    work.mkdir(parents=True)
    (work / "assembly.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not empty: it holds \.work/assembly\.json"):
        preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path))
    assert [path.name for path in work.iterdir()] == ["assembly.json"]
    (work / "assembly.json").unlink()
    preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path))  # a kill before anything was begun
    assert not verify(tmp_path / "s")
