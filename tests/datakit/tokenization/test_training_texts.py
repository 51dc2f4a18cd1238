"""Samples to train a tokenizer on: within their bytes, over all inputs, the same each time."""

import gzip
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from datakit.text.documents import DocumentRules
from datakit.text.inputs import find_inputs
from datakit.tokenization.tokenizer_training import TrainingTexts, sample


@given(st.lists(st.text(max_size=30), max_size=60), st.integers(1, 400))
def test_a_sample_fits_and_keeps_the_order(texts: list[str], max_bytes: int) -> None:
    named = [(str(number), text) for number, text in enumerate(texts)]
    chosen = sample(iter(named), max_bytes)
    assert sum(len(text.encode()) for text in chosen) <= max_bytes
    assert chosen == sample(iter(named), max_bytes)
    rest = iter(texts)
    if all(len(text.encode()) <= max_bytes for text in texts):
        assert all(text in rest for text in chosen)  # in their order
    if sum(len(text.encode()) for text in texts) <= max_bytes:
        assert chosen == texts


def test_a_text_that_is_too_large_is_cut_if_there_is_no_other() -> None:
    assert sample(iter([("a", "é" * 9)]), 5) == ["éé"]
    assert sample(iter([("a", "x" * 9), ("b", "yy")]), 5) == ["yy"]


def corpus(folder: Path, size: int = 5) -> Path:
    """Three files of texts that say where they are from, one of them compressed."""
    folder.mkdir()
    for name in ("a", "b", "c"):
        lines = "".join(json.dumps({"text": f"{name} {number:0{size}}"}) + "\n" for number in range(4000))
        path = folder / (f"{name}.jsonl" + (".gz" if name == "c" else ""))
        path.write_bytes(gzip.compress(lines.encode(), mtime=0) if name == "c" else lines.encode())
    return folder


def test_a_sample_is_of_all_inputs_and_of_all_their_parts(tmp_path: Path) -> None:
    files = find_inputs([str(corpus(tmp_path / "corpus"))])
    texts = TrainingTexts(files, DocumentRules(), max_bytes=7 * 600)
    chosen = list(texts)
    assert len(chosen) == 600 == texts.num_documents
    assert texts.text_bytes == 7 * 600
    for name in ("a", "b", "c"):
        numbers = [int(text[2:]) for text in chosen if text[0] == name]
        assert 140 < len(numbers) < 260
        assert min(numbers) < 400
        assert max(numbers) > 3600  # not the first bytes of each
    assert list(TrainingTexts(files, DocumentRules(), max_bytes=7 * 600)) == chosen


def test_of_large_inputs_parts_are_read(tmp_path: Path) -> None:
    files = find_inputs([str(corpus(tmp_path / "corpus", 1000))])  # 4 MB each, of which 1 MiB is read
    texts = TrainingTexts(files, DocumentRules(), max_bytes=10_020)
    found = list(texts)
    assert len(found) == 10
    assert texts.share == 1.0
    assert max(int(text[2:]) for text in found if text[0] != "c") < 1100


def test_all_of_it_is_read_without_a_bound(tmp_path: Path) -> None:
    texts = TrainingTexts(find_inputs([str(corpus(tmp_path / "corpus"))]), DocumentRules())
    assert len(list(texts)) == 12_000
