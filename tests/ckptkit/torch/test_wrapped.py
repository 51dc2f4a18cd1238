"""Tensors that wrap others, as torchao's do, and the random states of all GPUs that a process uses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import Run as AnyRun
from ckptkit.torch import Run
from ckptkit.torch.state import boxes
from ckptkit.torch.state.objects import rng_state, set_rng_state
from threefold.errors import UserError


class Halves(torch.Tensor):
    """A tensor that is held as two: of its even rows and of its odd ones."""

    @staticmethod
    def __new__(cls, even: torch.Tensor, odd: torch.Tensor) -> "Halves":
        shape = (2 * even.shape[0], *even.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=even.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, even: torch.Tensor, odd: torch.Tensor) -> None:
        self.even, self.odd = even, odd

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["even", "odd"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].even, args[0].odd)
        raise NotImplementedError(str(func))


def wrapped(value: float) -> nn.Module:
    module = nn.Module()
    halves = Halves(torch.full((2, 3), value), torch.full((2, 3), -value))
    module.weight = nn.Parameter(halves, requires_grad=False)
    return module


class Halving(torch.optim.SGD):
    """An optimizer whose states are such tensors."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter]["moments"] = Halves(torch.zeros(2, 3), torch.zeros(2, 3))
                self.state[parameter]["moments"].even += 1


def test_a_tensor_that_wraps_others_is_saved_as_these(tmp_path: Path) -> None:
    other = wrapped(0.0)
    with Run(tmp_path) as run:
        run.save(1, {"model": wrapped(2.0)})
        assert run.load({"model": other}).missing == ()
        with pytest.raises(UserError, match="model/weight: not a tensor in the checkpoint"):
            run.load({"model": nn.Linear(3, 4, bias=False)})
    weight: Any = other.weight
    assert (weight.even.sum(), weight.odd.sum()) == (12, -12)
    assert {"model/weight/even", "model/weight/odd"} <= AnyRun(tmp_path).root(1).tensors.keys()


def test_states_that_wrap_others_come_back_in_an_optimizer_that_did_not_step(tmp_path: Path) -> None:
    module = nn.Linear(3, 4, bias=False)
    optimizer, other = Halving(module.parameters()), Halving(module.parameters())
    for _ in range(3):
        optimizer.step()
    with Run(tmp_path) as run:
        run.save(1, {"model": module, "optimizer": optimizer}, overlap=True)
        run.load({"model": module, "optimizer": other})
    moments = other.state[module.weight]["moments"]
    assert type(moments) is Halves
    assert (moments.even == 3).all()


def test_a_scheduler_of_the_optimizer_changes_nothing_of_that(tmp_path: Path) -> None:
    module = nn.Linear(3, 4, bias=False)
    optimizer, other = Halving(module.parameters()), Halving(module.parameters())
    optimizer.step()
    torch.optim.lr_scheduler.LambdaLR(other, lambda epoch: 1.0)
    with Run(tmp_path) as run:
        run.save(1, {"model": module, "optimizer": optimizer})
        run.load({"model": module, "optimizer": other})
    moments = other.state[module.weight]["moments"]
    assert type(moments) is Halves
    assert (moments.even == 1).all()


def test_int8_weights_of_torchao_come_back(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    models = [nn.Sequential(nn.Linear(32, 16)) for _ in range(2)]
    for model in models:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    x = torch.randn(4, 32)
    with Run(tmp_path) as run:
        run.save(1, {"model": models[0]})
        run.load({"model": models[1]})
    assert torch.equal(models[0](x), models[1](x))


def test_random_states_of_all_gpus_in_use_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {number: torch.full((4,), number, dtype=torch.uint8) for number in range(3)}
    used = {0: 1, 1: 0, 2: 5}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", used.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda number=0: states[number].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, number=0: states.__setitem__(number, state))
    saved = rng_state()
    for number in states:
        states[number] = torch.zeros(4, dtype=torch.uint8)
    set_rng_state(saved)
    assert [int(states[number][0]) for number in range(3)] == [0, 0, 2]
    saved.pop("cuda_by_number")  # of an earlier version
    set_rng_state(saved)


def test_a_wrapper_inside_a_dtensor_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    halves, outer = Halves(torch.ones(2, 3), torch.ones(2, 3)), torch.ones(2, 3)
    monkeypatch.setattr(boxes, "is_dtensor", lambda tensor: tensor is outer)
    with pytest.raises(UserError, match="m/w is a DTensor of a Halves, which wraps other tensors") as caught:
        boxes.held_of("m/w", outer, halves)
    assert "save the model before quantize_(model, ...)" in str(caught.value.hint)
