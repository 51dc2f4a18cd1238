"""What Run does around its saves and loads: damaged steps, failed saves and copies, slower tiers, saves left out."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import CheckpointerOptions, Retention, SaveReport, Tier
from ckptkit import Run as AnyRun
from ckptkit.torch import Run
from ckptkit.torch.ended import EndedSaves
from threefold.errors import StorageError, UserError

Capture = pytest.CaptureFixture[str]


def save_steps(url: Path, steps: range, options: CheckpointerOptions | None = None) -> None:
    with Run(url, options or CheckpointerOptions()) as run:
        for step in steps:
            run.save(step, {"x": torch.full((4,), float(step)), "step": step})


def flip(url: Path, step: int) -> None:
    [data] = (url / f"step-{step:09d}").rglob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)


def test_a_run_saves_again_what_it_fell_back_past(tmp_path: Path, capsys: Capture) -> None:
    save_steps(tmp_path, range(1, 6))
    for step in (3, 4, 5):
        flip(tmp_path, step)
    state: dict[str, Any] = {"x": torch.zeros(4), "step": 0}
    with Run(tmp_path) as run:
        assert run.load(state, sets_aside=False).step == 2
        assert run.newest() == 5
        assert run.load(state).step == 2
        assert run.newest() == 2
        for step in range(3, 7):
            run.save(step, state)
        assert [report.ok for report in run.wait()] == [True] * 4
    assert AnyRun(tmp_path).steps() == [1, 2, 3, 4, 5, 6]
    assert f"step 5 of {tmp_path} is set aside" in capsys.readouterr().err


def test_a_step_that_a_writer_of_an_earlier_start_committed_is_no_failure(tmp_path: Path, capsys: Capture) -> None:
    save_steps(tmp_path, range(1, 2))
    with Run(tmp_path, CheckpointerOptions(max_failed_saves=1)) as run:
        run.load({"x": torch.zeros(4)})
        save_steps(tmp_path, range(2, 3))  # as a writer does that outlived its trainer
        for step in (2, 3):
            run.save(step, {"x": torch.ones(4)})
        assert [(report.step, report.ok) for report in run.wait()] == [(2, True), (3, True)]
        assert "step 2 is saved, but it was committed by an earlier start" in capsys.readouterr().err
        run.save(1, {"x": torch.ones(4)})  # which was there when it was loaded
        with pytest.raises(StorageError, match="step 1: "):
            run.wait()
        with pytest.raises(StorageError, match="1 saves in a row failed, the last: step 1 of"):
            run.save(4, {"x": torch.ones(4)})


def test_the_last_step_goes_to_all_tiers_and_a_lost_first_one_is_no_loss(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    options = CheckpointerOptions(retention=Retention(keep_last=2), tiers=(Tier(str(slow), every=3),))
    save_steps(fast, range(1, 6), options)
    assert (AnyRun(fast).steps(), AnyRun(slow).steps()) == ([4, 5], [3, 5])
    shutil.rmtree(fast)
    state = {"x": torch.zeros(4), "step": 0}
    with Run(fast, options) as run:
        assert (run.newest(), list(run.newest_first())) == (5, [5, 3])
        assert run.load(state).step == state["step"] == 5
        assert run.load(state, step=3).step == 3
        run.load(state)
        run.save(6, state)
    assert (AnyRun(fast).steps(), AnyRun(slow).steps()) == ([6], [3, 5, 6])


def test_damage_in_one_tier_is_read_from_the_next_one(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    options = CheckpointerOptions(tiers=(Tier(str(slow)),))
    save_steps(fast, range(1, 3), options)
    flip(fast, 2)
    state = {"x": torch.zeros(4)}
    with Run(fast, options) as run:
        assert run.load(state, step=2).step == 2
        assert run.load(state).step == 2
    assert (AnyRun(fast).steps(), AnyRun(slow).steps()) == ([1], [1, 2])
    assert torch.equal(state["x"], torch.full((4,), 2.0))


def test_an_older_step_says_how_to_go_back_to_it(tmp_path: Path, capsys: Capture) -> None:
    save_steps(tmp_path, range(1, 4))
    with Run(tmp_path) as run:
        run.load({"x": torch.zeros(4)}, step=2)
        assert "step 3 is newer than 2: run.rollback(2) sets what is newer aside" in capsys.readouterr().err
        run.rollback(2)
        run.save(3, {"x": torch.zeros(4)})


def test_tiers_are_no_texts() -> None:
    with pytest.raises(UserError, match="is not a tuple of Tier"):
        CheckpointerOptions(tiers=("s3://bucket/run",))  # type: ignore[arg-type]


class Two:
    """The exchange of the first of two ranks, of which the other says what `answer` makes of this one's words."""

    rank, size = 0, 2

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data, self._answer(data)]

    def all_to_all(self, send: Any) -> Any:
        raise NotImplementedError


def test_a_save_is_left_out_on_all_ranks_if_one_is_busy(tmp_path: Path) -> None:
    exchange = Two(lambda data: data.replace(b'"is_busy": 0', b'"is_busy": 1'))
    with Run(tmp_path, CheckpointerOptions(when_busy="skip"), exchange=exchange) as run:
        run.save(1, {"x": torch.zeros(4)})
        [report] = run.wait()
    assert (report.skipped, report.error) == (True, "skipped: a save before it still runs")
    assert not AnyRun(tmp_path).steps()


REPORT = SaveReport(1, True, "", 0, 0.0, 0.0, url="here")


def ended(is_committed: bool = False) -> EndedSaves:
    return EndedSaves("here", lambda step: is_committed, is_first=True)


def test_a_copy_that_failed_is_a_warning(capsys: Capture) -> None:
    saves = ended()
    saves.add([REPORT, SaveReport(1, False, "no route", 0, 0.0, 0.0, url="there")])
    assert [report.url for report in saves.take()] == ["here", "there"]
    assert saves.num_failed == 0
    assert "warning: step 1 was not copied to there: no route" in capsys.readouterr().err


def test_failures_in_a_row_are_counted_and_what_was_not_pruned_is_said(capsys: Capture) -> None:
    saves = ended()
    failed = SaveReport(2, False, "full", 0, 0.0, 0.0, url="here")
    saves.add([failed, SaveReport(3, False, "busy", 0, 0.0, 0.0, skipped=True, url="here"), failed])
    assert (saves.num_failed, saves.last_error) == (2, "full")
    saves.add([SaveReport(4, True, "", 0, 0.0, 0.0, url="here", warning="step 1 was not pruned")])
    assert saves.num_failed == 0
    assert "step 4 is saved, but step 1 was not pruned" in capsys.readouterr().err
    with pytest.raises(StorageError, match="2 of 4 saves failed"):
        saves.take()


def test_of_a_named_step_no_newer_one_of_a_slower_tier_is_loaded(tmp_path: Path) -> None:
    options, x = CheckpointerOptions(tiers=(Tier(str(tmp_path / "slow")),)), torch.zeros(2)
    with Run(tmp_path / "run", options) as run:
        for step in (1, 2):
            run.save(step, {"x": x.fill_(step)})
    named = Run(tmp_path / "run" / "step-000000001", options)
    assert list(named.newest_first()) == [1]
    assert named.load({"x": x}).step == 1
    assert (x == 1).all()
    shutil.rmtree(tmp_path / "run" / "step-000000001")  # the slower tier has it
    assert list(named.newest_first()) == [1]
    assert named.load({"x": x.zero_()}).step == 1
    assert (x == 1).all()
