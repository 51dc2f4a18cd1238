"""The datakit command: the whole way from text, reports as text and JSON, and one clear line for every bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from tests.datakit.conftest import Cli, write_jsonl


@pytest.fixture
def jsonl(tmp_path: Path, texts: list[str]) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts)


def test_from_text_to_a_verified_store(
    tmp_path: Path, jsonl: Path, texts: list[str], cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, store = tmp_path / "tok.json", tmp_path / "s"
    assert cli("train-tokenizer", jsonl, "--vocab-size", 300, "--output", tokenizer) == 0
    words = ["preprocess", jsonl, "--output", store, "--tokenizer", tokenizer, "--append-eod"]
    assert cli(*words, "--split", "0.9,0.1", "--workers", 2, "--json") == 0
    output = capsys.readouterr()
    summary = json.loads(output.out)
    assert summary["num_documents"] == len(texts)
    assert summary["mb_per_s"] > 0
    assert summary["tokens_per_s"] > 0
    last = output.err.splitlines()[-1]
    assert last.startswith("100.0%  1/1 work items, ")
    assert "/s" not in last  # one speed for the job, in the summary
    assert cli("inspect", store / "train", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_documents"] == summary["stores"][0]["num_documents"]
    assert found["num_tokens"] == sum(shard["num_tokens"] for shard in found["shards"])
    assert (found["dtype"], found["tokenizer"]["eod_id"], found["tokenizer"]["vocab_size"]) == ("uint16", 0, 300)
    assert len(found["tokenizer"]["fingerprint"]) == 32
    assert cli("inspect", store / "valid") == 0
    assert "documents" in capsys.readouterr().out
    assert cli("verify", store / "train", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "faults": []}
    assert cli("verify", store / "train") == 0
    assert "all checksums hold" in capsys.readouterr().out


def test_the_summary_is_for_people_too(
    tmp_path: Path, jsonl: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("preprocess", jsonl, "--output", tmp_path / "s", "--tokenizer", tokenizer_path) == 0
    assert "300 documents" in capsys.readouterr().out


def test_an_empty_part_of_a_split_is_named(
    tmp_path: Path, texts: list[str], tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", texts[:3])
    words = ["preprocess", few, "--tokenizer", tokenizer_path, "--output"]
    assert cli(*words, tmp_path / "a", "--split", "0.999,0.001") == 0
    assert f"{tmp_path}/a/valid has no document: of 3 none fell into its share, 0.001" in capsys.readouterr().out
    assert cli(*words, tmp_path / "b", "--split", "1,0") == 0
    assert "no document" not in capsys.readouterr().out


def test_what_was_skipped_is_told(tmp_path: Path, jsonl: Path, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl.write_bytes(jsonl.read_bytes() + b"no JSON\n" * 3)
    tokenizer, store = tmp_path / "tok.json", tmp_path / "s"
    assert cli("train-tokenizer", jsonl, "--vocab-size", 300, "--output", tokenizer, "--skip-invalid") == 0
    assert "skipped 3 invalid documents" in capsys.readouterr().err
    words = ["preprocess", jsonl, "--output", store, "--tokenizer", tokenizer, "--skip-invalid", "--skip-empty"]
    assert cli(*words, "--max-chars", 100000) == 0
    found = re.search(r"^skipped (\d+ empty, 3 invalid)$", capsys.readouterr().out, re.MULTILINE)
    assert found
    assert cli("inspect", store) == 0
    assert f"skipped      {found[1]}" in capsys.readouterr().out
    assert cli("inspect", store, "--json") == 0
    assert json.loads(capsys.readouterr().out)["skipped"]["invalid"] == 3


def test_damage_is_a_failed_check(
    tmp_path: Path, jsonl: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    cli("preprocess", jsonl, "--output", tmp_path / "s", "--tokenizer", tokenizer_path)
    [file] = (tmp_path / "s").glob("*.bin")
    content = bytearray(file.read_bytes())
    content[1000] ^= 4
    file.write_bytes(content)
    assert cli("verify", tmp_path / "s") == 1
    message = capsys.readouterr().err
    assert f"error: {file}: is damaged" in message
    assert "document " in message
    assert "hint: " in message
    assert cli("verify", tmp_path / "s", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["faults"][0]["documents"]


def test_a_damaged_manifest_is_a_failed_check_in_json_too(
    tmp_path: Path, jsonl: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    cli("preprocess", jsonl, "--output", tmp_path / "s", "--tokenizer", tokenizer_path)
    manifest = tmp_path / "s" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert cli("verify", tmp_path / "s", "--json") == 1
    output = capsys.readouterr()
    [fault] = json.loads(output.out)["faults"]
    assert fault["file"] == str(manifest)
    assert output.err.count("error: ") == 1


FAULTS = {
    "missing input": (2, "no such input"),
    "empty file": (2, "the input is empty"),
    "blank lines": (2, "the input is empty"),
    "empty texts": (2, "the input is empty"),
    "missing text key": (2, "line 301: no key 'text'; its keys: 'body'"),
    "invalid UTF-8": (2, "line 301: invalid UTF-8"),
    "invalid JSON": (2, "line 301: invalid JSON"),
    "truncated zst": (2, "is truncated"),
    "unwritable output": (3, "cannot write"),
    "missing EOD": (2, "has no token '<none>'"),
    "missing tokenizer": (2, "no such tokenizer"),
    "faulty split": (2, "do not sum to 1"),
    "split of no numbers": (2, "do not sum to 1"),
    "no split": (2, "is not a pair of fractions"),
    "empty model": (2, "none.model is empty"),
    "broken URL": (2, "'s3:/bucket/run' is not a URL"),
    "no bucket": (2, "'s3://' names no bucket"),
    "empty part of a URL": (2, "'s3://bucket/a//b' has an empty part"),
    "no workers": (2, "0 workers"),
    "faulty size": (2, "is not a size"),
    "no characters": (2, "documents of at most 0 characters"),
    "unknown flag": (2, "did you mean --append-eod?"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_is_one_error_one_hint_and_an_exit_code(
    tmp_path: Path, jsonl: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    words = {"--output": tmp_path / "s", "--tokenizer": tokenizer_path}
    source = jsonl
    good = jsonl.read_bytes()
    bad_files = {
        "empty file": b"",
        "blank lines": b"\n \n",
        "empty texts": b'{"text": ""}\n',
        "missing text key": good + b'{"body": "x"}\n',
        "invalid UTF-8": good + b'{"text": "\xff"}\n',
        "invalid JSON": good + b'{"text": "x\n',
    }
    flags: list[str] = []
    match fault:
        case "missing input":
            source = tmp_path / "none.jsonl"
        case "truncated zst":
            source = tmp_path / "b.jsonl.zst"
            source.write_bytes(zstandard.ZstdCompressor().compress(good)[:-20])
        case "unwritable output":
            words["--output"] = jsonl / "s"
        case "split of no numbers":
            flags = ["--split", "nan,nan"]
        case "empty model":
            words["--tokenizer"] = tmp_path / "none.model"
            words["--tokenizer"].touch()
        case "broken URL":
            words["--output"] = "s3:/bucket/run"
        case "no bucket":
            words["--output"] = "s3://"
        case "empty part of a URL":
            words["--output"] = "s3://bucket/a//b"
        case "missing EOD":
            flags = ["--eod-token", "<none>"]
        case "missing tokenizer":
            words["--tokenizer"] = tmp_path / "none.json"
        case "faulty split":
            flags = ["--split", "0.5,0.4"]
        case "no split":
            flags = ["--split", "0.5"]
        case "no workers":
            flags = ["--workers", "0"]
        case "faulty size":
            flags = ["--item-size", "3 bananas"]
        case "no characters":
            flags = ["--max-chars", "0"]
        case "unknown flag":
            flags = ["--apend-eod"]
        case _:
            source.write_bytes(bad_files[fault])
    code, message = FAULTS[fault]
    assert cli("preprocess", source, *(word for pair in words.items() for word in pair), *flags) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("error: ") == 1
    assert errors.count("hint: ") == 1
    assert "Traceback" not in errors


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_what_is_no_store(tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert cli(verb, tmp_path) == 2
    assert "is not a token store" in capsys.readouterr().err


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "datakit", "verify", tmp_path], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_without_a_verb_help_is_shown(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli() == 2
    assert "{train-tokenizer,preprocess,inspect,verify" in capsys.readouterr().out


def test_a_verb_that_makes_a_local_folder_refuses_a_url_as_output(
    tmp_path: Path,
    jsonl: Path,
    tokenizer_path: str,
    cli: Cli,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cli("preprocess", jsonl, "--output", tmp_path / "s", "--tokenizer", tokenizer_path)
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    assert cli("unarchive", tmp_path / "s", "--output", "s3://bucket/x") == 2
    assert "error: s3://bucket/x is not a local folder" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_a_url_is_named_as_it_was_given_where_a_local_store_is_needed(
    cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("stats", "s3://bucket/x") == 2
    expected = (
        "error: s3://bucket/x is not a local folder, and no cache is named to read it through\n"
        "hint: datakit unarchive s3://bucket/x --output STORE\n"
    )
    assert capsys.readouterr().err == expected


BAD = os.fsdecode(b"o_\xff")


@pytest.mark.parametrize("flag", ["--output", "--tokenizer", "--text-key", "--tag", "--eod-token", "INPUT"])
def test_a_command_line_that_is_not_utf8_is_refused_in_words(
    tmp_path: Path,
    tokenizer_path: str,
    cli: Cli,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "x"}\n')
    options = {"--output": "s", "--tokenizer": tokenizer_path, "--append-eod": None, flag: BAD}
    source = options.pop("INPUT", "a.jsonl")
    if flag == "--tag":
        options[flag] = f"{BAD}=a.jsonl"
    words = [word for name, value in options.items() for word in (name, value) if word is not None]
    assert cli("preprocess", source, *words) in (2, 3)
    out, err = capsys.readouterr()
    assert re.fullmatch(r"(tokenizing .*\n)?error: .*o_\\udcff.*\nhint: .+\n", err)
    assert not out
    assert not Path(BAD).exists()


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"", "the input is empty: 1 file of 0 bytes: standard input", "COMMAND > NEW.jsonl, and name that file"),
        (b'{"text": ""}\n', "the input is empty: 1 documents without any text", "COMMAND > NEW.jsonl"),
        (b'[{"text": "x"}]', "standard input is a JSON array", "COMMAND | jq -c '.[]' | datakit preprocess - ..."),
        (
            b'{"text": "\xff"}\n',
            "standard input, line 1: invalid UTF-8",
            "COMMAND | iconv -f LATIN1 -t UTF-8 | datakit",
        ),
        (b'{"text": 7}\n', "standard input, line 1: 'text' is not text but int", "--skip-invalid"),
    ],
)
def test_hints_on_standard_input_are_not_on_a_file_named_so(
    tmp_path: Path, tokenizer_path: str, content: bytes, message: str, hint: str
) -> None:
    words = ["preprocess", "-", "--output", tmp_path / "s", "--tokenizer", tokenizer_path, "--workers", "1"]
    done = subprocess.run([sys.executable, "-m", "datakit", *words], input=content, capture_output=True)
    assert done.returncode == 2
    assert f"error: {message}" in done.stderr.decode()
    assert f"hint: {hint}" in done.stderr.decode()
