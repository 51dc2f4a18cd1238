"""Fallback: the newest sound step wins, damage of any kind is passed over and told, another model never is."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.loading.step_files import StepFiles
from ckptkit.runs.fallback import Candidate, first_sound, restore_newest
from ckptkit.runs.run import Run
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import ONE, SMALL, assert_restored, pieces_of, save_whole, strace
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import open_storage


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fallback")
    for step in (1, 2, 3):
        assert save_whole(folder, step, SMALL, scale=step).ok
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run of steps 1, 2 and 3, whose values are times the step."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("part-00000.safetensors", flip, "is damaged between bytes 0 and 1048576, where embed.weight"),
    ("part-00000.safetensors", cut, "part-00000.safetensors has "),
    ("part-00000.safetensors", Path.unlink, "part-00000.safetensors is missing, where embed.weight"),
    ("part-00000.index", flip, "part-00000.index is damaged"),
    ("part-00000.index", Path.unlink, "part-00000.index is missing"),
    ("root.json", flip, "root.json is "),
    ("root.json", cut, "root.json is "),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_damage_is_passed_over_and_told_in_a_line(
    run: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(next((run / "step-000000003").rglob(name)))
    pieces, lines = pieces_of(SMALL, ONE, 0), list[str]()
    root = restore_newest(str(run), pieces, tensors=SMALL, report=lines.append, sets_aside=False)
    assert root.step == 2
    expected = {key: array * 2 for key, array in values(SMALL).items()}
    assert_restored(pieces, pieces_of(SMALL, ONE, 0, expected))
    [line] = lines
    assert message in line
    assert f"{run}/step-000000003" in line
    assert line.endswith("; falling back from step 3 to step 2")
    assert "\n" not in line
    with pytest.raises(CheckFailed, match="step 2 is not tried: strict") as caught:
        restore_newest(str(run), pieces, strict=True, report=lines.append)
    assert caught.value.hint == f"ckptkit verify {run}/step-000000003"
    assert len(lines) == 1


def test_damage_that_was_passed_over_is_set_aside_and_saved_again(run: Path) -> None:
    for step in (2, 3):
        flip(next((run / f"step-00000000{step}").rglob("*.safetensors")))
    lines: list[str] = []
    assert restore_newest(str(run), pieces_of(SMALL, ONE, 0), report=lines.append).step == 1
    assert [line.partition(" of ")[0] + line.partition(" is ")[2][:9] for line in lines[2:]] == [
        "step 3set aside", "step 2set aside",
    ]  # fmt: skip
    for step in (2, 3):
        assert save_whole(run, step, SMALL, scale=step).ok
    assert restore_newest(str(run), pieces_of(SMALL, ONE, 0), report=pytest.fail).step == 3


@pytest.mark.parametrize("name", ["part-00000.safetensors", "root.json"])
def test_a_step_that_another_process_set_aside_and_saved_again_meanwhile_stays(run: Path, name: str) -> None:
    """What was found damaged is gone: the step is sound, of another attempt."""
    flip(next((run / "step-000000003").rglob(name)))
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if "falling back" in line:
            assert Run(run).quarantine(3)
            assert save_whole(run, 3, SMALL, scale=5, attempt="b").ok

    assert restore_newest(str(run), pieces_of(SMALL, ONE, 0), report=report).step == 2
    assert len(lines) == 1
    assert restore_newest(str(run), pieces_of(SMALL, ONE, 0), report=pytest.fail).step == 3


def test_where_nothing_may_be_written_damage_stays_and_that_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, step: int, attempt: str) -> bool:
        raise StorageError(f"cannot write: {step}")

    flip(next((run / "step-000000003").rglob("*.safetensors")))
    monkeypatch.setattr("ckptkit.runs.run.Run.quarantine", refuse)
    lines: list[str] = []
    assert restore_newest(str(run), pieces_of(SMALL, ONE, 0), report=lines.append).step == 2
    assert lines[1] == f"warning: step 3 of {run} is damaged and cannot be set aside: cannot write: 3"


def test_a_step_on_a_bad_disk_is_passed_over(run: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys; from tests.ckptkit.support.saves import *; from ckptkit import restore_newest;"
        "print(restore_newest(sys.argv[1], pieces_of(SMALL, ONE, 0)).step)"
    )
    path = next((run / "step-000000003").rglob("part-00000.safetensors"))
    command = [*strace("pread64:error=EIO"), "-P", str(path), sys.executable, "-c", program, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "2\n", done.stderr
    assert f"{path} cannot be read (Input/output error), where embed.weight" in done.stderr


def test_where_nothing_is_sound_the_oldest_damage_is_raised(run: Path) -> None:
    for path in run.rglob("*.safetensors"):
        flip(path)
    lines: list[str] = []
    with pytest.raises(CheckFailed, match=r"step-000000001.* is damaged"):
        restore_newest(str(run), pieces_of(SMALL, ONE, 0), report=lines.append)
    assert [line.rpartition("; ")[2] for line in lines] == [
        "falling back from step 3 to step 2",
        "falling back from step 2 to step 1",
    ]


def test_another_model_and_a_named_step_are_not_passed_over(run: Path) -> None:
    other = gpt_tensors(num_layers=4)
    with pytest.raises(UserError, match="does not fit") as caught:
        restore_newest(str(run), pieces_of(other, ONE, 0), tensors=other)
    assert not isinstance(caught.value, CheckFailed)
    flip(next((run / "step-000000003").rglob("*.safetensors")))
    with pytest.raises(CheckFailed, match="is damaged"):
        restore_newest(f"{run}/step-000000003", pieces_of(SMALL, ONE, 0))
    with pytest.raises(StorageError, match="nowhere does not exist"):
        restore_newest(str(run / "nowhere"), [])
    with pytest.raises(UserError, match="holds no committed step 4"):
        restore_newest(f"{run}/step-000000004", [])


def test_a_storage_that_is_away_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise StorageError("no answer from the server")

    monkeypatch.setattr(StepFiles, "open_part", away)
    with pytest.raises(StorageError, match="no answer"):
        restore_newest(str(run), pieces_of(SMALL, ONE, 0), report=lambda line: pytest.fail(line))
    assert open_storage(run).info("step-000000003/root.json") is not None


def test_candidates_are_tried_in_their_order() -> None:
    tried: list[tuple[str, int]] = []

    def attempt(candidate: Candidate) -> str:
        tried.append(candidate[:2])
        if candidate.url == "near":
            raise CheckFailed("it is damaged")
        return "sound"

    near, far, older = Candidate("near", 9), Candidate("far", 8), Candidate("far", 7)
    found = first_sound([near, far, older], attempt, strict=False, report=lambda line: None)
    assert found == (far, "sound", [near])
    assert tried == [("near", 9), ("far", 8)]
