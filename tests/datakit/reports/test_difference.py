"""Difference: the first one, against a plain comparison of every document, for stores cut in any way."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import Recipe, TokenStore, preprocess, write_store
from datakit.reports.difference import Difference, find_difference
from tests.datakit.conftest import Cli, write_jsonl
from threefold.errors import CheckFailed

Documents = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12)


def expected(left: Documents, right: Documents) -> tuple[int, int] | None:
    for number, (first, second) in enumerate(itertools.zip_longest(left, right)):
        if first != second:
            pairs = itertools.zip_longest(first or [], second or [])
            unequal = (token for token, (one, other) in enumerate(pairs) if one != other)
            return number, next(unequal, 0)
    return None


@given(left=DOCUMENTS, edit=st.one_of(st.none(), DOCUMENTS), data=st.data())
def test_the_first_difference_is_found_whatever_the_cut(
    tmp_path_factory: pytest.TempPathFactory, left: Documents, edit: Documents | None, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("d")
    right = left
    if edit is not None:
        at = data.draw(st.integers(0, len(left)))
        right = left[:at] + edit + left[at + len(edit) :]
    cuts = [data.draw(st.integers(1, 5)) for _ in range(2)]
    vocabularies = [data.draw(st.sampled_from([9, 70_000])) for _ in range(2)]
    stores = [
        write_store(folder / name, documents, vocab_size=vocab_size, shard_documents=cut)
        for name, documents, vocab_size, cut in zip("lr", (left, right), vocabularies, cuts)
    ]
    windows = {"window_documents": data.draw(st.integers(1, 4)), "window_tokens": data.draw(st.integers(1, 5))}
    difference = find_difference(*stores, **windows)
    assert (None if difference is None else (difference.document, difference.token)) == expected(left, right)
    if difference is not None:
        for documents, side in ((left, difference.left), (right, difference.right)):
            if difference.document >= len(documents):
                assert side is None
                continue
            assert side is not None
            document = documents[difference.document]
            assert side.num_tokens == len(document)
            assert side.token == (document[difference.token] if difference.token < len(document) else None)


def test_one_token_in_any_window_is_found(tmp_path: Path) -> None:
    documents = [[7] * 997 for _ in range(20)]
    left = write_store(tmp_path / "l", documents, vocab_size=9)
    for at in (0, 996, 997, 1000, 9999, 20 * 997 - 1):
        changed = [list(document) for document in documents]
        changed[at // 997][at % 997] = 8
        right = write_store(tmp_path / str(at), changed, vocab_size=9, shard_documents=3)
        found = find_difference(left, right, window_tokens=1000)
        assert found is not None
        assert (found.document, found.token) == divmod(at, 997)


@pytest.mark.ci
@pytest.mark.slow
def test_stores_of_other_work_items_hold_the_same(
    tmp_path: Path, texts: list[str], tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl = write_jsonl(tmp_path / "a.jsonl", texts)
    for name, item_bytes in (("l", 10_000), ("r", 100_000)):
        preprocess([str(jsonl)], tmp_path / name, Recipe(tokenizer_path), item_bytes=item_bytes)
    left, right = TokenStore.open(tmp_path / "l"), TokenStore.open(tmp_path / "r")
    assert len(left.manifest.shards) != len(right.manifest.shards)
    assert find_difference(left, right) is None
    assert cli("diff", left.path, right.path) == 0
    assert "hold the same 300 documents" in capsys.readouterr().out
    assert cli("diff", left.path, right.path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"same": True, "same_tokenizer": True, "difference": None}


@pytest.mark.ci
@pytest.mark.slow
def test_the_verb_names_document_token_and_sources(
    tmp_path: Path, texts: list[str], tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, changed in (("l", texts), ("r", [*texts[:50], texts[50][:60] + "!", *texts[51:]]), ("short", texts[:50])):
        jsonl = write_jsonl(tmp_path / f"{name}.jsonl", changed)
        preprocess([str(jsonl)], tmp_path / name, Recipe(tokenizer_path), item_bytes=10_000)
    assert cli("diff", tmp_path / "l", tmp_path / "r") == 1
    output = capsys.readouterr().out
    assert "document 50 differs, first at its token" in output
    assert "l.jsonl, line 51, byte " in output
    assert "r.jsonl, line 51, byte " in output
    assert cli("diff", tmp_path / "l", tmp_path / "r", "--json") == 1
    found = json.loads(capsys.readouterr().out)["difference"]
    assert found["document"] == 50
    assert found["left"]["origin"]["line"] == found["right"]["origin"]["line"] == 51
    assert cli("diff", tmp_path / "l", tmp_path / "short") == 1
    assert "ends after 50 documents" in capsys.readouterr().out


def test_other_tokenizers_are_warned_of(
    tmp_path: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    nameless = write_store(tmp_path / "l", [[1]], vocab_size=9)
    cli("convert", nameless.path / "shard-000000-000", "--output", tmp_path / "r", "--tokenizer", tokenizer_path)
    assert cli("diff", nameless.path, tmp_path / "r") == 0
    assert "warning: the stores' tokenizers differ" in capsys.readouterr().err


@pytest.mark.parametrize("length", [1, 400, -1])
def test_a_damaged_index_is_told(tmp_path: Path, length: int) -> None:
    stores = [write_store(tmp_path / name, [[1, 2], [3], [4]], vocab_size=9, shard_documents=2) for name in "lr"]
    for store in stores:
        file = store.path / "shard-000000-000.idx"
        content = file.read_bytes()
        file.write_bytes(content[:34] + length.to_bytes(4, "little", signed=True) + content[38:])
    with pytest.raises(CheckFailed, match="is damaged"):
        find_difference(*stores)


def test_a_difference_is_a_plain_value(tmp_path: Path) -> None:
    left, right = (
        write_store(tmp_path / name, [[1], [2]][:count], vocab_size=9) for name, count in (("l", 2), ("r", 1))
    )
    found = find_difference(left, right)
    assert found == Difference(1, 0, found.left if found else None, None)
