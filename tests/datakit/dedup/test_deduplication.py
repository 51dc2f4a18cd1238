"""Deduplication: the first of equal texts of a whole corpus is kept, with any workers, rules and splits, and kills."""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import zstandard
from tokenizers import Tokenizer as Library

from datakit import Recipe, TokenStore, preprocess, verify
from datakit.dedup.duplicates import Duplicates, ItemHasher, find_duplicates
from datakit.format.output import Output
from datakit.store.item_records import RECORDS_FOLDER
from datakit.text.documents import DocumentReader, DocumentRules
from datakit.text.inputs import WorkItem, cut, find_inputs
from tests.datakit.conftest import Cli, files_of, write_jsonl
from threefold.errors import UserError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def documents(texts: list[str]) -> list[str]:
    """The corpus's documents in order: most are there several times, near and far."""
    return [texts[i * i % 211] + str(i % 2) * (i % 5 == 0) for i in range(600)] + ["", " ", "the end"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    """The documents in four files of three formats."""
    folder = tmp_path_factory.mktemp("repeating")
    write_jsonl(folder / "a.jsonl", documents[:300])
    packed = write_jsonl(folder / "part", documents[300:400]).read_bytes()
    (folder / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(packed))
    (folder / "part").unlink()
    write_jsonl(folder / "c.jsonl", documents[400:602])
    (folder / "d.txt").write_text(documents[602])
    return folder


def firsts_of(documents: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(documents))


def ids_of(store: TokenStore) -> list[list[int]]:
    return [store.document(number).tolist() for number in range(store.num_documents)]


@pytest.mark.ci
@pytest.mark.slow
def test_the_first_of_equal_texts_is_kept_with_any_number_of_workers(
    tmp_path: Path, corpus: Path, documents: list[str], tokenizer_path: str
) -> None:
    recipe = Recipe(tokenizer_path, dedup=True)
    for workers in (1, 3):
        summary = preprocess([str(corpus)], tmp_path / str(workers), recipe, num_workers=workers, item_bytes=3000)
    one = files_of(tmp_path / "1")
    assert files_of(tmp_path / "3") == one
    store, firsts, library = TokenStore.open(tmp_path / "1"), firsts_of(documents), Library.from_file(tokenizer_path)
    assert len(store.manifest.shards) > 5
    assert ids_of(store) == [library.encode(text).ids for text in firsts]
    assert summary.skipped == store.manifest.skipped == {"duplicate": len(documents) - len(firsts)}
    assert store.manifest.settings["dedup"] is True
    assert not verify(store.path)
    lines = [(corpus / "a.jsonl").read_text().splitlines(), (corpus / "c.jsonl").read_text().splitlines()]
    for number, text in enumerate(firsts):
        origin = store.origin(number)
        if origin.path.endswith(("a.jsonl", "c.jsonl")):
            line = lines[origin.path.endswith("c.jsonl")][origin.line - 1]
            assert json.loads(line)["text"] == text
    again = preprocess([str(corpus)], tmp_path / "1", recipe, item_bytes=3000)
    assert again.num_items_done_before == again.num_items
    with pytest.raises(UserError, match="its dedup is True, this one None"):
        preprocess([str(corpus)], tmp_path / "1", Recipe(tokenizer_path), item_bytes=3000)


@pytest.mark.ci
@pytest.mark.slow
def test_it_composes_with_splits_and_rules_that_skip(
    tmp_path: Path, documents: list[str], corpus: Path, tokenizer_path: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n' + json.dumps({"text": documents[5]}) + '\n{"text": "new"}\n')
    inputs = [str(corpus), str(tmp_path / "bad.jsonl")]
    recipe = Recipe(tokenizer_path, split=(0.7, 0.3), skip_invalid=True, skip_empty=True, max_chars=300, dedup=True)
    ordered = [text for path in sorted([tmp_path, corpus]) for text in
               ([documents[5], "new"] if path == tmp_path else documents)]  # fmt: skip
    kept_texts = [text for text in ordered if text.strip() and len(text) <= 300]
    library = Library.from_file(tokenizer_path)
    summaries = [
        preprocess(inputs, tmp_path / name, recipe, num_workers=workers, item_bytes=item_bytes)
        for name, workers, item_bytes in (("a", 2, 3000), ("b", 1, 1 << 20))
    ]
    assert summaries[0].skipped == summaries[1].skipped
    assert summaries[0].skipped == {
        "duplicate": len(kept_texts) - len(set(kept_texts)),
        "empty": sum(not text.strip() for text in ordered),
        "invalid": 1,
        "too_long": sum(len(text) > 300 for text in ordered),
    }
    for name in ("a", "b"):
        stores = [TokenStore.open(tmp_path / name / part) for part in ("train", "valid")]
        found = [ids_of(store) for store in stores]
        expected = [library.encode(text).ids for text in firsts_of(kept_texts)]
        assert [ids for ids in expected if ids in found[0]] == found[0]
        assert [ids for ids in expected if ids in found[1]] == found[1]
        assert len(found[0]) + len(found[1]) == len(expected)


def test_an_item_of_nothing_but_duplicates_and_a_joined_text(tmp_path: Path, tokenizer_path: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"t": "x", "b": "y"}\n{"t": "x y"}\n')
    (tmp_path / "b.jsonl").write_text('{"b": "x\\n\\ny"}\n{"b": "x y", "t": ""}\n')
    recipe = Recipe(tokenizer_path, text_key="t,b", dedup=True)
    summary = preprocess([str(tmp_path)], tmp_path / "s", recipe, item_bytes=45)
    assert (summary.num_documents, summary.skipped, summary.num_items) == (2, {"duplicate": 2}, 2)


class Hashes:
    """Hashes items here, and remembers which."""

    def __init__(self, output: Output) -> None:
        self._hasher = ItemHasher(output, DocumentRules())
        self.done: list[int] = []

    def __call__(self, items: list[WorkItem]) -> None:
        self.done += [item.number for item in items]
        for item in items:
            self._hasher.seal(item)


def test_only_changed_input_is_hashed_again_and_what_was_sealed_of_it_is_void(tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "in").mkdir()
    output, sealed = Output(str(tmp_path / "s")), tmp_path / "s" / RECORDS_FOLDER / "000001.json"
    sealed.parent.mkdir(parents=True)

    def items() -> list[WorkItem]:
        return list(cut(find_inputs([str(tmp_path / "in")]), 40, split_txt=False))

    for name in "abc":
        (tmp_path / "in" / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n{{"text": "same"}}\n')
    hashes, lines = Hashes(output), list[str]()
    find_duplicates(output, items(), hashes, lines.append)
    assert lines == ["2 of 6 documents have the text of an earlier one"]
    assert hashes.done == [0, 1, 2]
    sealed.write_text("{}")
    find_duplicates(output, items(), hashes, lines.append)
    assert sealed.exists()
    assert (len(lines), hashes.done) == (1, [0, 1, 2])
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "b"}\n{"text": "a"}\n')
    find_duplicates(output, items(), hashes, lines.append)
    assert not sealed.exists()
    assert hashes.done == [0, 1, 2, 1]
    assert lines[1:] == ["2 of 6 documents have the text of an earlier one"]
    kept = [
        Duplicates(output).of_item(item.number).leave_out(documents).texts
        for item in items()
        for documents in DocumentReader(item.slices[0], DocumentRules()).runs()
    ]
    assert kept == [["a", "same"], ["b"], ["c"]]


def command(corpus: Path, output: Path, tokenizer_path: str, *flags: str) -> list[str]:
    return [
        sys.executable, "-m", "datakit", "preprocess", str(corpus), "--output", str(output), "--tokenizer",
        tokenizer_path, "--dedup", "--split", "0.9,0.1", *flags,
    ]  # fmt: skip


@pytest.mark.slow
def test_killed_at_one_write_to_disk_after_the_other_and_rerun_gives_the_same_bytes(
    tmp_path: Path, corpus: Path, tokenizer_path: str, cli: Cli
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    flags = ["--item-size", "60KiB", "--workers", "2"]
    assert cli(*command(corpus, tmp_path / "whole", tokenizer_path, *flags)[3:]) == 0
    codes: list[int] = []
    while 0 not in codes:  # by turns the command itself, and whichever of its processes comes so far first
        fault = f"inject=fsync:signal=KILL:when={2 + len(codes)}"
        strace = ["strace", *["-f"] * (len(codes) % 2), "-qq", "-o", "/dev/null", "-e", fault]
        words = [*strace, *command(corpus, tmp_path / "killed", tokenizer_path, *flags)]
        codes.append(subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode)
    assert set(codes) == {0, 3, -signal.SIGKILL}
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["parent", "worker"])
def test_killed_at_any_moment_and_rerun_gives_the_same_bytes(
    tmp_path: Path, documents: list[str], tokenizer_path: str, victim: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"{i % 60} {text}" for i in range(100) for text in documents[:300]])
    flags = ["--workers", "2", "--item-size", "256KiB"]
    subprocess.run(command(source, tmp_path / "whole", tokenizer_path, *flags), check=True, cwd=ROOT, timeout=300)
    work, killed = tmp_path / "killed" / ".work", set[str]()

    def num_records() -> int:
        return len(glob.glob(f"{work}/*/*.json"))  # which bears that files go meanwhile

    for attempt in range(40):
        before = num_records()
        process = subprocess.Popen(command(source, tmp_path / "killed", tokenizer_path, *flags), cwd=ROOT)
        while process.poll() is None and num_records() < before + 12:
            time.sleep(0.001 * attempt)  # from 0: a moment of its own in each attempt
        if process.poll() is not None:
            if len(killed) == 2:
                break
            shutil.rmtree(tmp_path / "killed")  # on a busy machine one may end unseen before both had their kill
            continue
        killed.add("tokenizing" if (work / "duplicates").exists() else "hashing")
        workers = psutil.Process(process.pid).children()
        chosen = process.pid if victim == "parent" or not workers else workers[attempt % len(workers)].pid
        os.kill(chosen, signal.SIGKILL)
        process.wait(timeout=60)
        psutil.wait_procs(workers, timeout=20)
    subprocess.run(command(source, tmp_path / "killed", tokenizer_path, *flags), check=True, cwd=ROOT, timeout=300)
    assert killed == {"hashing", "tokenizing"}
    whole = files_of(tmp_path / "whole")
    assert files_of(tmp_path / "killed") == whole
    for workers in ("1", "4"):
        words = command(source, tmp_path / workers, tokenizer_path, "--workers", workers, "--item-size", "256KiB")
        subprocess.run(words, check=True, cwd=ROOT, timeout=300)
        assert files_of(tmp_path / workers) == whole
