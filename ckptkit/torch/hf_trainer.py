"""HfTrainerCallback: the Trainer of transformers saves steps of a run, and goes on from one."""

import dataclasses
import json
import shutil
import tempfile
from numbers import Real
from pathlib import Path
from typing import Any

from ckptkit.saving.options import CheckpointerOptions
from ckptkit.torch.run import DEFAULTS, Run
from threefold.packages import needed_for

with needed_for("HfTrainerCallback"):
    from transformers import TrainerCallback, TrainerControl, TrainerState

TRAINER_STATE = "trainer_state.json"  # what the Trainer looks for in a folder


class HfTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that saves to a run where the Trainer would save a checkpoint of its own, which it then does not.

    A step holds model, optimizer, scheduler, the random states of each rank and the Trainer's own state; the numbers
    that were logged last are its metrics. `Trainer(..., callbacks=[callback])`, and to go on from the newest sound step
    `trainer.train(resume_from_checkpoint=callback.resume(trainer))`. Of save strategies `steps` and `epoch` are known.
    """

    def __init__(self, url: Any, options: CheckpointerOptions = DEFAULTS) -> None:
        """Take the URL of the run, and options of saving."""
        self._url, self._options = url, options
        self._run: Run | None = None
        self._resumed: str | None = None  # the folder that says where the Trainer was
        self._rng: dict[str, Any] | None = None  # to be set before the first step

    def resume(self, trainer: Any) -> str | None:
        """Return what `train` is to be called with so that it goes on; None if the run has no step."""
        run = self._opened()
        if run.newest() is None:
            return None
        state: dict[str, Any] = {"trainer": {}}
        run.load(state)
        self._resumed = tempfile.mkdtemp(prefix="resume-")
        (Path(self._resumed) / TRAINER_STATE).write_text(json.dumps(state["trainer"]))
        trainer._load_from_checkpoint = lambda *arguments, **options: None  # the run has the weights
        return self._resumed

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Fill model, optimizer and scheduler, if the Trainer goes on."""
        if self._resumed is not None:
            self._opened().load(_objects(objects), state.global_step)
            shutil.rmtree(self._resumed)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Set the random states, if the Trainer goes on: its order of samples drew from others before."""
        if self._resumed is not None:
            self._opened().load({"rng": True}, state.global_step)
            self._resumed = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Save, if the Trainer would."""
        self._save(state, control, objects)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Save, if the Trainer would."""
        self._save(state, control, objects)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Wait for the last save."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def _save(self, state: TrainerState, control: TrainerControl, objects: dict[str, Any]) -> None:
        if not control.should_save:
            return
        control.should_save = False
        logged = state.log_history[-1] if state.log_history else {}
        metrics = {name: float(value) for name, value in logged.items() if isinstance(value, Real) and name != "step"}
        whole = {**_objects(objects), "rng": True, "trainer": dataclasses.asdict(state)}
        self._opened().save(state.global_step, whole, metrics)

    def _opened(self) -> Run:
        if self._run is None:
            self._run = Run(self._url, self._options)
        return self._run


def _objects(objects: dict[str, Any]) -> dict[str, Any]:
    return {"model": objects["model"], "optimizer": objects["optimizer"], "scheduler": objects["lr_scheduler"]}
