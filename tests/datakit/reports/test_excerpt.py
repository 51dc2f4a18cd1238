"""Excerpt: any document or sample of a store is shown with its text and its source, over document and shard borders."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

import datakit.format.origins
from datakit import Recipe, TokenStore, preprocess, write_store
from datakit.commands.inspect import _COLOURS, _PLAIN
from datakit.reports.excerpt import document_excerpt, open_matching_tokenizer, pieces, sample_excerpt
from datakit.tokenization.tokenizer import open_tokenizer
from tests.datakit.conftest import Cli, write_jsonl
from threefold.errors import UserError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_path: str) -> TokenStore:
    folder = tmp_path_factory.mktemp("excerpt")
    for name in ("a", "b"):
        write_jsonl(folder / f"{name}.jsonl", texts)
    preprocess([str(folder)], folder / "s", Recipe(tokenizer_path, append_eod=True), item_bytes=20_000)
    found = TokenStore.open(folder / "s")
    assert len(found.manifest.shards) > 2
    return found


def test_a_document_is_its_text_and_its_line(store: TokenStore, texts: list[str], tokenizer_path: str) -> None:
    tokenizer = open_matching_tokenizer(store, tokenizer_path)
    for number in range(store.num_documents):
        excerpt = document_excerpt(store, number)
        assert tokenizer.decode(excerpt.tokens[:-1]) == texts[number % len(texts)]
        [part] = excerpt.parts
        assert (part.document, part.start, part.num_tokens) == (number, 0, len(excerpt.tokens))
        assert part.origin.line == number % len(texts) + 1
        assert part.origin.path.endswith("ab"[number // len(texts)] + ".jsonl")
        with open(part.origin.path, "rb") as file:
            file.seek(part.origin.offset_bytes)
            assert json.loads(file.readline())["text"] == texts[number % len(texts)]
        stop = excerpt.first_token + len(excerpt.tokens)
        assert np.array_equal(store.tokens(excerpt.first_token, stop), excerpt.tokens)


@pytest.mark.parametrize("seq_length", [1, 7, 1000])
def test_a_sample_is_cut_into_its_documents(store: TokenStore, seq_length: int) -> None:
    num_samples = (store.num_tokens - 1) // seq_length
    for number in {0, 1, num_samples // 3, num_samples // 2, num_samples - 1}:
        excerpt = sample_excerpt(store, number, seq_length)
        assert len(excerpt.tokens) == seq_length + 1
        assert excerpt.first_token == number * seq_length
        joined = [store.document(part.document)[part.start :][: part.num_tokens] for part in excerpt.parts]
        assert np.array_equal(np.concatenate(joined), excerpt.tokens)
        assert [len(tokens) for _, tokens in excerpt.part_tokens()] == [part.num_tokens for part in excerpt.parts]
        assert all(part.origin == store.origin(part.document) for part in excerpt.parts)


def test_a_sample_passes_over_empty_documents_and_shards(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[1, 2], [], [], [3], []], vocab_size=9, shard_documents=1)
    excerpt = sample_excerpt(store, 0, 2)
    assert [(part.document, part.start, part.num_tokens) for part in excerpt.parts] == [(0, 0, 2), (3, 0, 1)]


def test_the_sources_of_a_shard_are_read_once(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    num_parsed = 0

    def parse(table: memoryview) -> Any:
        nonlocal num_parsed
        num_parsed += 1
        return orjson.loads(table)

    monkeypatch.setattr(datakit.format.origins, "orjson", SimpleNamespace(loads=parse))
    excerpt = sample_excerpt(TokenStore.open(store.path), 0, store.num_tokens - 1)
    assert len(excerpt.parts) == store.num_documents
    assert num_parsed == len(store.manifest.shards)


def test_pieces_join_to_the_text(texts: list[str], tokenizer_path: str, model_path: Path) -> None:
    for tokenizer in (open_tokenizer(tokenizer_path), open_tokenizer(model_path)):
        for ids in tokenizer.encode_batch([*texts, "the quick brown fox"]):
            found = pieces(tokenizer, ids)
            assert "".join(found) == tokenizer.decode(ids)
            assert len(found) <= max(len(ids), 1)
    byte_level = open_tokenizer(tokenizer_path)
    [ids] = byte_level.encode_batch(["the token 🦊 the"])
    assert "the" in "".join(pieces(byte_level, ids))
    assert any("🦊" in piece for piece in pieces(byte_level, ids))


def test_numbers_beyond_the_store_are_refused(store: TokenStore) -> None:
    for number in (-1, store.num_documents):
        with pytest.raises(UserError, match=f"there is no document {number}"):
            document_excerpt(store, number)
    with pytest.raises(UserError, match="has 0 samples"):
        sample_excerpt(store, 0, store.num_tokens)
    with pytest.raises(UserError, match="a sequence length of 0"):
        sample_excerpt(store, 0, 0)


def test_a_foreign_tokenizer_is_refused(store: TokenStore, tmp_path: Path, model_path: Path) -> None:
    with pytest.raises(UserError, match=f"was made with one of fingerprint {store.manifest.tokenizer.fingerprint}"):
        open_matching_tokenizer(store, str(model_path))
    nameless = write_store(tmp_path / "s", [[1]], vocab_size=9)
    with pytest.raises(UserError, match="not known"):
        open_matching_tokenizer(nameless, str(model_path))


def test_the_verb_prints_ids_text_and_sources(
    store: TokenStore, texts: list[str], tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("inspect", store.path, "--document", 305, "--tokenizer", tokenizer_path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ids"] == store.document(305).tolist()
    assert report["text"] == texts[5] + "<|endoftext|>"
    assert report["sources"][0]["path"].endswith("b.jsonl")
    assert report["sources"][0]["line"] == 6
    assert cli("inspect", store.path, "--sample", 2, "--seq-length", 50, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ids"] == store.tokens(100, 151).tolist()
    assert report["text"] == open_tokenizer(tokenizer_path).decode(report["ids"])  # by the store's own copy
    assert sum(source["num_tokens"] for source in report["sources"]) == 51
    assert cli("inspect", store.path, "--document", 5, "--ids") == 0
    output = capsys.readouterr().out
    assert "a.jsonl, line 6, byte " in output
    assert " ".join(map(str, store.document(5))) in output
    assert cli("inspect", store.path, "--document", 5, "--tokenizer", tokenizer_path) == 0
    output = capsys.readouterr().out
    assert texts[5] in output
    assert "\x1b" not in output


def test_token_borders_are_coloured_on_a_terminal(
    store: TokenStore,
    tokenizer_path: str,
    cli: Cli,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    command = ["inspect", store.path, "--document", 5, "--tokenizer", tokenizer_path]
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli(*command) == 0
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.delenv("NO_COLOR")
    assert cli(*command) == 0
    output = capsys.readouterr().out
    assert output.count(_PLAIN) == sum(output.count(colour) for colour in _COLOURS) > 1
    assert abs(output.count(_COLOURS[0]) - output.count(_COLOURS[1])) <= 1


@pytest.mark.more_faults
@pytest.mark.parametrize(
    "flags",
    [["--sample", 1], ["--seq-length", 1], ["--tokenizer", "t.json"], ["--document", 1, "--sample", 1],
     ["--document", 10**6], ["--document", 1, "--seq-length", 9], ["--document", 0, "--tokenizer", "none.json"]],
)  # fmt: skip
def test_flags_that_do_not_fit_are_one_error_and_one_hint(
    store: TokenStore, cli: Cli, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert cli("inspect", store.path, *flags) == 2
    errors = capsys.readouterr().err
    assert errors.count("error: ") == errors.count("hint: ") == 1
