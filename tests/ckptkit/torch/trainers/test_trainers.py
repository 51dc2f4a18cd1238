"""Trainers of others: a loop of Accelerate goes on as from its own files; a library that is not there is one line."""

import sys
from pathlib import Path

import pytest
import torch

from ckptkit.torch import Run
from tests.ckptkit.support.small_model import Samples, Small, parameters_of
from threefold.errors import UserError

NUM_STEPS, STOP_AT = 10, 7


def accelerated(folder: Path, num_steps: int, *, with_ckptkit: bool) -> list[torch.Tensor]:
    """Train by Accelerate, from where the files in a folder are, or the run there; return the weights."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: torch.nn.Module = Small()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": True}
    begin = STOP_AT if num_steps > STOP_AT else 0
    with Run(folder / "run") as run:
        if begin and with_ckptkit:
            run.load(state)
        elif begin:
            accelerator.load_state(str(folder / "own"))
        for number, batch in enumerate(accelerator.skip_first_batches(loader, begin), begin):
            if number == num_steps:
                break
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if with_ckptkit:
            run.save(num_steps, state)
        else:
            accelerator.save_state(str(folder / "own"))
    return parameters_of(model)


@pytest.mark.slow
def test_a_loop_of_accelerate_goes_on_as_from_its_own_files(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    ends = []
    for ours in (False, True):
        torch.manual_seed(3)
        accelerated(tmp_path, STOP_AT, with_ckptkit=ours)
        torch.manual_seed(4)  # a start has other random numbers, until it loads those of the save
        ends.append(accelerated(tmp_path, NUM_STEPS, with_ckptkit=ours))
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize(
    ("name", "package"), [("HfTrainerCallback", "transformers"), ("LightningCheckpointIO", "lightning")]
)
def test_without_the_package_it_is_one_line(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ckptkit.torch

    monkeypatch.delitem(sys.modules, f"ckptkit.torch.{ckptkit.torch.LAZY[name]}", raising=False)
    for loaded in (package, *(each for each in sys.modules if each.startswith(f"{package}."))):
        monkeypatch.setitem(sys.modules, loaded, None)
    with pytest.raises(UserError, match=f"{name} needs the package {package}, which is not installed") as caught:
        getattr(ckptkit.torch, name)
    assert caught.value.hint == f'pip install "{package}"'
