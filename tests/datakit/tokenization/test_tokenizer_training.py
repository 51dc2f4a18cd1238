"""Training a tokenizer: repeatable, lossless for any text, clear about what is missing."""

from pathlib import Path

import pytest

from datakit.tokenization.tokenizer import DEFAULT_EOD, open_tokenizer
from datakit.tokenization.tokenizer_training import train_tokenizer
from tests.datakit.conftest import Cli, write_jsonl
from threefold.errors import UserError


def test_training_repeats_and_loses_nothing(tmp_path: Path, texts: list[str]) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", texts))
    for name in ("x.json", "y.json"):
        train_tokenizer([source], str(tmp_path / name), vocab_size=500)
    assert (tmp_path / "x.json").read_bytes() == (tmp_path / "y.json").read_bytes()
    tokenizer = open_tokenizer(tmp_path / "x.json")
    assert tokenizer.token_id(DEFAULT_EOD) == 0
    strange = ["", "\0\x7f", "never seen: ☃ 日本語", "\n\n  \t x"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(strange)] == strange


def test_the_eod_token_can_be_chosen(tmp_path: Path, texts: list[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts, key="body")
    tokenizer = train_tokenizer(
        [str(tmp_path)], str(tmp_path / "t.json"), vocab_size=300, eod_token="</s>", text_key="body"
    )
    assert (tokenizer.token_id("</s>"), tokenizer.token_id(DEFAULT_EOD)) == (0, None)


def test_a_small_text_gives_fewer_tokens_and_says_so(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("tiny text")
    assert cli("train-tokenizer", tmp_path, "--vocab-size", 5000, "--output", tmp_path / "t.json") == 0
    assert "not 5000" in capsys.readouterr().err
    assert open_tokenizer(tmp_path / "t.json").vocab_size < 300


@pytest.mark.parametrize(
    ("content", "vocab_size", "output", "fault"),
    [
        (b'{"text": "x"}\n', 256, "t.json", "vocabulary of 256"),
        (b'{"text": "x"}\n', 300, "t.model", "ends in .json"),
        (b"\n\n", 300, "t.json", "the input is empty"),
        (b'{"body": "x"}\n', 300, "t.json", "no key 'text'"),
        (b'{"text": "\xff"}\n', 300, "t.json", "invalid UTF-8"),
    ],
)
def test_faults(tmp_path: Path, content: bytes, vocab_size: int, output: str, fault: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=fault):
        train_tokenizer([str(tmp_path / "a.jsonl")], str(tmp_path / output), vocab_size=vocab_size)
    assert not (tmp_path / output).exists()


def test_a_url_as_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n')
    with pytest.raises(UserError, match=r"s3://bucket/t.json is not a local file"):
        train_tokenizer(["a.jsonl"], "s3://bucket/t.json", vocab_size=300)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
