"""Task: it arrives at a worker as it was, as a line and pickled, and an actor does the work of both passes."""

import pickle
from pathlib import Path

import pytest

from datakit import Recipe
from datakit.dedup.duplicates import ItemHasher, read_hashes
from datakit.format.output import Output
from datakit.format.tags import Tag
from datakit.preprocessing.ray_pool import _Sealer
from datakit.preprocessing.task import HASH, ItemEncoder, Task
from datakit.text.inputs import cut, find_inputs
from datakit.tokenization.fast_encoder import Terms
from datakit.tokenization.identity import TokenizerIdentity
from tests.datakit.conftest import write_jsonl

IDENTITY = TokenizerIdentity("tokenizers", "ab", 400, "<|endoftext|>", 0)


def test_a_task_arrives_as_it_was() -> None:
    recipe = Recipe("t.json", split=(0.5, 0.5), max_chars=9, tags=(Tag("a", "x/**"), Tag("b", "y")), dedup=True)
    terms = Terms(before=(1,), after=(2, 3), doubted=(4,), characters=("▁",))
    for task in (Task("s", recipe, IDENTITY, HASH), Task("s", Recipe("t.json"), IDENTITY, "gigatoken", terms)):
        assert Task.from_line(task.to_line()) == task
        assert pickle.loads(pickle.dumps(task)) == task


def test_an_actor_hashes_or_tokenizes(
    tmp_path: Path, texts: list[str], tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [item] = cut(find_inputs([str(write_jsonl(tmp_path / "a.jsonl", texts))]), 1 << 30, split_txt=False)
    hashing = Task("s", Recipe(tokenizer_path, dedup=True), IDENTITY, HASH)
    assert isinstance(hashing.sealer(), ItemHasher)
    assert _Sealer(hashing, str(tmp_path)).seal(item)["sealed"] == 0
    [found] = read_hashes(Output("s"), [item])
    assert found is not None
    assert found.num_documents == len(texts)
    assert isinstance(Task("s", Recipe(tokenizer_path), IDENTITY, "tokenizers").sealer(), ItemEncoder)
