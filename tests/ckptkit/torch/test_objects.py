"""Optimizers of any kind, and the names of what modules hold, through ckptkit.torch in one process."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ckptkit.torch import Run
from tests.ckptkit.support.torch_program import make, train


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "Adagrad", "NAdam", "LBFGS"])
def test_optimizers_of_any_kind_go_on(kind: str, tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
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
        model, optimizer = made()
        steps(model, optimizer)
        run.save(1, {"model": model, "optimizer": optimizer})
        expected = steps(model, optimizer)
        other, fresh = made()
        run.load({"model": other, "optimizer": fresh})
    assert steps(other, fresh) == expected


@pytest.mark.slow
def test_an_optimizer_that_had_no_state_gets_rid_of_it(tmp_path: Path) -> None:
    model, optimizer, scheduler = make("one")
    with Run(tmp_path) as run:
        run.save(1, {"model": model, "optimizer": optimizer})
        ahead = train(model, optimizer, scheduler, range(2))
        run.load({"model": model, "optimizer": optimizer})
        assert not optimizer.state
        assert train(*make("one"), range(2)) == ahead


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
