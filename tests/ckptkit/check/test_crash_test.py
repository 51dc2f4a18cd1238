"""`ckptkit crash-test`: a sound place passes and is left as it was; one that loses what it acknowledged is found."""

import json
from pathlib import Path

import pytest

from ckptkit.check import crash_test as module
from ckptkit.check.crash_test import Effort, crash_test
from ckptkit.cli import main
from tests.support.printed import printed
from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage, file_systems, open_storage, trials

SMALL = Effort(num_races=2, num_kills=1, size_bytes=1 << 18)
Capture = pytest.CaptureFixture[str]


def test_a_sound_folder_passes_and_is_left_as_it_was(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    words = ("crash-test", str(tmp_path), "--races", "2", "--kills", "1", "--size-mib", "1", "--json")
    code, out, _ = printed(main, words, capsys)
    report = json.loads(out)
    assert code == 0, out
    assert report["ok"]
    assert [trial["name"] for trial in report["trials"] if not trial["ok"]] == []
    assert {"races", "kills", "rates", "flushes", "removed"} <= {trial["name"] for trial in report["trials"]}
    assert any("loss of power" in text for text in report["not_proved"])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_bucket_passes_and_is_left_as_it_was(s3_url: str, capsys: Capture) -> None:
    words = ("crash-test", s3_url, "--races", "5", "--kills", "4", "--size-mib", "12")
    code, out, err = printed(main, words, capsys)
    assert code == 0, out
    assert "10 trials, 0 failed" in out
    assert "not proved: a loss of power" in err
    assert list(open_storage(s3_url).list_keys()) == []


@pytest.mark.slow
@pytest.mark.ci
def test_a_storage_without_exclusive_writes_fails_by_name(s3_url: str) -> None:
    url = s3_url.replace("s3://", "s3a://")
    outcomes = {outcome.name: outcome for outcome in crash_test(url, SMALL)}
    assert [name for name, outcome in outcomes.items() if not outcome.ok] == ["races"]
    assert outcomes["races"].hint == trials.ONE_WRITER
    assert list(open_storage(url).list_keys()) == []


def lost(place: Storage) -> list[int]:
    return []


def damaged(*arguments: object, **options: object) -> None:
    raise CheckFailed("part-00000.safetensors is damaged")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "fault", "what"),
    [("committed_steps", lost, "step 1 was acknowledged, and is not there"), ("restore", damaged, "is damaged")],
)
def test_a_place_that_breaks_a_promise_fails(
    name: str, fault: object, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(module, name, fault)
    words = ("crash-test", str(tmp_path), "--races", "1", "--kills", "1", "--size-mib", "1")
    code, out, _ = printed(main, words, capsys)
    assert code == 1
    assert any(line.startswith("failed  kills") and what in line for line in out.splitlines())
    assert not list(tmp_path.iterdir())


def test_a_mount_that_ignores_flushes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_storage(tmp_path)
    monkeypatch.setattr(module, "mount_of", lambda _: file_systems.Mount("ext4", frozenset({"rw", "nobarrier"})))
    with pytest.raises(CheckFailed, match="mounted with nobarrier"):
        module._flushes(place)
    monkeypatch.setattr(module, "mount_of", lambda _: file_systems.Mount("tmpfs", frozenset({"rw"})))
    assert "is memory" in module._flushes(place)[0]


def test_a_test_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    outcomes = crash_test(str(tmp_path), SMALL)
    assert next(outcomes).ok
    assert list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        outcomes.throw(KeyboardInterrupt())
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    for words, message in [
        ((str(tmp_path / "missing"),), "missing does not exist"),
        ((str(tmp_path / "file"),), "is not a folder"),
        ((str(tmp_path / "step-000000100"),), "is one step"),
        (("memory://run",), "memory of one process"),
        ((str(tmp_path), "--kills", "0"), "'0' is not a whole number >= 1"),
        ((str(tmp_path), "--size-mib", "much"), "--size-mib"),
    ]:
        code, out, err = printed(main, ("crash-test", *words), capsys)
        assert (code, out) == (2, ""), err
        assert message in err
    with pytest.raises(UserError, match="is one step"):
        next(crash_test(str(tmp_path / "step-000000100")))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
