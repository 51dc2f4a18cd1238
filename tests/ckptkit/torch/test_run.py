"""ckptkit.torch.Run in one process: any state comes back as it was, or is refused by name before anything changes."""

import dataclasses
import re
import subprocess
import sys
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptkit import CheckpointerOptions, Retention
from ckptkit import Run as AnyRun
from ckptkit.torch import Run
from tests.ckptkit.support.forged import forge
from tests.ckptkit.support.torch_program import load_at, save_at
from tests.test_guides import ROOT
from threefold.errors import CheckFailed, StorageError, UserError

pytestmark = pytest.mark.ci


def test_a_resumed_program_goes_on_bit_for_bit(tmp_path: Path) -> None:
    ahead = save_at(0, "one", str(tmp_path), 3)
    report, losses = load_at(0, "one", str(tmp_path))
    assert losses == ahead
    assert (report.step, report.missing, report.unexpected, report.ranks_without_rng) == (3, (), (), ())


VALUES: dict[str, Any] = {
    "none": None, "flag": True, "int": 2**70, "float": -0.0, "infinite": float("-inf"), "text": "a/b\ud800é",
    "bytes": b"\0\xff", "complex": 1 - 2j, "tuple": (1, (2.5, [])), "empty": {}, "": "no name",
    "keys": {0: "int", "0": "text", 1.5: "float", None: "none", "#0": "sign", "@1": "at", "a/b": 1, "a%2Fb": 2},
    "url": "s3://user:password@host/run",
    "scalars": [np.float32(1.5), np.int16(-3), np.bool_(True), np.str_("x"), np.str_("")],
    "arrays": [np.arange(6, dtype=np.int32).reshape(2, 3), np.array(7.0), np.arange(3, dtype=np.uint64),
               np.arange(4, dtype=">i2"), np.array(["a", "bc"]), np.zeros((0, 3), np.float32)],
    "tensors": [torch.arange(5), torch.tensor(2.5), torch.ones(2, 2, dtype=torch.bfloat16), torch.zeros(0, 4),
                torch.tensor([True, False]), torch.ones(2, 3, dtype=torch.complex64) * 1j,
                torch.arange(3).to(torch.uint16), torch.arange(12.0).reshape(3, 4).T[1:], torch.zeros(0, 3) * 1j,
                torch.arange(6.0)[::2], torch.ones(1).expand(3)],
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def test_values_come_back_with_their_types_and_order(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1, {"values": VALUES, "ordered": OrderedDict(b=1, a=2)})
        found: dict[str, Any] = {"values": None, "ordered": None}
        run.load(found)
    assert same(found["values"], VALUES)
    assert list(found["ordered"]) == ["b", "a"]


@pytest.mark.slow
def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    live = {"rows": torch.arange(12.0).reshape(3, 4), "complex": torch.ones(2, 2, dtype=torch.complex128) * 3j}
    with Run(tmp_path) as run:
        run.save(1, {"live": live})
        memory = torch.zeros(4, 3)
        target = {"live": {"rows": memory.T, "complex": torch.zeros(2, 2, dtype=torch.complex128)}}
        run.load(target)
    assert torch.equal(memory.T, live["rows"])
    assert torch.equal(target["live"]["complex"], live["complex"])


class Plain:
    pass


@dataclasses.dataclass
class Point:
    x: int = 1


REFUSED = [
    (Plain(), "state/deep/#1 is a .*Plain, which no checkpoint holds\nhint: pass numbers, strings"),
    (Point(), "deep/#1 is a .*Point.*\nhint: pass dataclasses.asdict"),
    (lambda: 0, "deep/#1 is a builtins.function.*\nhint: leave it out"),
    ({1, 2}, "deep/#1 is a builtins.set.*\nhint: a set has no order"),
    (Path("x"), r"deep/#1 is a pathlib(\._local)?\.PosixPath.*\nhint: pass str\(path\)"),
    (np.array([{}]), "deep/#1 is a numpy.ndarray.*\nhint: an array of objects"),
    ({(1, 2): 3}, r"deep/#1 has the key \(1, 2\) of type tuple\nhint: let keys be strings or numbers"),
    (torch.empty(2, device="meta"), "deep/#1 is a meta tensor.*\nhint: materialise it"),
    (torch.utils.data.DataLoader([1]), "deep/#1 is a .*DataLoader.*\nhint: pass what has state_dict"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[type(value).__name__ for value, _ in REFUSED])
def test_what_no_checkpoint_holds_is_refused_by_its_path(value: Any, message: str, tmp_path: Path) -> None:
    assert_refused(value, message, tmp_path / "run")


def test_an_optimizer_of_parameters_that_no_model_holds_is_refused_by_its_path(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1)
    assert_refused(optimizer, r"deep/#1: 1 of its 1 parameters .*\[3\]\nhint: pass the", tmp_path / "run")


@pytest.mark.parametrize("is_strict", [True, False])
def test_the_state_of_another_kind_of_optimizer_is_refused_and_nothing_changes(is_strict: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    adam, sgd = torch.optim.Adam(model.parameters(), 0.5), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    with Run(tmp_path) as run:
        run.save(1, {"model": model, "optimizer": adam})
        sgd.step()
        before = repr(sgd.state_dict())
        message = r"optimizer/state/weight: SGD here, another kind of optimizer in .*\nhint: make the opt"
        with pytest.raises(UserError, match=message):
            run.load({"model": model, "optimizer": sgd}, strict=is_strict)
        adam.step()
        run.save(2, {"model": model, "optimizer": adam})
        run.wait()
        message = r"optimizer/state/weight/exp_avg: SGD here, another kind of optimizer in the checkpoint"
        with pytest.raises(UserError, match=message):
            run.load({"optimizer": sgd, "model": model}, strict=is_strict)
        sgd_after = repr(sgd.state_dict())
        run.load({"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.5)})
    assert sgd_after == before


def assert_refused(value: Any, message: str, url: Path) -> None:
    with Run(url) as run:
        with pytest.raises(UserError, match=message):
            run.save(1, {"state": {"deep": [0, value]}})
        assert not url.exists()


def test_arguments_that_are_wrong_are_refused(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)
    with Run(tmp_path / "run") as run:
        for state, message in (
            ([1], "a state is a dict of names, not list"), ({1: 2}, "strings, not 1"), ({"x": itself}, "holds itself"),
            ({"rng": 1}, "keeps the random states"),
        ):  # fmt: skip
            with pytest.raises(UserError, match=message):
                run.save(1, state)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="the metric 'loss' is 'low', not a number"):
            run.save(1, {"x": 1}, metrics={"loss": "low"})  # type: ignore[dict-item]
        with pytest.raises(UserError, match="overlap=True waits"):
            run.save(1, {"x": 1}, overlap=True)
        with pytest.raises(UserError, match="step"):
            run.save(-1, {"x": 1})
        with pytest.raises((UserError, StorageError)):
            run.load({"x": 1})
    with Run(tmp_path / "run" / "step-000000001") as run, pytest.raises(UserError, match="not as its step 1"):
        run.save(1, {"x": 1})


def test_names_that_do_not_match_are_one_error_and_nothing_changes(tmp_path: Path) -> None:
    one, other = nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4))
    wide = nn.Linear(5, 4)
    before = [each.clone() for each in (*other.parameters(), *wide.parameters())]
    with Run(tmp_path) as run:
        run.save(1, {"model": one, "epoch": 3, "nested": {"a": 1, "b": 2}})
        with pytest.raises(UserError) as caught:
            run.load({"model": other, "nested": {"a": 0, "c": 0}, "else": 1})
        lines = set(map(str.strip, str(caught.value).splitlines()[1:]))
        assert lines == {
            *(f"missing in the checkpoint: {name}" for name in ("else", "model/0.weight", "model/0.bias", "nested/c")),
            *(f"not in the program: {name}" for name in ("model/weight", "model/bias", "nested/b")),
            "hint: its keys are model, epoch, nested; strict=False loads the rest and reports these",
        }
        for strict in (True, False):
            with pytest.raises(UserError, match=r"model/weight: float32 \[4, 3\] in the checkpoint, float32 \[4, 5\]"):
                run.load({"model": wide}, strict=strict)
        assert all(map(torch.equal, before, (*other.parameters(), *wide.parameters())))
        state = {"model": nn.Sequential(OrderedDict(weight=nn.Flatten())), "nested": {"a": 0, "c": 9}}
        report = run.load(state, strict=False)
    assert state["nested"] == {"a": 1, "c": 9}
    assert (report.missing, set(report.unexpected)) == (("nested/c",), {"model/weight", "model/bias", "nested/b"})


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    one, other = Tied(), Tied()
    loose = {"embed.weight": torch.zeros(5, 3), "head.weight": torch.zeros(5, 3)}
    with Run(tmp_path) as run:
        run.save(1, {"model": one})
        run.load({"model": other})
        run.load({"model": loose})
        placement = run.root(1).tensors["model/head.weight"].placement
    assert placement.tied_to == "model/embed.weight"
    assert torch.equal(other.head.weight, one.embed.weight)
    assert other.head.weight is other.embed.weight
    assert torch.equal(loose["head.weight"], one.embed.weight)


class Stream:
    def __init__(self) -> None:
        self.at = {"sample": 0, "order": torch.zeros(3)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.at)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state


@pytest.mark.slow
def test_objects_load_their_own_state(tmp_path: Path) -> None:
    stream, other = Stream(), Stream()
    stream.at = {"sample": 7, "order": torch.arange(5)}
    with Run(tmp_path) as run:
        run.save(1, {"loader": stream, "inner": {"streams": [stream]}})
        run.load({"loader": other})
    assert same(other.at, stream.at)


@pytest.mark.slow
def test_overlapped_saves_hold_the_state_before_the_step(tmp_path: Path) -> None:
    ahead = save_at(0, "one", str(tmp_path), 3, True)
    assert load_at(0, "one", str(tmp_path))[1] == ahead


@pytest.mark.slow
def test_saves_are_reported_and_pruned_and_failures_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run(tmp_path, CheckpointerOptions(retention=Retention(keep_last=2))) as run:
        for step in range(1, 5):
            run.save(step, {"x": torch.full((3,), step)}, metrics={"loss": torch.tensor(0.5), "tokens": np.int64(3)})
        assert [report.step for report in run.wait()] == [1, 2, 3, 4]
        assert run.steps() == [3, 4]
        assert {key: run.root(4).metadata[key] for key in ("loss", "tokens")} == {"loss": 0.5, "tokens": 3}
        run.save(4, {"x": torch.ones(3)})
        with pytest.raises(StorageError, match="1 of 1 saves failed:\n  step 4: "):
            run.wait()
        assert run.wait() == []
    with pytest.raises(StorageError, match="step 4"), Run(tmp_path) as run:
        run.save(4, {"x": torch.ones(3)})


@pytest.mark.slow
def test_a_damaged_step_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run(tmp_path) as run:
        for step in (1, 2):
            run.save(step, {"x": torch.full((4,), float(step))})
        run.wait()
        [data] = (tmp_path / "step-000000002").rglob("*.safetensors")
        damaged = bytearray(data.read_bytes())
        damaged[-1] ^= 1
        data.write_bytes(damaged)
        x = torch.zeros(4)
        with pytest.raises(CheckFailed):
            run.load({"x": x}, step=2)
        assert run.load({"x": x}).step == 1
        assert torch.equal(x, torch.ones(4))
    assert "falling back from step 2 to step 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    from tests.ckptkit.support.saves import SMALL, save_whole

    assert save_whole(tmp_path, 1, SMALL).ok
    with Run(tmp_path) as run, pytest.raises(UserError, match=r"was not saved by ckptkit\.torch\nhint: see"):
        run.load({"x": 1})


@pytest.mark.slow
def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; from ckptkit import *; print('torch' in sys.modules, 'ckptkit.torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"]
    for name in [name for name in sys.modules if name.startswith("ckptkit.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"^ckptkit.torch needs the package torch"):
        import_module("ckptkit.torch")


KILLED = """
import os, signal, sys, torch
from ckptkit.torch import Run
run = Run(sys.argv[1])
run.save(1, {"x": torch.ones(1000)})
run.wait()
big = torch.ones(30_000_000)
run.save(2, {"x": big})
print(run._checkpointer.writer_pid)
os.kill(run._checkpointer.writer_pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_kill_in_a_save_leaves_the_step_before(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False, cwd=ROOT)
    assert done.returncode == -9
    x = torch.zeros(1000)
    with Run(tmp_path) as run:
        assert run.load({"x": x}).step == 1
        assert x.sum() == 1000
        run.save(2, {"x": x})
    assert AnyRun(tmp_path).steps() == [1, 2]


def test_the_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    [lines] = [block for block in blocks if "from ckptkit.torch" in block]
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    assert AnyRun("own-run").root(100).metadata["val_loss"] == 2.1


def test_a_load_is_compared_with_the_certificate_by_default(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with Run(str(tmp_path)) as run:
        run.save(1, {"model": model})
        run.wait()
        assert run.load({"model": model}).num_certified == 2
        assert run.load({"model": model}, certify=False).num_certified == 0
        forge(run.storage, 1, with_sums=False, tensor="model/weight")
        run.load({"model": model}, certify=False)
        with pytest.raises(CheckFailed, match="is not equal to what was saved, by the certificate"):
            run.load({"model": model})
