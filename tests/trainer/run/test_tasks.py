"""Tasks of lm-eval: what is refused without it, and with it what its own model of the exported folder says."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.record import Record
from tests.trainer.support.training import call

SKIPPED = 'needs lm-eval and transformers: pip install "lm-eval[hf]"'


def test_a_missing_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert call("eval", tmp_path / "run", "--tasks", "hellaswag") == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: trainer eval --tasks needs the package lm_eval, which is not installed"
    assert hint.startswith(('hint: pip install "lm-eval>=', 'hint: pip install "lm_eval"'))


@pytest.mark.parametrize(
    ("flags", "text", "hint"),
    [
        (["--limit", 3], "limit needs tasks", "--tasks NAME"),
        (["--tasks-path", "here"], "tasks_path needs tasks", "--tasks NAME"),
        (["--tasks", "a", "--by", "store"], "by needs an evaluation without tasks", ""),
        (["--tasks", "a", "--set", "b"], "set needs an evaluation without tasks", ""),
        (["--tasks", "a", "--output", "{}/no/file.json"], "/no/file.json: the folder", "mkdir -p"),
    ],
)
def test_flags_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list, text: str, hint: str
) -> None:
    assert call("eval", tmp_path / "run", *(str(flag).format(tmp_path) for flag in flags)) == 2
    said = capsys.readouterr().err
    assert text in said
    assert hint in said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of short files, of which the benchmark makes all else."""
    folder = tmp_path_factory.mktemp("harness")
    files = [[f"file {number} line {line} is {line * number}" for line in range(30)] for number in range(600)]
    lines = [json.dumps({"text": "\n".join(lines) + "\n"}) for lines in files]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_says_what_the_harness_says_of_the_exported_folder(folder: Path) -> None:
    pytest.importorskip("lm_eval", reason=SKIPPED)
    pytest.importorskip("transformers", reason=SKIPPED)
    from benchmarks.trainer.lm_eval import WITHIN, compared

    rows = compared(folder, 12, 10, ["tp1", "tp2"], Record())
    assert {row[1] for row in rows} == {"tp1", "tp2"}
    for task, layout, metric, own, peer, items, requests, difference in rows:
        assert float(difference) <= WITHIN, (task, layout)
        assert own == peer, (task, layout, metric)
        assert int(requests) == int(items) * (4 if task == "demo_choice" else 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_that_the_harness_does_not_have(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason=SKIPPED)
    from benchmarks.trainer.lm_eval import prepare

    prepare(folder, 12, 10)
    for flags, text in [
        (
            ["--tasks", "demo_choise", "--tasks-path", folder / "tasks"],
            "no task demo_choise: near ones are demo_choice",
        ),
        (["--tasks", "demo_choice", "--tasks-path", folder / "none"], f"{folder}/none is not a folder of tasks"),
    ]:
        assert call("eval", folder / "run", *flags) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert text in said[-2]
        assert said[-1].startswith("hint: --tasks")
