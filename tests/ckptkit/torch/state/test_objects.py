"""Optimizers of any kind, and the names of what modules hold, through ckptkit.torch in one process."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptkit.torch import Run
from ckptkit.torch.state.objects import probed_state
from tests.ckptkit.support.torch_program import make, train
from threefold.errors import UserError


class Packed(nn.Linear):
    """A layer of which state_dict has what is no memory of it: a tensor made on request, a number, an extra state."""

    def __init__(self, scales: list[float], mode: str, calls: int) -> None:
        super().__init__(2, 3)
        self.scales, self.mode, self.calls = scales, mode, calls

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.calls])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = int(state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= {f"{prefix}scales": torch.tensor(self.scales), f"{prefix}mode": self.mode}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.scales, self.mode = state_dict.pop(f"{prefix}scales").tolist(), state_dict.pop(f"{prefix}mode")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def cloning(module: nn.Module) -> nn.Module:
    def hook(_: nn.Module, state: dict[str, torch.Tensor], *rest: Any) -> None:
        state |= {name: value.detach().clone() for name, value in state.items()}

    module.register_state_dict_post_hook(hook)
    return module


def test_a_module_takes_what_its_state_dict_makes_on_request(tmp_path: Path) -> None:
    saved, fresh = Packed([1.5, 2.5], "int8", 7), Packed([0.0, 0.0], "none", 0)
    with Run(tmp_path) as run:
        run.save(1, {"model": nn.Sequential(saved), "other": cloning(nn.Linear(2, 3))})
        module, other = cloning(nn.Linear(2, 3)), cloning(nn.Linear(2, 3))
        run.load({"model": nn.Sequential(fresh)})
        assert (fresh.scales, fresh.mode, fresh.calls) == ([1.5, 2.5], "int8", 7)
        assert torch.equal(fresh.weight, saved.weight)
        run.load({"other": other})
        run.load({"other": module})
        assert torch.equal(other.weight, module.weight)


def test_what_tuples_and_lists_hold_is_filled_in_place(tmp_path: Path) -> None:
    def state_of(value: float) -> Any:
        return (nn.Linear(2, 2), [[torch.full((3,), value)], value], {"by": (torch.full((1,), value),)})

    saved, fresh = state_of(5.0), state_of(0.0)
    state = {"all": fresh, "mixed": (fresh[1][0][0].clone(), "old")}
    with Run(tmp_path) as run:
        run.save(1, {"all": saved, "mixed": (torch.ones(3), "new")})
        run.load(state)
    assert torch.equal(fresh[0].weight, saved[0].weight)
    assert (fresh[1][0][0].tolist(), fresh[1][1], fresh[2]["by"][0].tolist()) == ([5.0] * 3, 5.0, [5.0])
    assert state["all"] is fresh
    assert (state["mixed"][0].tolist(), state["mixed"][1]) == ([1.0] * 3, "new")


def test_states_of_an_optimizer_that_are_of_no_parameter_come_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saved, fresh = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    saved.state["rates"] = {"d": 0.25, "seen": torch.ones(2)}  # type: ignore[index]
    with Run(tmp_path) as run:
        run.save(1, {"model": model, "optimizer": saved})
        run.load({"model": model, "optimizer": fresh})
    rates: Any = fresh.state["rates"]  # type: ignore[index]
    assert (rates["d"], rates["seen"].tolist()) == (0.25, [1.0, 1.0])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nn.LazyLinear(2), "weight has no shape yet"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "a nested tensor"),
        (np.ma.array([1, 2], mask=[True, False]), "its data and its mask"),
    ],
)
def test_what_has_no_elements_of_its_own_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    with Run(tmp_path) as run, pytest.raises(UserError, match=message):
        run.save(1, {"value": value})


def test_an_expanded_tensor_is_not_loaded_into_and_a_step_is_a_number(tmp_path: Path) -> None:
    state = {"first": torch.zeros(2, 3), "second": torch.zeros(1, 3).expand(2, 3)}
    with Run(tmp_path) as run:
        run.save(1, {"first": torch.ones(2, 3), "second": torch.ones(1, 3).expand(2, 3)})
        with pytest.raises(UserError, match="share memory"):
            run.load(state)
        with pytest.raises(UserError, match="step '1' is not a whole number"):
            run.load(state, step="1")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="metrics are a dict"):
            run.save(2, state, metrics=[2.1])  # type: ignore[arg-type]
    assert not state["first"].any()


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "Adagrad", "NAdam", "LBFGS"])
def test_optimizers_of_any_kind_go_on(kind: str, tmp_path: Path) -> None:
    def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(7, 5).double()
        options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        x = torch.linspace(0, 1, 14, dtype=torch.float64).reshape(2, 7)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]  # type: ignore[attr-defined]

    with Run(tmp_path) as run:
        model, optimizer = model_and_optimizer()
        steps(model, optimizer)
        run.save(1, {"model": model, "optimizer": optimizer})
        expected = steps(model, optimizer)
        other, fresh = model_and_optimizer()
        run.load({"model": other, "optimizer": fresh})
    assert steps(other, fresh) == expected


@pytest.mark.ci
@pytest.mark.slow
def test_an_optimizer_that_had_no_state_gets_rid_of_it(tmp_path: Path) -> None:
    model, optimizer, scheduler = make("one")
    with Run(tmp_path) as run:
        run.save(1, {"model": model, "optimizer": optimizer})
        ahead = train(model, optimizer, scheduler, range(2))
        run.load({"model": model, "optimizer": optimizer})
        assert not optimizer.state
        assert train(*make("one"), range(2)) == ahead


@pytest.mark.ci
@pytest.mark.slow
def test_names_are_those_of_get_state_dict(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, _, _ = make("one")
    model[0] = checkpoint_wrapper(model[0])
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), range(1))
    tensors, states = get_state_dict(model, optimizer)
    with Run(tmp_path) as run:
        run.save(1, {"model": model, "optimizer": optimizer})
        fresh, other, _ = make("one")
        run.load({"model": fresh, "optimizer": other})
        run.load({"model": tensors, "optimizer": states})  # the dicts themselves
        names = {name for name in run.root(1).tensors if name.startswith("model/")}
    assert names == {f"model/{name}" for name in tensors}
    assert states["state"].keys() == tensors.keys()
    assert torch.equal(fresh[0].weight, tensors["0.weight"])


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_an_optimizer_whose_states_another_one_has_is_refused_by_its_path(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(3, 2)
        zero = import_module("torch.distributed.optim").ZeroRedundancyOptimizer
        optimizer = zero(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
        state = {"model": model, "optimizer": optimizer}
        with Run(tmp_path / "run") as run:
            run.save(1, {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.1)})
            for call in (partial(run.save, 2, state), partial(run.load, state)):
                with pytest.raises(UserError, match=r"is a ZeroRedundancyOptimizer, whose.*\nhint: shard by"):
                    call()
    finally:
        dist.destroy_process_group()


class Outer(torch.optim.Optimizer):
    """An optimizer that shows the states and groups of another one as its own, as AcceleratedOptimizer does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    state = property(lambda self: self.inner.state, lambda self, value: setattr(self.inner, "state", value))
    param_groups = property(
        lambda self: self.inner.param_groups, lambda self, value: setattr(self.inner, "param_groups", value)
    )
    defaults = property(lambda self: self.inner.defaults, lambda self, value: None)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_that_shows_another_ones_states_is_not_changed_by_what_is_made_of_them() -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    inner.step()
    before = {key: dict(state) for key, state in inner.state.items()}
    groups = inner.param_groups
    probed = probed_state(Outer(inner), groups[0], model.weight)
    assert probed.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert inner.param_groups is groups
    assert {key: dict(state) for key, state in inner.state.items()} == before
    assert inner.param_groups[0]["params"] == [*model.parameters()]
