"""A verb is killed before any of its fsyncs: once the same call ends, all names of its output are durable."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from datakit import Recipe, archive, merge, pack, preprocess, unarchive
from datakit.foreign.megatron import to_megatron
from datakit.tokenization.tokenizer_training import train_tokenizer
from tests.datakit.conftest import write_jsonl
from tests.support.durable_names import DurableNames

Verb = Callable[[Path, Path], object]
VERBS: dict[str, Verb] = {
    "merge": lambda store, output: merge([store, store], output),
    "merge --copy": lambda store, output: merge([store], output, copy=True),
    "pack": lambda store, output: pack(store, seq_length=8, output=output),
    "convert": lambda store, output: to_megatron(store, output),
    "archive": lambda store, output: archive(store, str(output)),
    "unarchive": lambda store, output: unarchive(str(store), output),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_path: str) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    write_jsonl(folder / "a.jsonl", texts[:20])
    preprocess([str(folder / "a.jsonl")], folder / "a", Recipe(tokenizer_path))
    return folder / "a"


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DurableNames:
    return DurableNames(tmp_path / "disk", monkeypatch, commits=("manifest.json", "archive.json", "packing.json"))


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_what_a_killed_verb_left_is_durable_once_the_same_call_ends(
    names: DurableNames, store: Path, verb: Verb
) -> None:
    def work(folder: Path) -> None:
        verb(store, folder / "outputs/new")

    for folder in names.each_kill(os.makedirs, work):
        work(folder)
        assert [lost for lost in names.lost() if "/" in lost] == []
        assert [lost for lost in names.on_commit if "/outputs/new/" in lost and "/.work" not in lost] == []


@pytest.mark.parametrize("split", [None, (0.5, 0.5)])
def test_a_call_that_finds_its_stores_complete_makes_their_names_durable(
    names: DurableNames, tmp_path: Path, texts: list[str], tokenizer_path: str, split: tuple[float, float] | None
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts[:20])
    recipe = Recipe(tokenizer_path, split=split)
    for _ in range(2):
        names.forget()  # as if the first call had been killed before it synced anything
        preprocess([str(tmp_path / "a.jsonl")], names.folder / "new/store", recipe)
    assert [lost for lost in names.lost() if lost != "new"] == []


def test_a_tokenizer_is_durable_with_the_folders_that_another_made(
    names: DurableNames, tmp_path: Path, texts: list[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts[:50])
    (names.folder / "made/by/others").mkdir(parents=True)
    train_tokenizer([str(tmp_path / "a.jsonl")], str(names.folder / "made/by/others/tok.json"), vocab_size=300)
    assert names.lost() == []
