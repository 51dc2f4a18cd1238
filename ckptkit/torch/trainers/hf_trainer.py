"""HfTrainerCallback: the Trainer of transformers saves steps of a run, and goes on from one.

The callback takes the place of the Trainer's own methods that write, read and delete checkpoints, each at the moment
where the Trainer calls it. So a step is saved after its evaluation and after what that decided, as a folder of the
Trainer's would be. A Trainer passes itself to no callback: it is looked for among the callers.
"""

import dataclasses
import inspect
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from ckptkit.format.address import split_address
from ckptkit.format.keys import step_folder
from ckptkit.runs.catalogue import listed_steps
from ckptkit.runs.retention import beyond_limit
from ckptkit.runs.run import Run as AnyRun
from ckptkit.saving.options import CheckpointerOptions
from ckptkit.torch.run import DEFAULTS, Run
from ckptkit.torch.state.agreement import LoadReport
from threefold.cli import log
from threefold.errors import StorageError, UserError
from threefold.packages import needed_for

with needed_for("HfTrainerCallback"):
    import transformers
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_callback import ExportableState

TRAINER_STATE = "trainer_state.json"  # what the Trainer looks for in a folder
OF_A_RANK = ("is_local_process_zero", "is_world_process_zero")  # the Trainer sets them at each start
REPLACED = (
    "_save_checkpoint", "_load_best_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler",
    "_load_rng_state",
)  # fmt: skip


class HfTrainerCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """A callback that saves to a run where the Trainer would save a checkpoint of its own, which it then does not.

    A step holds model, optimizer, scheduler, scaler, the random states of each rank and the Trainer's own state; the
    numbers that were logged at the step are its metrics. `Trainer(..., callbacks=[callback])`, and to go on from the
    newest sound step `trainer.train(resume_from_checkpoint=callback.resume(trainer))`. Options of the Trainer that say
    when to save, what stays and what is loaded at the end have their meaning, or are refused when the Trainer is made.
    """

    def __init__(self, url: Any, options: CheckpointerOptions = DEFAULTS) -> None:
        """Take the URL of the run, and options of saving."""
        Run(url, options)  # refuses what no run takes
        self._url, self._options = url, options
        self._run: Run | None = None
        self._trainer: Any = None
        self._resumed: tuple[tempfile.TemporaryDirectory[str], LoadReport] | None = None  # where the Trainer was
        self._best: str | None = None  # the best step at that time
        self._saved: set[int] = set()  # the steps that this process saved
        self._has_surplus = False  # the save that runs will leave more steps than are to stay
        self._held: set[int] = set()  # steps that are to go, and that slower tiers still copy
        self._own_places: list[AnyRun] = []  # where this process removes them

    def resume(self, trainer: Any) -> str | None:
        """Return what `train` is to be called with so that it goes on; None if the run has no step."""
        self._attach(trainer)
        if self not in trainer.callback_handler.callbacks:
            raise UserError("the callback is not the Trainer's", hint="Trainer(..., callbacks=[callback])")
        run = self._opened()
        if run.newest() is None:
            return None
        state: dict[str, Any] = {"trainer": {}}
        report = run.load(state)
        self._forget_resumed()
        self._best = self._here(state["trainer"].get("best_model_checkpoint"))
        state["trainer"]["best_model_checkpoint"] = None  # a name of this run is set once the training begins
        folder = tempfile.TemporaryDirectory(prefix="resume-")
        (Path(folder.name) / TRAINER_STATE).write_text(json.dumps(state["trainer"], default=float))
        self._resumed = folder, report
        return folder.name

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Take the place of what the Trainer saves by; UserError for options that the run cannot serve."""
        self._attach(_calling_trainer())

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Check the options again, and that the run has no step that the training is to save."""
        self._attach(_calling_trainer())
        _check(self._trainer, self._options)
        self._saved.clear()
        goes_on = self._resumed is not None and self._resumed[1].step == state.global_step
        newest = None if goes_on else self._opened().newest()
        if newest is not None and newest > state.global_step:
            raise UserError(
                f"{self._url} holds step {newest}, and the training begins after step {state.global_step}",
                hint="trainer.train(resume_from_checkpoint=callback.resume(trainer)), or another URL",
            )
        if goes_on:
            state.best_model_checkpoint = self._best
        if self._options.retention.has_rules and args.save_total_limit and state.is_world_process_zero:
            log(f"save_total_limit={args.save_total_limit} is not used: the retention of the run decides what stays")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Remove what is not to stay, once the save that ran is done and slower tiers have it."""
        if not self._has_surplus:
            return
        run = self._opened()
        if not run.is_saving and not self._held & run.copied_steps:
            self._remove_surplus()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **objects: Any) -> None:
        """Wait for the last save, and make it again if it failed: no other follows."""
        try:
            if self._run is not None:
                self._finish(self._run, state.global_step)
                self._run.close()
                self._remove_surplus(at_end=True)
        finally:
            self._run = None
            self._forget_resumed()

    def _finish(self, run: Run, step: int) -> None:
        """Save the last step again as long as it is not there, up to the bound of failures in a row.

        With load_best_model_at_end the model is another one by now.
        """
        if self._trainer.args.load_best_model_at_end:
            return
        while step in self._saved and not run.has_saved(step):
            log(f"saving step {step} again")
            self._saved.discard(step)
            self._save(self._trainer.model)
        if step in self._saved:
            with suppress(StorageError):  # saves that failed before were logged
                run.wait()

    def _attach(self, trainer: Any) -> None:
        """Take the place of a Trainer's methods, once."""
        if self._trainer is trainer:
            return
        _check(trainer, self._options)
        trainer._save_checkpoint = self._save
        trainer._load_best_model = partial(self._load_best, trainer._load_best_model)
        for name, replacement in (
            ("_load_from_checkpoint", lambda: None),  # the weights are filled with the optimizer's states
            ("_load_optimizer_and_scheduler", self._fill),
            ("_load_scaler", lambda: None),
            ("_load_rng_state", partial(self._fill_with, {"rng": True})),
        ):
            setattr(trainer, name, partial(self._load, replacement, getattr(trainer, name)))
        self._trainer = trainer

    def _load(
        self, fill: Callable[[], None], load: Callable[..., Any], checkpoint: Any, *rest: Any, **named: Any
    ) -> Any:
        """Read the run, if the folder is the one that `resume` made; else what the Trainer reads."""
        if self._resumed is not None and checkpoint == self._resumed[0].name:
            return fill()
        return load(checkpoint, *rest, **named)

    def _fill(self) -> None:
        self._fill_with(self._objects())

    def _fill_with(self, objects: dict[str, Any]) -> None:
        """Load what the step that training goes on from has of some objects."""
        assert self._resumed is not None, "called for the folder of resume alone"
        report = self._resumed[1]
        if wanted := {key: value for key, value in objects.items() if key in report.keys}:
            self._opened().load(wanted, report.step)

    def _save(self, model: Any, trial: Any = None, *_: Any, **__: Any) -> None:
        """Save a step where the Trainer would write a folder; one that this training saved is not saved again."""
        trainer, state = self._trainer, self._trainer.state
        step = state.global_step
        if trial is not None:
            raise UserError(
                f"a search of hyperparameters trains many times, and {self._url} holds one training",
                hint='TrainingArguments(save_strategy="no") for the search',
            )
        if step in self._saved:
            return
        trainer.store_flos()
        run = self._opened()
        self._saved.add(step)
        if state.best_global_step in self._saved:
            state.best_model_checkpoint = f"{run.url}/{step_folder(state.best_global_step)}"
        parts = {"model": trainer.model} if trainer.args.save_only_model else {**self._objects(), "rng": True}
        if state.is_world_process_zero:  # each process logs times of its own
            parts["trainer"] = _state_of(trainer)
        run.save(step, parts, _metrics_of(state))
        self._own_places = run.own_places()
        self._has_surplus = bool(trainer.args.save_total_limit and self._own_places)

    def _load_best(self, load: Callable[[], None]) -> None:
        """Load the weights of the best step, as the Trainer does at the end; the last ones stay if it is not there."""
        best = self._trainer.state.best_model_checkpoint
        step = split_address(best)[1]
        if step is None:  # a folder of the Trainer's own, which the training went on from
            load()
            return
        run = self._opened()
        try:
            run.load({"model": self._trainer.model}, step, sets_aside=False)
        except UserError:
            if step in run.newest_first():
                raise
            log(f"warning: {best} was not saved, so that the last weights stay")

    def _remove_surplus(self, *, at_end: bool = False) -> None:
        """Remove the steps that the Trainer would, if a limit of its own decides what stays."""
        args, state = self._trainer.args, self._trainer.state
        self._has_surplus = False
        limit = args.save_total_limit or 0
        if limit <= 0 or self._options.retention.has_rules:
            return
        best = split_address(state.best_model_checkpoint)[1] if state.best_model_checkpoint else None
        run, copied = self._opened(), set[int]()
        for place in self._own_places:
            try:
                steps = [listed.step for listed in listed_steps(place.storage) if listed.root and not listed.is_pinned]
                surplus = beyond_limit(steps, limit, best)
                if at_end and limit == 1 and best in steps:
                    surplus = [step for step in steps if step != best]
                copied |= run.copied_steps.intersection(surplus)
                if going := [step for step in surplus if step not in copied and step != run.whole_step]:
                    place.remove(*going, newest_too=True)
            except (StorageError, UserError) as error:
                log(f"warning: older steps of {place.url} were not removed: {error}")
        self._held, self._has_surplus = copied, bool(copied)

    def _objects(self) -> dict[str, Any]:
        trainer = self._trainer
        objects = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        scaler = getattr(trainer.accelerator, "scaler", None)
        return objects if scaler is None else {**objects, "scaler": scaler}

    def _here(self, best: str | None) -> str | None:
        """Return the name of the best step in this run, which may have been moved; None if it is not there."""
        step = split_address(best)[1] if best else None
        if step is None:
            return best
        run = self._opened()
        return f"{run.url}/{step_folder(step)}" if step in run.newest_first() else None

    def _forget_resumed(self) -> None:
        if self._resumed is not None:
            self._resumed[0].cleanup()
            self._resumed = None

    def _opened(self) -> Run:
        if self._run is None:
            self._run = Run(self._url, self._options)
        return self._run


def _calling_trainer() -> Any:
    """Return the Trainer that calls its callbacks."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), Trainer):
            return caller
        frame = frame.f_back
    raise UserError(
        "HfTrainerCallback is not called by a Trainer", hint="transformers.Trainer(..., callbacks=[callback])"
    )


def _check(trainer: Any, options: CheckpointerOptions) -> None:
    """Raise UserError, by name, for what a Trainer does that a run cannot stand for."""
    args = trainer.args
    if missing := [name for name in REPLACED if not hasattr(trainer, name)]:
        raise UserError(
            f"the Trainer of transformers {transformers.__version__} has no {', '.join(missing)}",
            hint="pip install -U transformers",
        )
    at_one = args.save_total_limit == 1
    folders = sorted(Path(args.output_dir).glob("checkpoint-*")) if at_one else []
    for is_meant, what, hint in (
        (args.save_on_each_node, "save_on_each_node=True writes all to each node's own disk",
         'save_on_each_node=False; HfTrainerCallback("/nvme/run/{node}") has each node save what its processes hold'),
        (args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end",
         f"push_to_hub=True with hub_strategy={args.hub_strategy!s} uploads folders that are not written",
         'hub_strategy="end"'),
        (args.load_best_model_at_end and options.retention.has_rules,
         "load_best_model_at_end=True keeps the best step by itself, and a retention may delete it",
         "leave the retention out, and set save_total_limit"),
        (getattr(trainer, "is_deepspeed_enabled", False), "DeepSpeed writes its states by itself",
         "FSDP2, with fsdp_version 2, or the Trainer's own checkpoints"),
        (at_one and getattr(args, "enable_jit_checkpoint", False),
         "enable_jit_checkpoint=True makes folders, of which save_total_limit=1 leaves the best alone",
         "save_total_limit=2"),
        (folders, f"save_total_limit=1 would delete folders of earlier trainings at the end, such as {folders[:1]}",
         "another output_dir, or save_total_limit=2"),
    ):  # fmt: skip
        if is_meant:
            raise UserError(f"HfTrainerCallback: {what}", hint=hint)


def _state_of(trainer: Any) -> dict[str, Any]:
    """Return a Trainer's own state, with those of its callbacks as they are now, and what else they put beside them."""
    callbacks: dict[str, list[Any]] = {}
    for owner in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(owner, ExportableState):
            callbacks.setdefault(type(owner).__name__, []).append(owner.state())
    shown = {name: states if states[1:] else states[0] for name, states in callbacks.items()}
    shown = {**trainer.state.stateful_callbacks, **shown}
    return {**dataclasses.asdict(trainer.state), **dict.fromkeys(OF_A_RANK, True), "stateful_callbacks": shown}


def _metrics_of(state: TrainerState) -> dict[str, float]:
    """Return the numbers that were logged at the step that a state is at."""
    logged = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    return {
        name: float(value)
        for entry in logged
        for name, value in entry.items()
        if isinstance(value, Real) and name != "step"
    }
