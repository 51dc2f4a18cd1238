"""Rank files: known ones by their content, others by their sidecar; every kind of damage is told with its line."""

import base64
import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Library

from datakit.reports.excerpt import pieces
from datakit.store.token_store import TokenStore
from datakit.tokenization import rank_file
from datakit.tokenization.encoder import PROBE, choose_backend
from datakit.tokenization.fast_encoder import SPLITTERS, GigatokenEncoder
from datakit.tokenization.rank_file import (
    CL100K_PATTERN,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    Encoding,
    is_rank_file,
    read_rank_file,
    sidecar_path,
)
from datakit.tokenization.tokenizer import DEFAULT_EOD, TextFault, open_tokenizer
from tests.datakit.conftest import Cli, ranks_of, write_jsonl, write_ranks
from threefold.errors import UserError

BYTES = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]


def test_ids_are_those_of_tokenizers_with_the_same_merges(
    tokenizer_path: str, rank_path: Path, texts: list[str]
) -> None:
    ranks, library = open_tokenizer(rank_path), Library.from_file(tokenizer_path)
    texts = [*texts, *PROBE, "a<|endoftext|> <|endoftext|>"]
    # token 0 of the trained file is the end of documents, in the rank file it comes last
    shifted = [[399 if token == 0 else token - 1 for token in library.encode(text).ids] for text in texts]
    assert [ids.tolist() for ids in ranks.encode_batch(texts)] == shifted
    assert [ranks.decode(ids) for ids in ranks.encode_batch(texts)] == texts
    assert (ranks.kind, ranks.vocab_size) == ("tiktoken", 400)
    assert (ranks.token_id(DEFAULT_EOD), ranks.token_id("nothing"), ranks.added_tokens()) == (399, None, [DEFAULT_EOD])
    assert ranks.token_id("a") == ranks.encode_batch(["a"])[0][0]
    assert "".join(pieces(ranks, ranks.encode_batch(["größe 列車 🙂"])[0])) == "größe 列車 🙂"


@pytest.mark.parametrize("pattern", list(SPLITTERS))
def test_the_fast_engine_splits_as_the_pattern(
    tmp_path: Path, tokenizer_path: str, texts: list[str], pattern: str
) -> None:
    path = write_ranks(tmp_path / "a.tiktoken", ranks_of(tokenizer_path), pattern, {DEFAULT_EOD: 399})
    reference = open_tokenizer(path)
    assert choose_backend("auto", str(path), reference, texts).backend == "gigatoken"
    fast = GigatokenEncoder(path).encode_batch([*PROBE, *texts])
    assert [ids.tolist() for ids in fast] == [ids.tolist() for ids in reference.encode_batch([*PROBE, *texts])]


def test_a_pattern_of_ones_own_goes_to_tiktoken(tmp_path: Path, tokenizer_path: str, texts: list[str]) -> None:
    path = write_ranks(tmp_path / "a.tiktoken", ranks_of(tokenizer_path), r"\w+|\W", {})
    choice = choose_backend("auto", str(path), open_tokenizer(path), texts)
    assert choice.backend == "tiktoken"
    assert "does not split text by the pattern" in choice.reason
    library = Library.from_file(tokenizer_path)
    split = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    found = [ids.tolist() for ids in open_tokenizer(path).encode_batch(texts)]
    assert found == [[token - 1 for token in library.encode(text).ids] for text in texts]


@pytest.mark.ci
@pytest.mark.slow
def test_a_store_is_the_same_with_both_backends_and_shows_its_text(
    tmp_path: Path, rank_path: Path, texts: list[str], cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts, "in <|endoftext|> text"])
    for backend in ("auto", "tiktoken", "gigatoken"):
        flags = ["--tokenizer", rank_path, "--tokenizer-backend", backend, "--append-eod"]
        assert cli("preprocess", source, "--output", tmp_path / backend, *flags) == 0
    stores = [TokenStore.open(tmp_path / backend) for backend in ("auto", "tiktoken", "gigatoken")]
    assert len({store.fingerprint for store in stores}) == 1
    assert stores[0].manifest.tokenizer.kind == "tiktoken"
    assert stores[0].document(len(texts)).tolist().count(399) == 2
    assert cli("inspect", tmp_path / "auto", "--document", 5, "--tokenizer", rank_path, "--json") == 0
    assert texts[5] in json.loads(capsys.readouterr().out)["text"]
    sidecar_path(rank_path).write_text(json.dumps({"pattern": CL100K_PATTERN, "special_tokens": {DEFAULT_EOD: 399}}))
    assert cli("inspect", tmp_path / "auto", "--document", 5, "--tokenizer", rank_path) == 2
    assert "has fingerprint" in capsys.readouterr().err


def test_the_fingerprint_covers_ranks_pattern_and_special_tokens(tmp_path: Path, tokenizer_path: str) -> None:
    ranks = ranks_of(tokenizer_path)
    fewer = dict(list(ranks.items())[:-1])
    variants = [
        (ranks, GPT2_PATTERN, {DEFAULT_EOD: 399}),
        (fewer, GPT2_PATTERN, {DEFAULT_EOD: 399}),
        (ranks, CL100K_PATTERN, {DEFAULT_EOD: 399}),
        (ranks, GPT2_PATTERN, {DEFAULT_EOD: 400}),
        (ranks, GPT2_PATTERN, {"</s>": 399}),
    ]
    found = [open_tokenizer(write_ranks(tmp_path / "a.tiktoken", *variant)).fingerprint for variant in variants]
    assert len(set(found)) == len(variants)
    assert open_tokenizer(write_ranks(tmp_path / "b.tiktoken", *variants[0])).fingerprint == found[0]


def test_a_known_file_needs_no_sidecar_but_obeys_one(
    tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_ranks(tmp_path / "any.tiktoken", ranks_of(tokenizer_path), GPT2_PATTERN, {"<|mine|>": 399})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(rank_file._PUBLISHED, digest, Encoding(CL100K_PATTERN, {DEFAULT_EOD: 500}))
    assert open_tokenizer(path).added_tokens() == ["<|mine|>"]
    sidecar_path(path).unlink()
    assert (open_tokenizer(path).token_id(DEFAULT_EOD), open_tokenizer(path).vocab_size) == (500, 501)
    monkeypatch.delitem(rank_file._PUBLISHED, digest)
    with pytest.raises(UserError, match="must say how its text is split") as caught:
        open_tokenizer(path)
    assert str(sidecar_path(path)) in str(caught.value.hint)


def test_a_model_of_ranks_is_told_from_sentencepiece(
    tmp_path: Path, tokenizer_path: str, model_path: Path, rank_path: Path
) -> None:
    path = write_ranks(tmp_path / "tokenizer.model", ranks_of(tokenizer_path), GPT2_PATTERN, {DEFAULT_EOD: 399})
    assert open_tokenizer(path).kind == "tiktoken"
    assert choose_backend("auto", str(path), open_tokenizer(path), []).backend == "gigatoken"
    assert open_tokenizer(path).fingerprint == open_tokenizer(rank_path).fingerprint
    assert not is_rank_file(model_path, model_path.read_bytes())
    sidecar_path(path).unlink()
    with pytest.raises(UserError, match="is a rank file of unknown origin"):
        open_tokenizer(path)


def test_a_special_token_may_fill_a_hole(tmp_path: Path) -> None:
    lines = [*BYTES, base64.b64encode(b"ab") + b" 257"]
    (tmp_path / "a.tiktoken").write_bytes(b"\n".join(lines))
    sidecar_path(tmp_path / "a.tiktoken").write_text(json.dumps({"pattern": r"\s|\S+", "special_tokens": {"#": 256}}))
    assert open_tokenizer(tmp_path / "a.tiktoken").encode_batch(["ab#\nab"])[0].tolist() == [257, 256, 10, 257]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([*BYTES, b"YWI="], "line 257: b'YWI=' is not a token in base64 and its rank"),
        ([*BYTES, b"YWI 256"], "line 257: .* is not a token in base64"),
        ([*BYTES, b"Y*I= 256"], "line 257: .* is not a token in base64"),
        ([*BYTES, b"YWI= -1"], "line 257: .* is not a token in base64"),
        ([*BYTES, b"YWI= 99999999999"], "line 257: .* is not a token in base64"),
        ([*BYTES, b"YWI= 4294967295"], "line 257: .* is not a token in base64"),
        ([*BYTES, b"", b" 256"], "line 258: a token of no bytes"),
        ([*BYTES, b"YWI= 7"], "line 257: rank 7 was given in line 8 already"),
        ([*BYTES, b"YWI= 256", b"YWI= 257"], "line 258: the token b'ab' was given in line 257 already"),
        ([*BYTES, b"YWI= 256", b"YWM= 300"], "line 258: rank 300 is the id of the special token '#'"),
        ([*BYTES, b"YWI= 256", b"YWM= 259"], "line 258: before rank 259 there is no token of rank 257"),
        ([*BYTES, b"YWI= 2147483000"], "line 257: before rank 2147483000 there is no token of rank 256"),
        (BYTES[:-1], "no token for the byte 0xff"),
        ([], "no token for the byte 0x00"),
        ([b"\x0a\x07\x00junk"], "line 2: .* is not a token in base64"),
    ],
)
def test_damage_is_named_by_its_line(tmp_path: Path, lines: list[bytes], fault: str) -> None:
    path = tmp_path / "a.tiktoken"
    path.write_bytes(b"\n".join(lines))
    sidecar_path(path).write_text(json.dumps({"pattern": GPT2_PATTERN, "special_tokens": {"#": 300}}))
    with pytest.raises(UserError, match=fault):
        read_rank_file(path, path.read_bytes())


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"{", "unexpected end"),
        (b"[]", 'an object of "pattern" and "special_tokens"'),
        (b'{"pattern": ".", "tokens": {}}', 'an object of "pattern" and "special_tokens"'),
        (b'{"pattern": ""}', "must be a regular expression"),
        (b'{"pattern": ".", "special_tokens": []}', "must be an object of tokens and ids"),
        (b'{"pattern": ".", "special_tokens": {"a": true}}', "'a' has the id True"),
        (b'{"pattern": ".", "special_tokens": {"a": 2147483647}}', "has the id 2147483647"),
        (b'{"pattern": ".", "special_tokens": {"": 300}}', "'' has the id 300"),
        (b'{"pattern": ".", "special_tokens": {"a": 300, "b": 300}}', "'a' and 'b' both have the id 300"),
        (b'{"pattern": "("}', "tiktoken cannot split text by the pattern '\\('"),
        (b'{"pattern": "[a-z]+"}', "leaves out parts of the text"),
    ],
)
def test_faulty_sidecars(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "a.tiktoken"
    path.write_bytes(b"\n".join(BYTES))
    sidecar_path(path).write_bytes(content)
    with pytest.raises(UserError, match=fault):
        open_tokenizer(path)


def test_sizes_are_capped(tmp_path: Path, rank_path: Path) -> None:
    os.truncate(sidecar_path(rank_path), rank_file.MAX_SIDECAR_BYTES + 1)  # zeros that take no disk
    with pytest.raises(UserError, match=f"is larger than {4 << 20} bytes"):
        open_tokenizer(rank_path)
    os.truncate(rank_path, rank_file.MAX_RANK_FILE_BYTES + 1)
    with pytest.raises(UserError, match=f"more than a rank file's {32 << 20}"):
        open_tokenizer(rank_path)


def test_the_sidecar_in_the_guide_is_llama_3s(tmp_path: Path, tokenizer_path: str) -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/preprocess.md").read_text()
    path = write_ranks(tmp_path / "tokenizer.model", ranks_of(tokenizer_path), GPT2_PATTERN, {})
    sidecar_path(path).write_text(guide.split("<<'END'")[1].split("\n", 1)[1].split("\nEND")[0])
    encoding = read_rank_file(path, path.read_bytes()).encoding
    assert encoding == Encoding(LLAMA3_PATTERN, {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001})


def test_without_tiktoken_the_error_says_what_to_install(rank_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UserError, match="reading ranks needs the package tiktoken") as caught:
        open_tokenizer(rank_path)
    assert caught.value.hint == 'pip install "tiktoken>=0.9"'


def test_a_text_that_tiktoken_cannot_take_is_named(
    tmp_path: Path, rank_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " " * 1_100_000 + "x"  # its regex engine has a stack of a million
    with pytest.raises(TextFault, match="gives up on a text of 1,100,001 characters") as caught:
        open_tokenizer(rank_path).encode_batch(["fine", long])
    assert caught.value.number == 1
    source = write_jsonl(tmp_path / "a.jsonl", ["fine", long])
    flags = ["--tokenizer", rank_path, "--output", tmp_path / "store"]
    assert cli("preprocess", source, *flags, "--tokenizer-backend", "tiktoken") == 2
    assert "a.jsonl, the document at byte 26: tiktoken gives up" in capsys.readouterr().err
    assert cli("preprocess", source, *flags) == 0  # gigatoken takes it
    assert TokenStore.open(tmp_path / "store").num_documents == 2


def test_ids_of_no_token_cannot_be_decoded(rank_path: Path) -> None:
    with pytest.raises(UserError, match=r"ranks\.tiktoken: .*400"):
        open_tokenizer(rank_path).decode([400])
