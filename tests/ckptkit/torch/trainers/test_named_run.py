"""NamedRun: a step has many names, is saved once, and goes with the last of them; Lightning is not needed for that."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.saving.options import CheckpointerOptions
from ckptkit.tiers.tier import Tier
from ckptkit.torch import Run
from ckptkit.torch.trainers.named_run import NAMES_KEY, NamedRun, StepNames, packed, unpacked
from threefold.errors import CheckFailed, UserError
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy


def state_at(step: int, **more: Any) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"weight": torch.full((3,), float(step))}, **more}


def opened(folder: Path) -> NamedRun:
    return NamedRun(folder, CheckpointerOptions())


def test_a_step_goes_with_its_last_name(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.save("best", 1, state_at(1))
    run.save("last", 1, state_at(1))
    run.save("last", 2, state_at(2))
    run.save("best-2", 2, state_at(2))
    assert run.drop("best-2")
    run.drop("best-2")
    assert not run.drop("never")
    run.close()
    assert Run(tmp_path).steps() == [1, 2]
    run.save("last", 3, state_at(3))
    run.close()
    assert Run(tmp_path).steps() == [1, 3]
    again = opened(tmp_path)  # another start
    assert [again.find(name) for name in ("best", "last", "best-2")] == [(1, {}), (3, {}), None]
    assert again.drop("best")
    assert Run(tmp_path).steps() == [3]
    again.close()


def test_what_differs_under_a_name_is_kept_with_it(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.save("first", 5, state_at(5, callbacks={"score": torch.tensor(0.5)}, loops=[1, (2,)], first=True))
    run.save("second", 5, state_at(5, callbacks={"score": torch.tensor(0.25)}, loops=[1, (2,)], second=b"a"))
    run.close()
    again = opened(tmp_path)
    first, second = (again.load(*(again.find(name) or (0, {}))) for name in ("first", "second"))
    assert first["callbacks"] == {"score": torch.tensor(0.5)}
    assert second["callbacks"] == {"score": torch.tensor(0.25)}
    assert torch.equal(first["state_dict"]["weight"], second["state_dict"]["weight"])
    assert (first["first"], "second" in first) == (True, False)
    assert (second["second"], "first" in second) == (b"a", False)
    assert first["loops"] == second["loops"] == [1, (2,)]
    again.close()


def test_a_name_keeps_its_step_until_the_next_one_is_committed(tmp_path: Path) -> None:
    names = StepNames(open_storage(str(tmp_path)))
    names.add("last", 1, {})
    names.add("best", 1, {})
    committed = {1}
    assert names.settle(committed.__contains__, None) == ([], [])
    names.add("last", 2, {"loops": 1})
    names.add("best-2", 2, {})
    names.drop("best", 2)
    assert names.settle(committed.__contains__, 2) == ([], [])
    names.write()
    for was_saved, meaning, going, left in ((False, (1, {}), [2], ["best"]), (True, (2, {"loops": 1}), [1], [])):
        again = StepNames(open_storage(str(tmp_path)))
        assert again.meaning("last", committed.__contains__) == (1, {})
        committed |= {2} if was_saved else set()
        assert again.settle(committed.__contains__, None) == (going, left)
        assert again.meaning("last", committed.__contains__) == meaning
        assert (again.meaning("best", committed.__contains__) is None) == was_saved


def test_a_step_that_is_gone_is_no_error(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.save("a", 1, state_at(1))
    run.save("b", 2, state_at(2))
    run.close()
    Run(tmp_path).remove(1)
    run.drop("a")
    assert run.find("a") is None
    run.close()


@pytest.mark.ci
@pytest.mark.slow
def test_a_step_without_a_name_stays_until_slower_tiers_have_it(
    tmp_path: Path, s3_proxy: FaultProxy, s3_url: str
) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
    run = NamedRun(tmp_path, CheckpointerOptions(tiers=(Tier(s3_url, newest=0),)))
    for step in (1, 2):
        run.save("last", step, state_at(step))
        run.run.wait()
    run.save("other", 2, state_at(2))  # the name of step 1 is over by now
    run.close()
    assert Run(tmp_path).steps() == [2]
    assert Run(s3_url).steps() == [1, 2]


def test_a_pinned_step_stays_without_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckptkit.runs.catalogue import pin

    run = opened(tmp_path)
    run.save("a", 1, state_at(1))
    run.save("b", 2, state_at(2))
    run.close()
    pin(open_storage(str(tmp_path)), 1)
    run.drop("a")
    run.close()
    assert Run(tmp_path).steps() == [1, 2]
    assert "step 1 has no name any more, and stays" in capsys.readouterr().err


def test_of_processes_that_load_the_one_that_saves_sets_damage_aside(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.save("a", 4, state_at(4))
    run.save("b", 8, state_at(8))
    run.close()
    path = next((tmp_path / "step-000000008").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    ranks = [opened(tmp_path) for _ in range(2)]
    for rank in ranks:
        assert rank.load(None)["global_step"] == 4
        assert Run(tmp_path).steps() == [4, 8], "another rank may be about to look at it"
    ranks[0].save("b", 8, state_at(8))
    for rank in ranks:
        rank.close()
    assert Run(tmp_path).steps() == [4, 8]
    assert opened(tmp_path).load(None)["global_step"] == 8


def test_a_step_of_another_training_is_seen(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.save("a", 4, state_at(4))
    assert not run.is_taken(4)
    run.close()
    assert not run.is_taken(4)
    other = opened(tmp_path)
    assert other.is_taken(4)
    other.load(None)
    assert not other.is_taken(4)
    other.save("c", 4, state_at(4))
    other.save("c", 6, state_at(6))
    other.close()
    assert Run(tmp_path).steps() == [4, 6]


def test_a_save_that_fails_takes_no_ones_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(tmp_path)
    run.save("one", 1, state_at(1))
    run.close()
    (tmp_path / "step-000000002").write_text("in the way")
    run.save("two", 2, state_at(2))
    assert run.drop("one")
    with pytest.raises(Exception, match="saves failed"):
        run.close()
    assert run.find("one") == (1, {})
    assert run.find("two") is None


@pytest.mark.parametrize(
    "value",
    [{"a": torch.tensor(1.5)}, [(1, 2), None, b"x"], {3: torch.empty(0, 2)}, torch.tensor([1 + 2j]),
     torch.ones(2, 2, dtype=torch.bfloat16), float("inf"), torch.tensor(True)],
)  # fmt: skip
def test_small_parts_come_back_as_they_were(value: Any) -> None:
    back = unpacked(json.loads(json.dumps(packed(value))))
    assert str(back) == str(value)
    assert type(back) is type(value)


def test_many_bytes_are_no_small_part() -> None:
    assert packed(torch.zeros(1 << 19)) is None


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"version": 1}', b'{"version": 1, "names": {"a": 3}, "dropped": {}}'])
def test_a_damaged_record_of_names_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / NAMES_KEY).write_bytes(text)
    with pytest.raises(CheckFailed, match=r"names\.json is damaged") as caught:
        StepNames(open_storage(str(tmp_path)))
    subprocess.run(str(caught.value.hint), shell=True, check=True)
    assert StepNames(open_storage(str(tmp_path))).steps() == set()


def test_a_record_of_names_is_read_once_more_behind_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, seen = open_storage(str(tmp_path)), open_storage(str(tmp_path))
    (tmp_path / NAMES_KEY).write_text('{"version": 1, "names": {"a": [[3, {}]]}, "dropped": {}}')
    monkeypatch.setattr(seen, "read", lambda key: b"{")
    monkeypatch.setattr(seen, "afresh", lambda: sound)
    assert StepNames(seen).steps() == {3}


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAMES_KEY).write_text('{"version": 2}')
    with pytest.raises(UserError, match="is of version 2"):
        StepNames(open_storage(str(tmp_path)))
