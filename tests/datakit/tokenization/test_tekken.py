"""tekken.json: special tokens have the first ids, ranks follow them, and names of special tokens in a text are text."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from datakit.store.token_store import TokenStore
from datakit.tokenization.encoder import PROBE, choose_backend, open_encoder
from datakit.tokenization.rank_file import TEKKEN_PATTERN
from datakit.tokenization.tokenizer import open_tokenizer
from tests.datakit.conftest import Cli, ranks_of, write_jsonl
from threefold.errors import UserError

NUM_SPECIAL, NUM_LEFT_OUT = 30, 9


@pytest.fixture
def raw(tokenizer_path: str) -> dict[str, Any]:
    """What such a file says: 30 special tokens, and nine tokens more than the vocabulary's size counts."""
    ranks = ranks_of(tokenizer_path)
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {
        "pattern": TEKKEN_PATTERN, "num_vocab_tokens": len(vocab), "version": "v3",
        "default_vocab_size": len(vocab) - NUM_LEFT_OUT + NUM_SPECIAL, "default_num_special_tokens": NUM_SPECIAL,
    }  # fmt: skip
    return {"config": config, "vocab": vocab, "version": 1, "type": "Tekken"}


def write(path: Path, raw: dict[str, Any]) -> Path:
    path.write_text(json.dumps(raw))
    return path


def test_ids_are_ranks_behind_the_special_tokens(tmp_path: Path, raw: dict[str, Any], texts: list[str]) -> None:
    path = write(tmp_path / "tekken.json", raw)
    tokenizer = open_tokenizer(path)
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in raw["vocab"][:-NUM_LEFT_OUT]}
    library = tiktoken.Encoding("ranks", pat_str=TEKKEN_PATTERN, mergeable_ranks=ranks, special_tokens={})
    texts = [*PROBE, *texts, "a<s> [INST]b</s>"]
    expected = [[NUM_SPECIAL + rank for rank in library.encode(text, disallowed_special=())] for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert (tokenizer.kind, tokenizer.vocab_size) == ("tiktoken", len(ranks) + NUM_SPECIAL)
    names = [tokenizer.token_id(name) for name in ("<unk>", "<s>", "</s>", "[TOOL_CONTENT]", "<SPECIAL_20>")]
    assert names == [0, 1, 2, 19, 20]
    assert tokenizer.decode([1, 2]) == "<s></s>"
    choice = choose_backend("auto", str(path), tokenizer, texts)
    assert choice.backend == "gigatoken", choice.reason
    found = open_encoder(path, choice.backend, choice.terms).encode_batch(texts)
    assert [ids.tolist() for ids in found] == expected


def test_special_tokens_of_the_file_and_ends_of_documents(tmp_path: Path, raw: dict[str, Any], cli: Cli) -> None:
    raw["config"]["version"] = "v11"
    raw["special_tokens"] = [
        {"rank": number, "token_str": name, "is_control": True} for number, name in enumerate(["<unk>", "<end>"])
    ]
    path, source = write(tmp_path / "t.json", raw), write_jsonl(tmp_path / "a.jsonl", ["the <end>", "store"])
    flags = ["--tokenizer", path, "--append-eod", "--eod-token", "<end>"]
    assert cli("preprocess", source, "--output", tmp_path / "s", *flags) == 0
    store, tokenizer = TokenStore.open(tmp_path / "s"), open_tokenizer(path)
    assert tokenizer.token_id("<SPECIAL_2>") == 2
    assert [tokenizer.decode(store.document(n)) for n in range(2)] == ["the <end><end>", "store<end>"]
    assert store.document(0).tolist().count(1) == 1


def change(raw: dict[str, Any], place: str, value: object) -> None:
    *path, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    for key in path:
        raw = raw[key]
    raw[last] = value


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        ("config.version", "v13", 'it has no "special_tokens", which version v13 needs'),
        ("config.default_num_special_tokens", 3, r"special_tokens\[3\]: '\[INST\]' with the rank 3, of 3"),
        ("config.default_vocab_size", 9000, r"vocab has \d+ tokens, 8970 are needed"),
        ("config.pattern", None, "config.pattern must be of type str, not None"),
        ("vocab.7.rank", 8, r"vocab\[7\]: .* with the rank 8 is empty, there twice or astray"),
        ("vocab.7.token_bytes", "?", r"vocab\[7\].token_bytes is not base64: '\?'"),
        ("vocab.0.token_bytes", "AAAAAA==", "vocab has no token for the byte 0x"),
        ("special_tokens", [{"rank": 1, "token_str": "x"}], "special_tokens: 1 tokens are not numbered from 0"),
        ("special_tokens", [{"rank": 0}], "there is no 'token_str'"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path, raw: dict[str, Any], place: str, value: object, fault: str
) -> None:
    change(raw, place, value)
    with pytest.raises(UserError, match=rf"tekken.json: {fault}"):
        open_tokenizer(write(tmp_path / "tekken.json", raw))


def test_more_special_tokens_than_any_file_has_are_refused_before_they_are_made(
    tmp_path: Path, raw: dict[str, Any]
) -> None:
    raw["config"] |= {"default_num_special_tokens": 2**31 - 4, "default_vocab_size": 2**31 - 3}
    with pytest.raises(UserError, match=r"2,147,483,644 special tokens, at most 65,536 are read"):
        open_tokenizer(write(tmp_path / "tekken.json", raw))
