"""Statistics: exact counts against a plain count of every document, over shards and stores."""

import json
from collections import Counter
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import Recipe, TokenStore, preprocess, write_store
from datakit.reports.statistics import _LengthCounts, statistics
from tests.datakit.conftest import Cli, write_jsonl
from threefold.errors import CheckFailed


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**31 - 1)), max_size=200), st.integers(1, 9))
def test_order_statistics_and_histogram_are_exact(lengths: list[int], window: int) -> None:
    counts = _LengthCounts()
    for start in range(0, len(lengths), window):
        counts.add(np.array(lengths[start : start + window], np.int64))
    order, buckets = counts.order(), list(counts.histogram())
    assert sum(bucket.num_documents for bucket in buckets) == len(lengths)
    assert sum(bucket.num_tokens for bucket in buckets) == sum(lengths)
    for bucket in buckets:
        inside = [length for length in lengths if bucket.min_length <= length <= bucket.max_length]
        assert (bucket.num_documents, bucket.num_tokens) == (len(inside), sum(inside))
        assert bucket.max_length < 2 * max(bucket.min_length, 1)
    if order is None:
        assert not lengths
        return
    ordered = sorted(lengths)
    ranked = [ordered[max(ceil(percent * len(ordered) / 100), 1) - 1] for percent in (0, 50, 90, 99, 100)]
    assert [order.min, order.median, order.p90, order.p99, order.max] == ranked
    assert order.mean == pytest.approx(sum(lengths) / len(lengths))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_path: str) -> TokenStore:
    folder = tmp_path_factory.mktemp("statistics")
    for number in range(25):
        write_jsonl(folder / f"{number:02}.jsonl", texts[: number % 7 + 1] if number else texts)
    preprocess([str(folder)], folder / "s", Recipe(tokenizer_path), item_bytes=10_000)
    return TokenStore.open(folder / "s")


def test_sources_are_counted(store: TokenStore) -> None:
    counted = statistics([store.path], window_documents=7)
    tokens: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    for number in range(store.num_documents):
        path = store.origin(number).path
        tokens[path] += len(store.document(number))
        documents[path] += 1
    assert len(tokens) == 25
    order = sorted(tokens, key=lambda path: (-tokens[path], path))
    named = [(source.path, source.num_documents, source.num_tokens) for source in counted.sources]
    assert named == [(path, documents[path], tokens[path]) for path in order[:20]]
    others = counted.other_sources
    assert others.num_sources == 5
    assert others.num_tokens == sum(tokens[path] for path in order[20:])
    assert others.num_documents == sum(documents[path] for path in order[20:])
    assert counted.num_empty_documents == sum(not len(store.document(i)) for i in range(store.num_documents)) > 0


def test_stores_are_counted_together(store: TokenStore, tmp_path: Path) -> None:
    other = write_store(tmp_path / "o", [[1] * 3000, []], vocab_size=9)
    one, both = statistics([store.path]), statistics([store.path, other.path])
    assert both.num_tokens == one.num_tokens + 3000
    assert both.num_documents == one.num_documents + 2
    assert both.lengths is not None
    assert both.lengths.max == 3000
    assert [counts.path for counts in both.stores] == [str(store.path), str(other.path)]


def test_an_empty_store_has_no_lengths(tmp_path: Path) -> None:
    found = statistics([write_store(tmp_path / "s", [], vocab_size=9).path])
    assert (found.num_documents, found.lengths, found.histogram, found.sources) == (0, None, (), ())


@pytest.mark.parametrize("value", [b"\xff\xff\xff\xff", b"\x07\x00\x00\x00"])
def test_a_damaged_index_is_told(tmp_path: Path, value: bytes) -> None:
    store = write_store(tmp_path / "s", [[1, 2], [3]], vocab_size=9)
    file = tmp_path / "s" / "shard-000000-000.idx"
    content = file.read_bytes()
    file.write_bytes(content[:34] + value + content[38:])
    with pytest.raises(CheckFailed, match="is damaged"):
        statistics([store.path])


def test_the_verb_reports_as_text_and_json(
    store: TokenStore, cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli("stats", store.path, store.path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_documents"] == 2 * store.num_documents
    assert sum(bucket["num_tokens"] for bucket in found["histogram"]) == 2 * store.num_tokens == found["num_tokens"]
    assert cli("stats", store.path) == 0
    output = capsys.readouterr().out
    assert f"{store.num_documents:,} documents, {store.num_tokens:,} tokens" in output
    assert "median" in output
    assert "5 others" in output
    empty = write_store(tmp_path / "s", [], vocab_size=9)
    assert cli("stats", empty.path) == 0
    assert cli("stats", tmp_path / "none") == 2
