"""HfTrainerCallback: each option means what it means for folders of the Trainer, which are the oracle."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import CheckpointerOptions, Retention
from ckptkit.cli import main
from ckptkit.tiers.tier import Tier
from ckptkit.torch import Run
from tests.ckptkit.support.small_model import Samples, Small, damage, parameters_of
from threefold.errors import UserError
from tools.fault_proxy import Fault, FaultProxy

NEEDED = "needs transformers and accelerate: pip install transformers accelerate"
transformers = pytest.importorskip("transformers", reason=NEEDED)
pytest.importorskip("accelerate", reason=NEEDED)

STEPS_A_EPOCH = 10
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def trained(
    folder: Path, *, with_callback: bool, resumes: bool = False, options: Any = None, run: str = "run", **named: Any
) -> Any:  # fmt: skip
    """Return a Trainer that has trained, whose checkpoints are its own or steps of a run."""
    from ckptkit.torch import HfTrainerCallback

    settings = {
        "max_steps": 20, "save_steps": 4, "logging_steps": 3, "learning_rate": 0.1, "lr_scheduler_type": "constant",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "label_names": ["y"],
        **named,
    }  # fmt: skip
    callback = HfTrainerCallback(folder / run, options or CheckpointerOptions())
    trainer = transformers.Trainer(
        Small(), transformers.TrainingArguments(str(folder / "own"), **settings), train_dataset=Samples(),
        eval_dataset=torch.utils.data.Subset(Samples(), range(8)), callbacks=[callback] if with_callback else [],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=callback.resume(trainer) if with_callback and resumes else resumes)
    return trainer


def labels_of_folders(folder: Path) -> dict[int, float | None]:
    """Return the loss of the evaluation at each step that the Trainer kept a folder of."""
    labels = {}
    for path in folder.glob("own/checkpoint-*"):
        step = int(path.name.partition("-")[2])
        history = json.loads((path / "trainer_state.json").read_text())["log_history"]
        labels[step] = next(
            (entry["eval_loss"] for entry in history if entry["step"] == step and "eval_loss" in entry), None
        )
    return labels


def labels_of_run(folder: Path) -> dict[int, float | None]:
    run = Run(folder / "run")
    return {step: run.root(step).metadata.get("eval_loss") for step in run.steps()}


def step_of(name: str | None) -> int | None:
    return None if name is None else int(name.rpartition("-")[2])


PROGRAM = """
import sys
from pathlib import Path
from tests.ckptkit.torch.trainers.test_hf_trainer import trained
trained(Path(sys.argv[1]), with_callback=True, resumes=True, max_steps=int(sys.argv[2]), save_steps=3,
        save_total_limit=2, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True)
"""


EVERY_2 = {"eval_strategy": "steps", "eval_steps": 2}
CASES: dict[str, dict[str, Any]] = {
    "steps": {},
    "no": {"save_strategy": "no", **EVERY_2},
    "epoch": {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3},
    "steps, evaluated": {**EVERY_2, "save_steps": 2},
    "epoch, evaluated": {"save_strategy": "epoch", "eval_strategy": "epoch", "max_steps": 27},
    "evaluated each epoch": {"eval_strategy": "epoch", "save_steps": 5},
    "evaluated at the last step": {"eval_strategy": "steps", "eval_steps": 6, "save_steps": 4},
    "limit 1": {"save_total_limit": 1},
    "limit 2": {"save_total_limit": 2, **EVERY_2},
    "limit 0": {"save_total_limit": 0},
    "best": {"save_strategy": "best", "metric_for_best_model": "loss", **EVERY_2},
    "best, limit 2": {"save_strategy": "best", "metric_for_best_model": "eval_loss", "save_total_limit": 2, **EVERY_2},
    "best, greater, each epoch": {
        "save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": True, "eval_strategy": "epoch",
    },
    "best, loaded": {"save_strategy": "best", "load_best_model_at_end": True, "save_total_limit": 1, **EVERY_2},
    "loaded": {"load_best_model_at_end": True, **EVERY_2},
    "loaded, limit 1": {"load_best_model_at_end": True, "save_total_limit": 1, **EVERY_2},
    "loaded, limit 2": {"load_best_model_at_end": True, "save_total_limit": 2, "save_steps": 2, **EVERY_2},
    "loaded, limit 3, greater": {
        "load_best_model_at_end": True, "save_total_limit": 3, "save_steps": 2, "greater_is_better": True, **EVERY_2,
    },
    "loaded, each epoch": {
        "load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch", "save_total_limit": 1,
    },
    "best of what is not saved": {"metric_for_best_model": "loss", "save_total_limit": 2, "save_steps": 6, **EVERY_2},
    "limit 1 of the best": {"metric_for_best_model": "loss", "save_total_limit": 1, **EVERY_2},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, **EVERY_2},
    "only the model": {"save_only_model": True, "save_total_limit": 2},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_and_loaded_is_what_the_trainer_keeps(tmp_path: Path, case: str) -> None:
    expected = trained(tmp_path / "theirs", with_callback=False, **CASES[case])
    with_ckptkit = trained(tmp_path / "ours", with_callback=True, **CASES[case])
    assert labels_of_run(tmp_path / "ours") == labels_of_folders(tmp_path / "theirs")
    assert not list((tmp_path / "ours" / "own").glob("checkpoint-*"))
    for name in ("best_metric", "best_global_step", "global_step"):
        assert getattr(with_ckptkit.state, name) == getattr(expected.state, name)
    assert step_of(with_ckptkit.state.best_model_checkpoint) == step_of(expected.state.best_model_checkpoint)
    assert all(map(torch.equal, parameters_of(with_ckptkit.model), parameters_of(expected.model)))


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"save_steps": STEPS_A_EPOCH, "first": STEPS_A_EPOCH},
        {"save_steps": 5, "first": STEPS_A_EPOCH, "accelerator_config": {"use_seedable_sampler": False}},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"ignore_data_skip": True},
        {"gradient_accumulation_steps": 2},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, **EVERY_2},
        {"load_best_model_at_end": True, "save_total_limit": 2, **EVERY_2},
        {"save_only_model": True},
    ],
    ids=str,
)  # fmt: skip
def test_it_goes_on_as_from_the_folders_of_the_trainer(tmp_path: Path, named: dict[str, Any]) -> None:
    first, named = named.get("first", 8), {key: value for key, value in named.items() if key != "first"}
    models = []
    for ours in (False, True):
        folder = tmp_path / f"{ours}"
        trained(folder, with_callback=ours, **{**named, "max_steps": first})
        torch.manual_seed(5)
        trainer = trained(folder, with_callback=ours, resumes=True, **named)
        models.append((parameters_of(trainer.model), step_of(trainer.state.best_model_checkpoint)))
    (theirs, their_best), (mine, my_best) = models
    assert all(map(torch.equal, mine, theirs))
    assert my_best == their_best
    assert main(["verify", str(tmp_path / "True" / "run")]) == 0


def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for num_ranks, num_steps in ((2, 3), (1, 6), (2, 9)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        done = subprocess.run(
            [*command, str(program), str(tmp_path), str(num_steps)], capture_output=True, text=True, timeout=300,
            check=False, env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    labels = labels_of_run(tmp_path)
    assert len(labels) == 2
    assert 9 in labels
    assert None not in labels.values()


def test_the_best_step_stays_under_a_retention(tmp_path: Path) -> None:
    retention = Retention(keep_last=1, keep_best=1, metric="eval_loss")
    named = {**EVERY_2, "save_steps": 2, "save_total_limit": 1, "eval_on_start": False}
    trained(tmp_path, with_callback=True, options=CheckpointerOptions(retention=retention), **named)
    history = trained(tmp_path / "all", with_callback=True, **{**EVERY_2, "save_steps": 2})
    labels = labels_of_run(tmp_path / "all")
    best = min(labels, key=lambda step: labels[step] or 0.0)
    assert list(labels_of_run(tmp_path)) == sorted({best, history.state.global_step})


def test_a_scaler_goes_on(tmp_path: Path) -> None:
    def scaled(trainer: Any) -> float:
        return float(trainer.accelerator.scaler.get_scale())

    from ckptkit.torch import HfTrainerCallback

    scales = []
    for num_steps in (4, 8):
        callback = HfTrainerCallback(tmp_path / "run")
        arguments = transformers.TrainingArguments(
            str(tmp_path / "own"), max_steps=num_steps, save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True
        )
        trainer = transformers.Trainer(Small(), arguments, train_dataset=Samples(), callbacks=[callback])
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**num_steps, growth_interval=100)
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        scales.append(scaled(trainer))
    assert scales == [16.0, 16.0]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"save_on_each_node": True}, "save_on_each_node=True"),
        ({"push_to_hub": True, "hub_strategy": "every_save"}, "push_to_hub=True"),
        ({"enable_jit_checkpoint": True, "save_total_limit": 1}, "enable_jit_checkpoint=True"),
        ({"load_best_model_at_end": True, **EVERY_2}, "load_best_model_at_end=True"),
    ],
)
def test_what_a_run_cannot_serve_is_refused_when_the_trainer_is_made(
    tmp_path: Path, named: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda *_, **__: None)
    with pytest.raises(UserError, match=words):
        trained(tmp_path, with_callback=True, options=CheckpointerOptions(retention=Retention(keep_last=1)), **named)
    assert not (tmp_path / "run").exists()


def test_a_run_with_later_steps_is_not_written_into(tmp_path: Path) -> None:
    trained(tmp_path, with_callback=True, max_steps=4)
    with pytest.raises(UserError, match="holds step 4, and the training begins after step 0") as caught:
        trained(tmp_path, with_callback=True)
    assert "callback.resume(trainer)" in str(caught.value.hint)
    trained(tmp_path, with_callback=True, resumes=True)
    assert list(Run(tmp_path / "run").steps()) == [4, 8, 12, 16, 20]


def test_folders_of_earlier_trainings_are_not_deleted(tmp_path: Path) -> None:
    trained(tmp_path, with_callback=False, max_steps=4)
    with pytest.raises(UserError, match="save_total_limit=1 would delete folders of earlier trainings"):
        trained(tmp_path, with_callback=True, save_total_limit=1)
    trainer = trained(tmp_path, with_callback=True, save_total_limit=2)
    assert labels_of_folders(tmp_path).keys() == {4}
    trained(tmp_path, with_callback=True, resumes=True, max_steps=24)
    assert step_of(trainer.state.best_model_checkpoint) is None


def test_damaged_steps_are_passed_over_and_saved_again(tmp_path: Path) -> None:
    trained(tmp_path, with_callback=True, max_steps=8)
    damage(tmp_path / "run" / "step-000000008")
    trainer = trained(tmp_path, with_callback=True, resumes=True, max_steps=12)
    assert Run(tmp_path / "run").steps() == [4, 8, 12]
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert trainer.state.global_step == 12


def test_a_slower_tier_is_gone_on_from(tmp_path: Path) -> None:
    options = CheckpointerOptions(tiers=(Tier(str(tmp_path / "slow")),))
    trained(tmp_path, with_callback=True, options=options, max_steps=8)
    shutil.rmtree(tmp_path / "run")
    trained(tmp_path, with_callback=True, resumes=True, options=options, max_steps=12)
    assert Run(tmp_path / "run").steps() == [12]
    assert Run(tmp_path / "slow").steps() == [4, 8, 12]


def test_a_nodes_own_disk_and_its_replica_are_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THREEFOLD_NODE", "n0")
    own, replica = tmp_path / "nvme" / "n0", tmp_path / "peers" / "n0" / "n0"
    named: dict[str, Any] = {"run": "nvme/{node}", "save_total_limit": 2}
    named["options"] = CheckpointerOptions(tiers=(Tier(f"{tmp_path}/peers/{{peer}}/{{node}}"),))
    trained(tmp_path, with_callback=True, max_steps=12, **named)
    assert (Run(own).steps(), Run(replica).newest()) == ([8, 12], 12)
    shutil.rmtree(own)
    trainer = trained(tmp_path, with_callback=True, resumes=True, max_steps=20, **named)
    assert (Run(own).steps(), Run(replica).newest()) == ([16, 20], 20)
    assert 8 not in Run(replica).steps()
    expected = trained(tmp_path / "straight", with_callback=True, max_steps=20)
    assert all(map(torch.equal, parameters_of(trainer.model), parameters_of(expected.model)))


def test_a_step_beyond_the_limit_stays_until_slower_tiers_have_it(
    tmp_path: Path, s3_proxy: FaultProxy, s3_url: str
) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
    options = CheckpointerOptions(tiers=(Tier(s3_url),))
    trained(tmp_path, with_callback=True, options=options, max_steps=12, save_total_limit=1)
    assert Run(tmp_path / "run").steps() == [12]
    assert {4, 12} <= {*Run(s3_url).steps()}


def test_a_last_save_that_failed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None follows it; what fails once is a place that is not a folder until the training is done."""
    blocked, usual = tmp_path / "run" / "step-000000008", Run.has_saved

    def has_saved(run: Run, step: int) -> bool:
        found = usual(run, step)
        if blocked.is_file():
            blocked.unlink()
        return found

    monkeypatch.setattr(Run, "has_saved", has_saved, raising=False)
    blocked.parent.mkdir()
    blocked.write_text("")
    trained(tmp_path, with_callback=True, max_steps=8)
    assert Run(tmp_path / "run").steps() == [4, 8]
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_a_callback_of_another_trainer_is_named(tmp_path: Path) -> None:
    from ckptkit.torch import HfTrainerCallback

    trainer = trained(tmp_path, with_callback=False, max_steps=1)
    with pytest.raises(UserError, match="the callback is not the Trainer's"):
        HfTrainerCallback(tmp_path / "run").resume(trainer)


def test_what_others_put_into_the_trainers_state_is_kept_as_the_trainer_keeps_it(tmp_path: Path) -> None:
    from ckptkit.torch import HfTrainerCallback

    class Keeps(transformers.TrainerCallback):  # type: ignore[misc]
        """A callback with a place of its own in the state, which is not one of the exportable ones."""

        wrapped: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self.found = state.stateful_callbacks.get("kept")

        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            state.stateful_callbacks["kept"] = {"step": state.global_step}

    options = {"max_steps": 2, "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    for with_callback in (False, True):
        for expected in (None, {"step": 2}):
            saves, keeps = HfTrainerCallback(tmp_path / "run"), Keeps()
            arguments = transformers.TrainingArguments(str(tmp_path / str(with_callback)), **options)
            callbacks = [saves, keeps] if with_callback else [keeps]
            trainer = transformers.Trainer(Small(), arguments, train_dataset=Samples(), callbacks=callbacks)
            trainer.train(resume_from_checkpoint=saves.resume(trainer) if with_callback else expected is not None)
            assert keeps.found == expected
