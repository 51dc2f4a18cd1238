"""InputTable: a change of the input is seen though sizes stay, a touch is no change, and a store has no times in it."""

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datakit import Recipe, preprocess
from datakit.preprocessing.sources import FILE_NAME, InputTable
from datakit.text.inputs import cut, find_inputs
from tests.datakit.conftest import files_of, write_jsonl
from threefold.errors import CheckFailed, UserError
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of several items, a compressed one and a table, in `corpus` of the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [f"text {number}" for number in range(100)])
    (folder / "b.txt").write_text("one document")
    pq.write_table(pa.table({"text": ["row one", "row two"]}), folder / "c.parquet")
    return folder


@pytest.fixture
def recipe(tokenizer_path: str) -> Recipe:
    return Recipe(tokenizer_path)


def run(recipe: Recipe, output: str = "store", place: str = "corpus") -> list[str]:
    """Preprocess; return the lines of the report."""
    lines: list[str] = []
    preprocess([place], output, recipe, item_bytes=1000, report=lines.append)
    return lines


@pytest.mark.ci
@pytest.mark.slow
def test_the_same_corpus_with_other_times_elsewhere_gives_the_same_store(
    tmp_path: Path, corpus: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(recipe)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    shutil.copytree(corpus, "corpus", copy_function=shutil.copyfile)
    run(recipe)
    one, other = files_of(tmp_path / "store"), files_of(tmp_path / "other" / "store")
    assert one.pop(FILE_NAME) != other.pop(FILE_NAME)
    assert one == other


def test_a_complete_store_is_not_of_a_source_that_changed_in_place(corpus: Path, recipe: Recipe) -> None:
    run(recipe)
    for name in ("a.jsonl", "b.txt", "c.parquet"):
        content = (corpus / name).read_bytes()
        os.utime(corpus / name)
        assert run(recipe) == [
            "of 3 source files 1 were touched since: comparing them with what was read", "store is complete already",
        ]  # fmt: skip
        assert run(recipe) == ["store is complete already"]
        (corpus / name).write_bytes(content.replace(b"one", b"two").replace(b"text 7", b"text 8"))
        with pytest.raises(UserError, match=rf"other content: of 3 source files 1 changed since: corpus/{name}"):
            run(recipe)
        (corpus / name).write_bytes(content)
        assert run(recipe)[-1] == "store is complete already"


def test_a_store_without_a_record_is_complete_and_a_damaged_record_is_named(corpus: Path, recipe: Recipe) -> None:
    run(recipe)
    for damaged in (b"{", b'{"version": 1}', b'{"version": 9}'):
        Path("store", FILE_NAME).write_bytes(damaged)
        with pytest.raises(CheckFailed, match=r"store/\.sources\.json is damaged"):
            run(recipe)
    Path("store", FILE_NAME).unlink()
    assert run(recipe) == ["store is complete already"]


def test_a_change_behind_a_url_is_told_by_its_etag(corpus: Path, recipe: Recipe, s3_url: str) -> None:
    storage = open_storage(f"{s3_url}/corpus")
    storage.write("a.jsonl", b'{"text": "one"}\n')
    run(recipe, place=f"{s3_url}/corpus")
    storage.write("a.jsonl", b'{"text": "one"}\n')
    assert run(recipe, place=f"{s3_url}/corpus") == ["store is complete already"]
    storage.write("a.jsonl", b'{"text": "two"}\n')
    with pytest.raises(UserError, match="of 1 source files 1 changed since"):
        run(recipe, place=f"{s3_url}/corpus")


def test_planning_asks_once_a_cut_and_a_complete_store_is_known_by_listing(
    corpus: Path, recipe: Recipe, s3_proxy: FaultProxy, s3_url: str
) -> None:
    storage = open_storage(f"{s3_url}/corpus")
    for number in range(12):
        storage.write(f"{number}.jsonl", (corpus / "a.jsonl").read_bytes())
    s3_proxy.fault = Fault("delay", delay_s=0.0)
    num_cuts = 12 * (-(-(corpus / "a.jsonl").stat().st_size // 1000) - 1)
    items = list(cut(find_inputs([f"{s3_url}/corpus"]), 1000, split_txt=False))
    assert len(items) == num_cuts + 12
    assert s3_proxy.num_faults <= num_cuts + 2
    run(recipe, place=f"{s3_url}/corpus")
    s3_proxy.fault, before = Fault("delay", delay_s=0.0, times=None), s3_proxy.num_faults
    assert run(recipe, place=f"{s3_url}/corpus") == ["store is complete already"]
    assert s3_proxy.num_faults - before <= 2
    assert InputTable.parse("", Path("store", FILE_NAME).read_bytes()).num_items == num_cuts + 12
