"""`--all`: verify, copy and reshard of each step of a run, and what they say of the others without it."""

import json
from pathlib import Path

import pytest

from ckptkit.cli import main
from ckptkit.runs.catalogue import committed_steps
from tests.ckptkit.support.saves import SMALL, save_whole
from threefold.storage import open_storage

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the steps 1, 2 and 3."""
    for step in (1, 2, 3):
        assert save_whole(tmp_path / "run", step, SMALL, scale=step).ok
    return tmp_path / "run"


def call(capsys: Capture, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def damage(run: Path, step: int) -> None:
    """Change a byte of the values of a step."""
    [file] = (run / f"step-{step:09d}").rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_one_step_of_several_says_so(capsys: Capture, run: Path, tmp_path: Path) -> None:
    for verb, target in (("verify", []), ("copy", [tmp_path / "copy"]), ("reshard", [tmp_path / "other"])):
        code, out, _ = call(capsys, verb, run, *target)
        assert code == 0
        assert "; 1 of 3 steps (--all " in out.splitlines()[-1]
        code, out, _ = call(capsys, verb, run / "step-000000002", *target)
        assert code == 0
        assert "--all" not in out
    assert "--all" not in call(capsys, "verify", tmp_path / "other" / "step-000000003")[1]


def test_verify_all_is_one_report_of_all_steps(capsys: Capture, run: Path) -> None:
    code, out, _ = call(capsys, "verify", run, "--all")
    assert code == 0
    assert [line.partition(": ")[0][-1] for line in out.splitlines()[:3]] == ["1", "2", "3"]
    assert out.splitlines()[-1] == f"{run}: 3 steps, no fault"
    damage(run, 1)
    (run / "step-000000002" / "root.json").write_bytes(b"{}")
    code, out, err = call(capsys, "verify", run, "--all")
    assert code == 1
    assert out.splitlines()[-1] == f"{run}: 3 steps, 2 with faults"
    assert "step-000000002/root.json" in err
    code, out, _ = call(capsys, "verify", run, "--all", "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["unreadable"]) == (1, False, [2])
    assert [(step["step"], step["ok"]) for step in found["steps"]] == [(1, False), (3, True)]
    assert call(capsys, "verify", run)[0] == 0  # the newest one is sound


def test_all_is_of_a_run(capsys: Capture, run: Path, tmp_path: Path) -> None:
    code, _, err = call(capsys, "verify", run / "step-000000002", "--all")
    assert code == 2
    assert "is one step" in err
    code, _, err = call(capsys, "reshard", run, tmp_path / "other" / "step-000000009", "--all")
    assert code == 2
    assert "each step keeps its number" in err


def test_reshard_all_goes_past_damage(capsys: Capture, run: Path, tmp_path: Path) -> None:
    damage(run, 2)
    code, out, err = call(capsys, "reshard", run, tmp_path / "other", "--tp", 2, "--all", "--json")
    assert code == 1
    assert [report["step"] for report in json.loads(out)] == [1, 3]
    assert "step-000000002" in err
    assert committed_steps(open_storage(tmp_path / "other")) == [1, 3]
    assert call(capsys, "reshard", run, tmp_path / "third", "--tp", 2, "--all", "--dry-run")[0] == 0


def test_more_stages_than_layers_are_warned_of(capsys: Capture, run: Path, tmp_path: Path) -> None:
    code, _, err = call(capsys, "reshard", run, tmp_path / "wide", "--pp", 9)
    assert code == 0
    assert "warning: pp9 has 9 stages, and the model" in err
    assert "hold none" in err
    assert "warning" not in call(capsys, "reshard", run, tmp_path / "narrow", "--pp", 2)[2]
