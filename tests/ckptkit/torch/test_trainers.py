"""Trainers of others: what they save is a step of a run, and a run that goes on repeats one that never ended."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.cli import main
from ckptkit.torch import Run
from threefold.errors import UserError

NUM_STEPS, NUM_SAMPLES = 12, 40


class Samples(torch.utils.data.Dataset[Any]):
    """Numbers to be fitted."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum()}


class Small(nn.Module):
    """A model with dropout, whose random numbers count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layers(x).squeeze(-1)
        return {"loss": (predicted - y).square().mean(), "predicted": predicted}


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def hf_train(folder: Path, num_steps: int, save_steps: int) -> tuple[nn.Module, Path]:
    """Train by transformers, from where the run in a folder is."""
    from transformers import Trainer, TrainingArguments

    from ckptkit.torch import HfTrainerCallback

    arguments = TrainingArguments(
        str(folder / "own"), max_steps=num_steps, save_steps=save_steps, logging_steps=2, report_to=[], use_cpu=True,
        per_device_train_batch_size=4, disable_tqdm=True, learning_rate=0.05, lr_scheduler_type="constant",
    )  # fmt: skip
    model, callback = Small(), HfTrainerCallback(folder / "run")
    trainer = Trainer(model, arguments, train_dataset=Samples(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    return model, folder / "own"


@pytest.mark.slow
def test_a_trainer_of_transformers_goes_on_as_if_it_had_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers and accelerate: pip install transformers accelerate")
    pytest.importorskip("accelerate", reason="needs transformers and accelerate: pip install transformers accelerate")
    whole, _ = hf_train(tmp_path / "whole", NUM_STEPS, NUM_STEPS)
    hf_train(tmp_path / "parts", 7, 7)
    resumed, own = hf_train(tmp_path / "parts", NUM_STEPS, 5)
    assert all(map(torch.equal, parameters_of(resumed), parameters_of(whole)))
    assert not list(own.glob("checkpoint-*"))
    capsys.readouterr()
    assert main(["ls", str(tmp_path / "parts" / "run")]) == 0
    shown = capsys.readouterr().out
    assert all(f"{step}" in shown for step in (7, 10, 12))
    assert main(["verify", str(tmp_path / "parts" / "run")]) == 0


def lightning_train(folder: Path, num_steps: int, plugins: list[Any], resume: Any = None) -> nn.Module:
    """Train by Lightning, saving each fourth step."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.small = Small()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.small(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    module = Module()
    saving = ModelCheckpoint(folder / "own", every_n_train_steps=4, save_top_k=2, monitor="step", mode="max")
    trainer = pl.Trainer(
        max_steps=num_steps, plugins=plugins, callbacks=[saving], logger=False, accelerator="cpu", log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    pl.seed_everything(num_steps)
    trainer.fit(module, torch.utils.data.DataLoader(Samples(), batch_size=4), ckpt_path=resume)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_lightning_goes_on_as_from_its_own_files(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning: pip install lightning")
    from ckptkit.torch import LightningCheckpointIO

    file = "own/epoch=0-step=8.ckpt"
    lightning_train(tmp_path / "theirs", 8, [])
    expected = parameters_of(lightning_train(tmp_path / "theirs", NUM_STEPS, [], tmp_path / "theirs" / file))

    run = tmp_path / "run"
    lightning_train(tmp_path / "ours", 8, [LightningCheckpointIO(run)])
    assert list(Run(run).steps()) == [4, 8]
    assert not list((tmp_path / "ours").rglob("*.ckpt"))
    resumed = lightning_train(tmp_path / "ours", NUM_STEPS, [LightningCheckpointIO(run)], run)
    assert all(map(torch.equal, parameters_of(resumed), expected))
    assert list(Run(run).steps()) == [8, 12]  # of three steps the best two stay
    plugin = LightningCheckpointIO(tmp_path / "other")
    again = lightning_train(tmp_path / "more", NUM_STEPS, [plugin], run / "step-000000008")
    assert all(map(torch.equal, parameters_of(again), expected))
    assert LightningCheckpointIO(run).load_checkpoint(tmp_path / "ours" / file)["global_step"] == 8


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
