"""What nobody meant to type to ckptkit.torch.Run and to the verbs for its steps: one clear error, nothing written."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import Run as AnyRun
from ckptkit.torch import Run
from tests.ckptkit.test_cli import Capture, assert_refused, call
from threefold.errors import UserError

LONG = 2**14_284


@pytest.mark.parametrize("value", [{"deep": [LONG]}, {"deep": {-LONG: 1}}])
def test_an_int_that_no_checkpoint_holds_is_refused_by_its_path(value: Any, tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        with pytest.raises(UserError, match=r"state/deep.* is an int of 14,285 bits, a checkpoint holds 14,284"):
            run.save(1, {"state": value})
        with pytest.raises(UserError, match=r"the metric 'n' is an int of 14,285 bits"):
            run.save(1, {"x": 1}, metrics={"n": LONG})
        with pytest.raises(UserError, match="step of 14285 bits is not a whole number"):
            run.save(LONG, {"x": 1})
        assert not (tmp_path / "run").exists()
        run.save(1, {"x": LONG - 1})
        run.wait()
        found = {"x": 0}
        run.load(found)
    assert found["x"] == LONG - 1


@pytest.mark.parametrize("kind", [Run, AnyRun])
@pytest.mark.parametrize("url", [None, 3, b"run", ["run"]])
def test_what_is_not_an_address_of_a_run_is_refused(kind: Any, url: Any) -> None:
    with pytest.raises(UserError, match=r"a run is at a folder or URL, a text or a Path, not .*\nhint: Run\("):
        kind(url)


def test_a_run_named_like_a_step_is_refused(tmp_path: Path, capsys: Capture) -> None:
    with Run(tmp_path / "run") as run:
        run.save(1, {"x": torch.ones(2)})
    message = "is neither a run nor a step: the folder of step 7 is step-000000007"
    for verb in (["copy"], ["reshard"], ["import", "--from", "dcp"]):
        assert_refused(call(capsys, *verb, str(tmp_path / "run"), f"{tmp_path}/new/step-7"), 2, message, "/new/step-")
    with Run(tmp_path / "step-7") as run, pytest.raises(UserError, match=message):
        run.save(1, {"x": 1})
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_best_lists_metrics_alone(tmp_path: Path, capsys: Capture) -> None:
    with Run(tmp_path) as run:
        run.save(1, {"x": 1}, metrics={"loss": 2.0})
    assert_refused(call(capsys, "best", str(tmp_path), "--metric", "los"), 2, "there are: loss\n")


def test_ls_of_a_folder_of_hugging_face_says_what_it_is_for(capsys: Capture) -> None:
    assert_refused(call(capsys, "ls", "hf:a model"), 2, "a folder of another program", "ckptkit import 'a model' RUN")


def test_options_and_exchange_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="options of a run are CheckpointerOptions, not str"):
        Run(tmp_path, "every 5")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="an exchange has all_gather, str has not"):
        Run(tmp_path, exchange="group")  # type: ignore[arg-type]
