"""Each benchmark writes what it measured as rows, which the page of what holds today takes."""

import argparse
import ast
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from benchmarks.record import Record, add_option, ratio, rounded
from tools.results_page import ROOT, claims, page

SCRIPTS = [path for path in sorted((ROOT / "benchmarks").rglob("*.py")) if "\nif __name__ == " in path.read_text()]
OPTION = {"add_option", "parse_arguments", "main_of", "arguments"}  # the last three are what scripts of a folder share
WRITES = {"add", "add_claim", "print_rates"}
QUICK = {
    "packing": ["benchmarks/datakit/packing.py", "--documents", "300", "--repeats", "1"],
    "save_memory": ["benchmarks/ckptkit/save_memory.py", "--mib", "2"],
    "dropout": ["-m", "benchmarks.ops.dropout", "--shape", "2x64x64", "--repeats", "1", "--dtypes", "fp32"],
}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_benchmark_has_the_option_and_writes_claims(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    records = {call.attr for call in calls if isinstance(call, ast.Attribute) and "record" in ast.unparse(call.value)}
    assert names & OPTION, "call benchmarks.record.add_option on its parser"
    assert (names | records) & WRITES, "call add of the arguments' record with what was measured"


@pytest.mark.parametrize(
    ("kit", "name"),
    [
        ("datakit", "packing"),
        ("ckptkit", "save_memory"),
        pytest.param("ops", "dropout", marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_what_a_benchmark_writes_is_what_the_page_takes(kit: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "benchmarks" / kit / "results-2031-01-02.json"
    path.parent.mkdir(parents=True)
    words = [sys.executable, *QUICK[name], f"--record={path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert path.exists(), run.stderr
    rows = claims(tmp_path)
    text = page(rows)
    for claim in rows:
        assert f"| {claim.row.claim} | **" in text
        assert claim.row.value > 0
        assert claim.row.command == " ".join(["python", *QUICK[name]])
        assert claim.row.date == date.today().isoformat()
        assert claim.row.machine.endswith("cores")
        assert claim.row.ratio is not None, "each of these has a peer or a limit"
        assert (ROOT / claim.script.relative_to(tmp_path)).exists()


def test_a_claim_of_the_same_words_is_replaced_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "results-2031-01-02.json"
    for value in (3.0, 5.0):
        Record(str(path)).add("a save", value, "GB/s", peer={"a peer": 2.0}, limit={"a copy [MB/s]": 4321.2})
        Record(str(path)).add("a load", 7.0, "GB/s", limit={"a copy [MB/s]": 4321.2, "a read": 14.0})
    save, load = json.loads(path.read_text())
    assert (save["claim"], save["value"], save["ratio"]) == ("a save", 5.0, 2.5)
    assert (load["peer"], load["limit"], load["ratio"]) == ({}, {"a copy [MB/s]": 4321, "a read": 14.0}, 0.5)


@pytest.mark.parametrize(
    ("place", "content", "message"),
    [
        ("gone/rows.json", "", "gone is not a folder"),
        ("rows.json", "{", "has no rows of claims"),
        ("rows.json", '[{"claim": "a"}]', "has no rows of claims"),
        (".", "", "has no rows of claims"),
    ],
)
def test_a_file_that_cannot_take_rows_is_refused_before_anything_is_measured(
    place: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content:
        (tmp_path / place).write_text(content)
    parser = argparse.ArgumentParser()
    add_option(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--record", str(tmp_path / place)])
    assert message in capsys.readouterr().err


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Record().add("a save", 3.0, "GB/s")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "shown"),
    [(335918.7, 335919), (4123.4, 4123), (64.25, 64.2), (32.51, 32.5), (1.7234, 1.72), (0.481, 0.48), (0.00462, 0.0046),
     (0.0, 0), (-12.34, -12.3)],
)  # fmt: skip
def test_a_value_has_the_digits_that_a_page_shows(value: float, shown: float) -> None:
    assert rounded(value) == shown


def test_a_ratio_is_to_the_first_that_can_be_compared() -> None:
    assert ratio(10.0, {"peer": 4.0, "limit": 20.0}) == 2.5
    assert ratio(10.0, {"failed": 0.0, "copy [s]": 3.0, "limit": 20.0}) == 0.5
    assert ratio(10.0, {"copy [s]": 3.0}) is None
