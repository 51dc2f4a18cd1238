"""LightningCheckpointIO: every option of ModelCheckpoint has the result that Lightning's own files have, the oracle."""

import os
import shutil
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import CheckpointerOptions, Retention
from ckptkit.cli import main
from ckptkit.torch import Run
from tests.ckptkit.support.small_model import Samples, Small, damage, parameters_of
from threefold.errors import CheckFailed, UserError

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")

STEPS_A_EPOCH = 5
SCORES = [0.5, 0.1, 0.3, 0.4, 0.05, 0.6, 0.7, float("nan"), 0.2, 0.9] * 9
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    """The small model; its validation scores are a list, and `fails_at` is a step that raises."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.small, self.fails_at = Small(), fails_at

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("planned")
        self.log("train", float(self.global_step % 3))
        return self.small(**batch)["loss"]

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.log("val/score", SCORES[self.global_step // STEPS_A_EPOCH - 1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)}


def trainer_of(folder: Path, options: list[dict[str, Any]], *, with_ckptkit: bool, **named: Any) -> Any:
    from ckptkit.torch import LightningCheckpointIO

    saving = [callbacks.ModelCheckpoint(**{"dirpath": folder / "own", **each}) for each in options]
    return lightning.Trainer(
        plugins=[LightningCheckpointIO(folder / "run")] if with_ckptkit else [], callbacks=saving, logger=False,
        accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        default_root_dir=folder, **{"max_epochs": 6, **named},
    )  # fmt: skip


def fitted(
    folder: Path,
    options: list[dict[str, Any]],
    *,
    with_ckptkit: bool,
    fails_at: int = -1,
    resume: Any = None,
    **named: Any,
) -> Any:
    trainer, module = trainer_of(folder, options, with_ckptkit=with_ckptkit, **named), Module(fails_at)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=8)
    torch.manual_seed(7)
    with pytest.raises(RuntimeError, match="planned") if fails_at >= 0 else nullcontext():
        trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer


def names_in(folder: Path) -> dict[str, str | None]:
    """Return the files that are there, and of links where they lead."""
    paths = sorted(path for path in (folder / "own").rglob("*") if not path.is_dir())
    return {str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else None for path in paths}


def shown(folder: Path, trainer: Any) -> list[Any]:
    """Return what each ModelCheckpoint says of itself, its paths without the folder."""
    states = [each.state_dict() for each in trainer.checkpoint_callbacks]
    return [str(state).replace(str(folder), "") for state in states]


def contents(folder: Path, trainer: Any) -> dict[str, Any]:
    """Return what each name loads as: step, epoch, keys, weights, optimizer, and what callbacks and loops say."""
    results = {}
    for name in names_in(folder):
        path = folder / name
        try:
            loaded = trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=False)
        except (OSError, UserError):
            results[name] = "cannot be loaded"
            continue
        text = {key: loaded.get(key) for key in ("global_step", "epoch", "callbacks", "loops", "lr_schedulers")}
        optimizer = loaded.get("optimizer_states")
        results[name] = (
            sorted(loaded), str(text).replace(str(folder), ""), str(dict(loaded["state_dict"])), str(optimizer),
        )  # fmt: skip
    return results


BEST = {"filename": "best-{step}", "monitor": "val/score"}
CASES: dict[str, dict[str, Any]] = {
    "default": {"of": [{}]},
    "monitor": {"of": [BEST]},
    "monitor, max, top 2": {"of": [{**BEST, "mode": "max", "save_top_k": 2}]},
    "top 0": {"of": [{**BEST, "save_top_k": 0}]},
    "top 0 and last": {"of": [{**BEST, "save_top_k": 0, "save_last": True}]},
    "top all": {"of": [{**BEST, "save_top_k": -1}]},
    "last": {"of": [{**BEST, "save_last": True}]},
    "last without monitor": {"of": [{"save_last": True}]},
    "link": {"of": [{**BEST, "save_last": "link"}]},
    "link, top 3": {"of": [{**BEST, "save_last": "link", "save_top_k": 3, "mode": "max"}]},
    "link, top 0": {"of": [{**BEST, "save_last": "link", "save_top_k": 0}]},
    "steps": {"of": [{"every_n_train_steps": 2, "save_top_k": 2, "monitor": "step", "mode": "max"}]},
    "steps, last": {"of": [{"every_n_train_steps": 3, "save_top_k": -1, "save_last": True}]},
    "steps of a score": {"of": [{**BEST, "every_n_train_steps": 2, "save_top_k": 2}]},
    "steps of a training score": {"of": [{"monitor": "train", "every_n_train_steps": 1, "save_top_k": 3}]},
    "time": {"of": [{"train_time_interval": timedelta(0), "save_top_k": 1}]},
    "epochs": {"of": [{**BEST, "every_n_epochs": 2, "save_top_k": 2}]},
    "end of train epochs": {"of": [{"save_on_train_epoch_end": True, "save_top_k": -1, "filename": "{epoch}"}]},
    "not the end of train epochs": {"of": [{**BEST, "save_on_train_epoch_end": False}]},
    "no versions": {"of": [{**BEST, "filename": "same", "save_top_k": 2, "enable_version_counter": False}]},
    "versions": {"of": [{"filename": "same", "monitor": "val/score", "save_top_k": 3, "mode": "max"}]},
    "versions without monitor": {"of": [{"filename": "same", "save_top_k": -1}]},
    "one name": {"of": [{"filename": "same"}]},
    "slashes": {"of": [{"filename": "a/{epoch:02d}/{val/score:.2f}", "monitor": "val/score", "save_top_k": 2}]},
    "no metric names": {
        "of": [{"filename": "e{epoch:03d}-s{val/score:.1f}", "auto_insert_metric_name": False, "monitor": "val/score"}]
    },
    "odd names": {"of": [{"filename": "Ünï cödé step=99 {epoch}", "monitor": "val/score", "save_top_k": 2}]},
    "weights": {"of": [{**BEST, "save_weights_only": True}]},
    "weights and all": {"of": [
        {**BEST, "filename": "w-{step}", "save_weights_only": True, "save_top_k": 2},
        {"filename": "all-{step}", "every_n_epochs": 1, "save_last": True},
    ]},
    "exception": {"of": [{"save_on_exception": True, "every_n_train_steps": 100}], "fails_at": 7},
    "exception in a usual one": {"of": [{**BEST, "save_last": True}], "fails_at": 13},
    "two": {"of": [
        {"filename": "best-{step}", "monitor": "val/score"},
        {"filename": "last-{step}", "every_n_epochs": 1, "save_top_k": 1},
    ]},
    "share": {"of": [
        {"filename": "last-{step}", "monitor": "step", "mode": "max", "save_top_k": 1},
        {"filename": "best-{step}", "monitor": "val/score", "save_top_k": 2, "save_last": True},
    ]},
    "steps and epochs": {"of": [
        {"filename": "s-{step}", "every_n_train_steps": STEPS_A_EPOCH, "save_top_k": -1},
        {"filename": "e-{step}", "every_n_epochs": 1, "save_top_k": -1},
    ]},
    "other folders": {"of": [
        {"dirpath": "DIR/own/a", "monitor": "val/score"}, {"dirpath": "DIR/own/b/c", "save_last": True, "mode": "max"},
    ]},
}  # fmt: skip


def options_of(case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value.replace("DIR", str(folder)) if key == "dirpath" else value for key, value in each.items()}
        for each in case["of"]
    ]


@pytest.mark.parametrize("case", CASES)
def test_names_and_what_they_load_are_those_of_lightning(tmp_path: Path, case: str) -> None:
    named = {key: value for key, value in CASES[case].items() if key != "of"}
    trainers, folders = {}, {}
    for ours in (False, True):
        folder = tmp_path / ("ours" if ours else "them")
        folders[ours], trainers[ours] = (
            folder,
            fitted(folder, options_of(CASES[case], folder), with_ckptkit=ours, **named),
        )
    assert names_in(folders[True]) == names_in(folders[False])
    assert shown(folders[True], trainers[True]) == shown(folders[False], trainers[False])
    expected = contents(folders[False], trainers[False])
    assert contents(folders[True], trainers[True]) == expected
    files = [path for path in names_in(folders[False]) if not (folders[False] / path).is_symlink()]
    steps = {torch.load(folders[False] / path, weights_only=False)["global_step"] for path in files}
    runs = (folders[True] / "run", folders[True] / "run" / "weights")
    assert {step for run in runs if run.exists() for step in Run(run).steps()} == steps


def test_a_training_that_goes_back_keeps_the_steps_of_both(tmp_path: Path) -> None:
    options = [
        {"filename": "{epoch}", "monitor": "val/score", "save_top_k": 2, "save_last": True},
        {"filename": "s-{step}", "every_n_train_steps": 3, "save_top_k": -1},
        {"filename": "w", "every_n_train_steps": 2, "save_weights_only": True},
    ]
    ends = []
    for ours in (False, True):
        folder = tmp_path / ("ours" if ours else "them")
        fitted(folder, options, with_ckptkit=ours, fails_at=13)  # after step 12 was saved
        found = []
        for num_epochs in (3, 4, 6):
            trainer = fitted(folder, options, with_ckptkit=ours, max_epochs=num_epochs, resume=folder / "own/last.ckpt")
            found.append((names_in(folder), shown(folder, trainer), contents(folder, trainer)))
        ends.append(found)
    assert ends[0] == ends[1]
    assert Run(tmp_path / "ours" / "run" / "again-1").steps() == [12]
    with pytest.raises(UserError, match="holds step 30, and the training, which did not load it, saves step 2"):
        fitted(tmp_path / "ours", options, with_ckptkit=True)


@pytest.mark.parametrize("resume", ["last", "name", "link", "best"])
def test_it_goes_on_as_from_its_own_files(tmp_path: Path, resume: str) -> None:
    options = [
        {"filename": "{epoch}-{val/score:.1f}", "monitor": "val/score", "save_top_k": 2,
         "save_last": "link" if resume == "link" else True},
        {"filename": "s-{step}", "every_n_train_steps": STEPS_A_EPOCH, "save_top_k": 1},
    ]  # fmt: skip
    ends = []
    for ours in (False, True):
        folder = tmp_path / ("ours" if ours else "them")
        first = fitted(folder, options, with_ckptkit=ours, max_epochs=2)
        path = {"name": str(folder / "own" / "s-step=10.ckpt"), "best": first.checkpoint_callback.best_model_path}
        trainer = fitted(folder, options, with_ckptkit=ours, max_epochs=4, resume=path.get(resume, "last"))
        ends.append(
            (names_in(folder), shown(folder, trainer), str(parameters_of(trainer.model)), contents(folder, trainer))
        )
    assert ends[0] == ends[1]


def test_a_run_and_its_steps_are_addresses(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"every_n_train_steps": 4, "save_top_k": 2, "monitor": "step", "mode": "max"}]
    fitted(tmp_path / "them", options, with_ckptkit=False, max_steps=8)
    file = tmp_path / "them/own/epoch=1-step=8.ckpt"
    expected = parameters_of(fitted(tmp_path / "them", options, with_ckptkit=False, max_steps=12, resume=file).model)
    run = tmp_path / "ours" / "run"
    fitted(tmp_path / "ours", options, with_ckptkit=True, max_steps=8)
    shutil.rmtree(tmp_path / "ours" / "own")  # the run knows the names too
    for folder, resume in (("more", run), ("other", run / "step-000000008"), ("own", file)):
        trainer = fitted(tmp_path / folder, options, with_ckptkit=True, max_steps=12, resume=resume)
        assert all(map(torch.equal, parameters_of(trainer.model), expected))
    name = tmp_path / "ours/own/epoch=1-step=8.ckpt"
    trainer = fitted(tmp_path / "ours", options, with_ckptkit=True, max_steps=12, resume=name)
    assert all(map(torch.equal, parameters_of(trainer.model), expected))
    assert Run(run).steps() == [8, 12]


def test_damaged_steps_are_passed_over_and_saved_again(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"every_n_train_steps": 4, "save_top_k": -1}]
    fitted(tmp_path, options, with_ckptkit=True, max_steps=8)
    damage(tmp_path / "run" / "step-000000008")
    with pytest.raises(CheckFailed, match="step-000000008"):
        fitted(tmp_path, options, with_ckptkit=True, max_steps=12, resume=tmp_path / "own/epoch=1-step=8.ckpt")
    fitted(tmp_path, options, with_ckptkit=True, max_steps=12, resume=tmp_path / "run")
    assert Run(tmp_path / "run").steps() == [4, 8, 12]
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_a_run_without_names_goes_on(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"every_n_train_steps": 4, "save_top_k": 1, "monitor": "step", "mode": "max"}]
    fitted(tmp_path, options, with_ckptkit=True, max_steps=8)
    (tmp_path / "run" / "names.json").unlink()
    shutil.rmtree(tmp_path / "own")
    fitted(tmp_path, options, with_ckptkit=True, max_steps=12, resume=tmp_path / "own/epoch=1-step=8.ckpt")
    assert names_in(tmp_path) == {"own/epoch=2-step=12.ckpt": None}
    assert 12 in Run(tmp_path / "run").steps()


def test_names_move_with_their_files(tmp_path: Path) -> None:
    from ckptkit.torch import LightningCheckpointIO

    fitted(tmp_path, [{"filename": "a", "save_last": True}], with_ckptkit=True, max_epochs=1)
    shutil.copytree(tmp_path / "own", tmp_path / "copied")
    shutil.move(tmp_path / "own", tmp_path / "moved")
    for folder in ("copied", "moved"):
        for plugin in (LightningCheckpointIO(tmp_path / "run"), LightningCheckpointIO(tmp_path / "elsewhere")):
            assert plugin.load_checkpoint(tmp_path / folder / "last.ckpt")["global_step"] == STEPS_A_EPOCH
    Run(tmp_path / "run").remove(STEPS_A_EPOCH, newest_too=True)
    with pytest.raises(UserError, match=r"means step 5 of .*run, which is not there"):
        LightningCheckpointIO(tmp_path / "elsewhere").load_checkpoint(tmp_path / "moved" / "last.ckpt")


def test_what_it_does_not_serve_is_refused_when_it_is_made(tmp_path: Path) -> None:
    from ckptkit.torch import LightningCheckpointIO

    with pytest.raises(UserError, match="has a retention") as caught:
        LightningCheckpointIO(tmp_path, CheckpointerOptions(retention=Retention(keep_last=1)))
    assert "save_top_k" in str(caught.value.hint)
    with pytest.raises(UserError, match="is each node's own"):
        LightningCheckpointIO(tmp_path / "{node}")
    with pytest.raises(UserError, match="names one step"):
        LightningCheckpointIO(tmp_path / "step-000000001")
    plugin = LightningCheckpointIO(tmp_path)
    with pytest.raises(UserError, match="which have a global_step"):
        plugin.save_checkpoint({"model": {}}, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="no storage_options"):
        plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(UserError, match="is not a name, and holds no step"):
        plugin.load_checkpoint(tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
