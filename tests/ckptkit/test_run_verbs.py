"""ls, best, pin, unpin, rm, rollback and prune as typed: tables, JSON, exit codes, one clear error for each fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.model.layout import ParallelLayout
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import SMALL, save_whole
from tests.ckptkit.test_cli import Capture, assert_refused, call
from threefold.errors import StorageError
from threefold.storage import Storage, open_storage

TENSORS = gpt_tensors(1)
VALUES = values(TENSORS)
LOSSES = {1: 4.0, 2: 2.5, 3: None, 4: 2.5, 5: 3.0}


def write_step(storage: Storage, step: int, **metadata: Any) -> None:
    write_checkpoint(storage, step, ParallelLayout(), 1, TENSORS, VALUES, metadata={"step": step} | metadata)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run of five steps; the third has no validation loss, that of the fourth was measured after the third."""
    storage = open_storage(tmp_path / "run")
    for step, loss in LOSSES.items():
        measured = {"val_loss": loss, "val_step": 3 if step == 4 else step} if loss else {}
        write_step(
            storage, step, tokens=step * 1000, loss=5.0 - step / 10, lr=3e-4, optim={"eps": 1 / step}, **measured
        )
    return storage.url


def rows(capsys: Capture, *argv: str, code: int = 0) -> Any:
    found = call(capsys, *argv, "--json")
    assert found[0] == code, found
    return json.loads(found[1])


def break_root(run: str, step: int) -> None:
    root = Path(run, f"step-{step:09d}/root.json")
    root.write_bytes(root.read_bytes()[:-20])


def test_ls_shows_what_the_roots_record(capsys: Capture, run: str) -> None:
    call(capsys, "pin", f"{run}/step-000000002", "--note", "for the paper")
    code, out, err = call(capsys, "ls", run)
    assert (code, err) == (0, "")
    head, *lines = [line.split() for line in out.splitlines()]
    assert head == [
        "step",
        "tokens",
        "loss",
        "val_loss",
        "lr",
        "layout",
        "bytes",
        "saved_at",
        "seconds",
        "pinned",
        "marks",
    ]
    assert [line[:6] for line in lines] == [
        ["1", "1,000", "4.9000", "4.0000", "0.0003", "tp1"],
        ["2", "2,000", "4.8000", "2.5000", "0.0003", "tp1"],
        ["3", "3,000", "4.7000", "-", "0.0003", "tp1"],
        ["4", "4,000", "4.6000", "2.5000@3", "0.0003", "tp1"],
        ["5", "5,000", "4.5000", "3.0000", "0.0003", "tp1"],
    ]
    assert [line[9:] for line in lines] == [[], ["pinned"], [], ["best"], ["newest"]]
    row = rows(capsys, "ls", run)[1]
    assert (row["tokens"], row["val_loss"], row["pinned"], row["note"], row["marks"]) == (
        2000, 2.5, True, "for the paper", [],
    )  # fmt: skip
    assert (row["seconds"], row["host"], row["code"]) == (None, None, None)  # an old root


def test_ls_sorts_by_a_column_and_puts_what_has_none_last(capsys: Capture, run: str) -> None:
    assert [row["step"] for row in rows(capsys, "ls", run, "--sort", "val_loss")] == [2, 4, 5, 1, 3]
    assert [row["step"] for row in rows(capsys, "ls", run, "--sort", "loss")] == [5, 4, 3, 2, 1]
    assert_refused(call(capsys, "ls", run, "--sort", "los"), 2, "did you mean loss?")


def test_ls_tells_a_damaged_root_in_its_row(capsys: Capture, run: str) -> None:
    break_root(run, 3)
    code, out, _ = call(capsys, "ls", run)
    assert code == 1
    assert "UNREADABLE: " in out.splitlines()[3]
    assert "root.json is not a checkpoint's root" in out.splitlines()[3]
    found = rows(capsys, "ls", run, "--sort", "loss", code=1)
    assert [row["step"] for row in found] == [5, 4, 2, 1, 3]
    assert "error" in found[-1]
    assert rows(capsys, "ls", f"{run}/step-000000002")[0]["step"] == 2


def test_a_save_records_when_where_and_how(capsys: Capture, tmp_path: Path) -> None:
    assert save_whole(tmp_path / "run", 7, SMALL).ok
    (row,) = rows(capsys, "ls", str(tmp_path / "run"))
    assert row["host"]
    assert row["version"].startswith("threefold ")
    assert row["saved_at"].startswith("20")
    assert row["seconds"] > 0
    _, out, _ = call(capsys, "inspect", str(tmp_path / "run"))
    assert f"host       {row['host']}" in out
    assert rows(capsys, "inspect", str(tmp_path / "run"))["saved"]["saved_at"] == row["saved_at"]
    call(capsys, "reshard", str(tmp_path / "run"), str(tmp_path / "other"))
    assert rows(capsys, "ls", str(tmp_path / "other"))[0]["saved_at"] == row["saved_at"]


def test_best_prints_the_url_of_the_step(capsys: Capture, run: str) -> None:
    assert call(capsys, "best", run)[:2] == (0, f"{run}/step-000000004\n")  # the newest of two equal ones
    assert call(capsys, "best", run, "--max")[1] == f"{run}/step-000000001\n"
    assert call(capsys, "best", run, "--metric", "optim.eps")[1] == f"{run}/step-000000005\n"
    found = rows(capsys, "best", run, "--metric", "loss")
    assert found == {"url": f"{run}/step-000000005", "step": 5, "metric": "loss", "value": 4.5}


def test_best_passes_over_steps_that_cannot_be_loaded(capsys: Capture, run: str) -> None:
    Path(run, "step-000000004/a1/part-00000.safetensors").unlink()
    code, out, err = call(capsys, "best", run)
    assert (code, out) == (0, f"{run}/step-000000002\n")
    assert "passed over" in err
    assert "part-00000.safetensors is missing" in err
    break_root(run, 2)
    assert call(capsys, "best", run)[1] == f"{run}/step-000000005\n"
    for step in (1, 5):
        Path(run, f"step-{step:09d}/a1/part-00000.index").write_bytes(b"short")
    code, _, err = call(capsys, "best", run)
    assert code == 2
    assert "part-00000.index has 5 bytes, not" in err
    assert "no step" in err


def test_best_of_a_metric_that_no_step_has(capsys: Capture, run: str, tmp_path: Path) -> None:
    there = "there are: loss, lr, step, tokens, val_loss, val_step, optim.eps"
    assert_refused(call(capsys, "best", run, "--metric", "los"), 2, "no step of", "has the metric los", there)
    assert_refused(call(capsys, "best", f"{run}/step-000000001"), 2, "is one step, not a run")
    tmp_path.joinpath("empty").mkdir()
    assert_refused(call(capsys, "best", str(tmp_path / "empty")), 2, "no committed step")


def test_pin_and_unpin(capsys: Capture, run: str) -> None:
    urls = [f"{run}/step-000000001", f"{run}/step-000000003/"]
    code, out, _ = call(capsys, "pin", *urls, "--note", "größe")
    assert (code, out) == (0, f"pinned {run}/step-000000001\npinned {run}/step-000000003\n")
    assert [row["note"] for row in rows(capsys, "ls", run)] == ["größe", None, "größe", None, None]
    assert rows(capsys, "unpin", *urls) == {"unpinned": [f"{run}/step-000000001", f"{run}/step-000000003"]}
    assert not any(row["pinned"] for row in rows(capsys, "ls", run))


def test_unpin_of_what_is_not_pinned_says_so(capsys: Capture, run: str) -> None:
    first, second = f"{run}/step-000000001", f"{run}/step-000000002"
    call(capsys, "pin", first)
    assert call(capsys, "unpin", first, second) == (0, f"unpinned {first}\n", f"{second} was not pinned\n")


def test_what_cannot_be_pinned(capsys: Capture, run: str) -> None:
    first = f"{run}/step-000000001"
    assert_refused(call(capsys, "pin", first, f"{run}/step-000000009"), 2, "holds no committed step 9")
    assert_refused(call(capsys, "pin", first, run), 2, "is not the URL of a step", f"ckptkit ls {run}")
    assert_refused(call(capsys, "pin", first, ""), 2, "an empty storage URL")
    assert_refused(call(capsys, "pin", first, "--note", "x" * 20_000), 2, "a note of 20,000 bytes")
    assert_refused(call(capsys, "pin", first, "--note", "caf\udce9"), 2, "is not UTF-8")
    assert not any(row["pinned"] for row in rows(capsys, "ls", run))


def test_prune_says_what_goes_and_why_others_stay(capsys: Capture, run: str) -> None:
    call(capsys, "pin", f"{run}/step-000000001")
    Path(run, "step-000000002/notes.txt").write_text("mine")
    flags = ("--keep-last", "1", "--keep-best", "1", "--keep-every", "10")
    out = call(capsys, "prune", run, *flags, "--dry-run")[1]
    *told, left, total = out.splitlines()
    assert [line.split(maxsplit=1) for line in told] == [
        ["1", "kept: pinned"],
        ["2", "would delete"],
        ["3", "would delete"],
        ["4", "kept: best 1 by val_loss"],
        ["5", "kept: last 1, newest good step"],
    ]
    assert left == "left alone: step-000000002/notes.txt"
    assert total.startswith(f"{run}: would delete 2 steps, 6 files, ")
    before = rows(capsys, "prune", run, *flags, "--dry-run")
    assert len(rows(capsys, "ls", run)) == 5
    after = rows(capsys, "prune", run, *flags)
    assert after == before | {"dry_run": False}
    assert after["deleted"] == [2, 3]
    assert [row["step"] for row in rows(capsys, "ls", run)] == [1, 4, 5]
    assert Path(run, "step-000000002/notes.txt").read_text() == "mine"
    assert not Path(run, "step-000000003").exists()
    assert rows(capsys, "prune", run, *flags)["deleted"] == []


def test_prune_tells_what_it_deleted_where_uploads_cannot_be_aborted(
    capsys: Capture, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def abort(*_: object, **options: object) -> None:
        raise StorageError("s3://bucket: access denied")

    monkeypatch.setattr("ckptkit.runs.debris.abort_stale_uploads", abort)
    code, out, err = call(capsys, "prune", run, "--keep-last", "2")
    assert code == 0
    assert ": deleted 3 steps" in out
    assert err == "warning: unfinished uploads are left: s3://bucket: access denied\n"


@pytest.mark.parametrize("rules", [(), ("--keep-last", "0")])
def test_prune_without_a_rule_deletes_no_step(capsys: Capture, run: str, rules: tuple[str, ...]) -> None:
    found = rows(capsys, "prune", run, *rules)
    assert found["deleted"] == []
    assert found["kept"]["1"] == ["no rule above 0 is given"]


def test_what_prune_refuses(capsys: Capture, run: str) -> None:
    assert_refused(call(capsys, "prune", run, "--keep-best", "2", "--metric", "acc"), 2, "has the metric acc")
    assert_refused(call(capsys, "prune", f"{run}/step-000000001", "--keep-last", "1"), 2, "is one step, not a run")
    assert_refused(call(capsys, "prune", run, "--keep-last", "-1"), 2, "keep-last")
    assert_refused(call(capsys, "prune", run, "--orphans-older-than", "3"), 2, "'3' is not a time such as 90m")
    assert len(rows(capsys, "ls", run)) == 5


def test_rm_says_what_goes_and_refuses_the_rest(capsys: Capture, run: str, tmp_path: Path) -> None:
    first, second, last = (f"{run}/step-{step:09d}" for step in (1, 2, 5))
    call(capsys, "pin", second)
    assert_refused(call(capsys, "rm", first, second), 2, "step 2 of", "is pinned", f"ckptkit unpin {second}")
    assert_refused(call(capsys, "rm", first, last), 2, "step 5 is the newest good step of", "--newest-too")
    assert_refused(call(capsys, "rm", run), 2, "is not the URL of a step", f"ckptkit ls {run}")
    assert_refused(call(capsys, "rm", first, f"{run}/step-000000009"), 2, "holds no committed step 9")
    write_step(open_storage(tmp_path / "other"), 1)
    other = f"{tmp_path}/other/step-000000001"
    assert_refused(call(capsys, "rm", first, other), 2, "is another run than", "one run at a time")
    assert len(rows(capsys, "ls", run)) == 5
    out = call(capsys, "rm", first, "--dry-run")[1].splitlines()
    assert out[0].split(maxsplit=1) == ["1", "would delete"]
    assert out[1].startswith(f"{run}: would delete 1 steps, 3 files, ")
    assert rows(capsys, "rm", first, last, "--newest-too")["deleted"] == [1, 5]
    assert [row["step"] for row in rows(capsys, "ls", run)] == [2, 3, 4]
    assert not Path(first).exists()


def test_rollback_and_its_undoing(capsys: Capture, run: str) -> None:
    third = f"{run}/step-000000003"
    out = call(capsys, "rollback", third, "--dry-run")[1].splitlines()
    assert [line.split(maxsplit=1) for line in out[:2]] == [["4", "would be set aside"], ["5", "would be set aside"]]
    assert out[2] == f"{run}: 2 steps after step 3 would be set aside"
    assert rows(capsys, "rollback", third)["set_aside"] == [5, 4]
    assert [row["step"] for row in rows(capsys, "ls", run)] == [1, 2, 3]
    Path(run, "step-000000004/a1/part-00000.index").unlink()
    found = rows(capsys, "rollback", third, "--undo", code=1)
    assert found["brought_back"] == [5]
    assert "part-00000.index is missing" in found["left"]["4"]
    out = call(capsys, "rollback", third, "--undo")
    assert (out[0], "left aside: " in out[1]) == (1, True)
    assert [row["step"] for row in rows(capsys, "ls", run)] == [1, 2, 3, 5]


def test_what_rollback_refuses(capsys: Capture, run: str) -> None:
    call(capsys, "pin", f"{run}/step-000000005")
    hint = f"ckptkit unpin {run}/step-000000005"
    assert_refused(call(capsys, "rollback", f"{run}/step-000000003"), 2, "step 5 of", "is pinned", hint)
    assert_refused(call(capsys, "rollback", run), 2, "is not the URL of a step", f"ckptkit ls {run}")
    assert_refused(call(capsys, "rollback", f"{run}/step-000000009"), 2, "holds no committed step 9")
    assert len(rows(capsys, "ls", run)) == 5


@pytest.mark.parametrize("verb", ["rm", "rollback"])
def test_a_step_of_a_run_that_is_not_there_is_an_error(capsys: Capture, tmp_path: Path, verb: str) -> None:
    assert_refused(call(capsys, verb, f"{tmp_path}/none/step-000000001"), 3, f"{tmp_path}/none does not exist")


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "hash", "best", "prune", "copy", "reshard"])
def test_a_place_that_is_not_there_is_an_error(capsys: Capture, tmp_path: Path, verb: str) -> None:
    target = [str(tmp_path / "target")] if verb in ("copy", "reshard") else []
    for url in (str(tmp_path / "none"), f"{tmp_path}/none/step-000000001"):
        if verb not in ("best", "prune") or url.endswith("none"):
            assert_refused(call(capsys, verb, url, *target), 3, f"{tmp_path}/none does not exist")
    (tmp_path / "file").write_bytes(b"")
    assert_refused(call(capsys, verb, str(tmp_path / "file"), *target), 3, "file is not a folder")


def test_an_empty_run_says_so(capsys: Capture, tmp_path: Path) -> None:
    assert call(capsys, "ls", str(tmp_path)) == (0, "", f"no committed step in {tmp_path}\n")
    assert_refused(call(capsys, "ls", f"{tmp_path}/step-000000001"), 2, "holds no committed step 1")
