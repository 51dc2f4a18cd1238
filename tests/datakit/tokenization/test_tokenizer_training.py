"""Training a tokenizer: repeatable, lossless for any text, clear about what is missing."""

import json
from pathlib import Path
from typing import get_args

import pytest

from datakit.tokenization.tokenizer import DEFAULT_EOD, open_tokenizer
from datakit.tokenization.tokenizer_training import Pretokenizer, TokenizerTraining, train_tokenizer
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


STRANGE = ["", "\0\x7f", "never seen: ☃ 日本語 カタ", "\n\n  \t x", "12345 3.14, don't!", "<|user|>hi"]


@pytest.mark.parametrize("pretokenizer", get_args(Pretokenizer))
def test_no_pretokenizer_loses_anything(tmp_path: Path, texts: list[str], pretokenizer: str) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", [*texts, "the year 2026 and 2025", "the year 2026 and 2025"]))
    training = TokenizerTraining(vocab_size=420, pretokenizer=pretokenizer, special_tokens=("<|user|>", "<|end|>"))
    done = training.train([source], str(tmp_path / "t.json"), lambda _: None)
    tokenizer = done.tokenizer
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(STRANGE)] == STRANGE
    assert [tokenizer.token_id(token) for token in (DEFAULT_EOD, "<|user|>", "<|end|>")] == [0, 1, 2]
    assert tokenizer.encode_batch(["<|user|>"])[0].tolist() == [1]
    if pretokenizer == "digits":
        assert len(tokenizer.encode_batch(["2026"])[0]) == 4


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--special-token", "<|endoftext|>"], "'<|endoftext|>' is named twice"),
        (["--special-token", ""], "without a character"),
        (["--pretokenizer", "bytelevel"], "did you mean byte-level?"),
        (["--max-bytes", "0"], "'0' is not a whole number >= 1"),
    ],
)
def test_wrong_choices(tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str], flags: list, fault: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["some text"])
    assert cli("train-tokenizer", source, "--vocab-size", 300, "--output", tmp_path / "t.json", *flags) == 2
    assert fault in capsys.readouterr().err


def test_a_report_for_programs(tmp_path: Path, cli: Cli, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    flags = ("--vocab-size", 300, "--output", tmp_path / "t.json", "--max-bytes", 2000, "--json")
    assert cli("train-tokenizer", source, *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["text_bytes"] <= 2000
    assert 0 < found["num_documents"] < len(texts)
    assert found["fingerprint"] == open_tokenizer(tmp_path / "t.json").fingerprint


def test_progress_is_shown_while_it_lasts(tmp_path: Path, texts: list[str]) -> None:
    shown: list[tuple[str, float]] = []
    source = str(write_jsonl(tmp_path / "a.jsonl", texts * 20))
    training = TokenizerTraining(vocab_size=400)
    output, show = str(tmp_path / "t.json"), lambda text, share: shown.append((text, share))
    training.train([source], output, lambda _: None, show, every_s=0.001)
    shares = [share for _, share in shown]
    assert shares == sorted(shares)
    assert shares[-1] <= 1.0
    assert {text.split()[0].rstrip(",") for text, _ in shown} <= {"reading", "merging"}
