"""Faults of void steps, of which no trace may be left: what makes steps void, and what is compared. See `faults`."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require, require_equal
from tests.trainer.support.faults import ShownFault
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from tests.trainer.support.training import call, curve, write_config, write_stores
from trainer import data
from trainer.config import Config
from trainer.engine import Engine
from trainer.run.loop import Run
from trainer.run.started import Intake
from trainer.store.store import ParameterStore
from trainer.verdict import Outcome, PendingStats, Verdict
from trainer.verify.faults.planting import Patch

FLAGS = ("--train-steps", 5, "--optim.schedule", "constant", "--save-interval", 1, "--model.dropout", 0.1)


def states(store: ParameterStore) -> list[Tensor]:
    return [state for bucket in store.buckets for state in (bucket.parameters, bucket.master, *bucket.states.values())]


class Causes:
    """Makes the steps of some numbers void, each once."""

    def __init__(self, outcome: Outcome, *numbers: int) -> None:
        self.outcome, self.numbers, self.judged = outcome, set(numbers), 0

    def __call__(self, loss: Tensor, norm: Tensor) -> Tensor:
        self.judged += 1
        return torch.full_like(loss, self.outcome if self.judged in self.numbers else 0)


def flat_config(precision: str, form: str) -> Config:
    config = small(config_for("llama", ParallelLayout(), precision=precision))
    return replace(
        config, optim=replace(config.optim, schedule="constant"), ops=replace(config.ops, adamw=form),
        model=replace(config.model, dropout=0.0),
    )  # fmt: skip


def trained(config: Config, batches: list[int], causes: Causes | None, *, is_late: bool) -> Engine:
    """An engine after steps of these batches, each read at once, or when the next one is started."""
    engine = make_engine(0, config)
    if causes is not None:
        engine.verdict.causes.append(causes)
    pending: list[PendingStats] = []
    for step, number in enumerate(batches):
        pending.append(engine.start_step(step, local_batch(config, number, engine.mesh)))
        if len(pending) > is_late:
            pending.pop(0).read()
    return engine


def require_same(engine: Engine, expected: Engine) -> None:
    for now, then in zip(states(engine.store), states(expected.store), strict=True):
        require_equal(torch.equal(now, then), "state")


def void_in_the_middle(precision: str = "fp64", form: str = "csrc", *, is_late: bool = False) -> Engine:
    """Compare a run with two void steps with one that never had their batches."""
    config = flat_config(precision, form)
    engine = trained(config, [0, 5, 1, 6, 2, 3], Causes(Outcome.SKIPPED, 2, 4), is_late=is_late)
    require_same(engine, trained(config, [0, 1, 2, 3], None, is_late=False))
    return engine


def make_void(patch: Patch, outcome: Outcome, *judged: int) -> None:
    """Make the steps that are judged first, second and so on void."""
    real, real_batch = Engine.__init__, data.to_device
    numbers = set(judged)

    def build(self: Engine, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        count = iter(range(1, 10**6))
        self.verdict.causes.append(lambda loss, norm: torch.full_like(loss, outcome if next(count) in numbers else 0))

    def copied(host: Any, device: Any) -> Any:  # as on a GPU, where a step has memory of its own
        return real_batch(replace(host, buffer=host.buffer.copy()), device)

    patch.setattr(Engine, "__init__", build)
    patch.setattr(data, "to_device", copied)


def train(config: Path, folder: Path, name: str, *flags: object) -> int:
    return call("train", config, "--save", folder / name, "--metrics", folder / f"{name}.jsonl", *FLAGS, *flags)


def metadata(run: Path, step: int) -> dict[str, Any]:
    return dict(json.loads((run / f"step-{step:09d}" / "root.json").read_text())["metadata"])


def compare_repeated(folder: Path) -> None:
    """A run whose steps were repeated with one of which none was."""
    for name in ("loss", "lr", "tokens", "grad_norm"):
        found, expected = (curve(folder / f"{run}.jsonl", name) for run in ("void", "plain"))
        require_equal(found == expected, f"{name}: {found} in place of {expected}")
    for step in range(1, 6):
        found, expected = (metadata(folder / run, step) for run in ("void", "plain"))
        for key in ("cursor", "tokens", "updates", "loss"):
            require_equal(found[key] == expected[key], f"step {step}: {key}")


def compare_runs() -> None:
    """A run whose second step was repeated with one of which none was."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_stores(folder)
        config = write_config(folder)
        require(train(config, folder, "plain") == 0, "the plain run")
        with pytest.MonkeyPatch.context() as patch:
            make_void(patch, Outcome.REPEATED, 2)
            require(train(config, folder, "void") == 0, "the run with a void step")
        compare_repeated(folder)


def counted(patch: Patch) -> None:
    real = Verdict.noting
    patch.setattr(Verdict, "noting", lambda self: (real(self), lambda voids: None)[1])
    patch.setattr(Verdict, "late_voids", lambda self: None)


def changed_state(patch: Patch) -> None:
    real = Verdict.judge

    def judge(self: Verdict, *arguments: Any) -> Tensor:
        factor = real(self, *arguments)
        self.is_void = torch.zeros_like(self.is_void)
        return factor

    patch.setattr(Verdict, "judge", judge)


def read_too_late(patch: Patch) -> None:
    patch.setattr(Verdict, "late_voids", lambda self: None)


def moved_cursor(patch: Patch) -> None:
    patch.setattr(Intake, "put_back", lambda self, step, taken: None)


def kept_progress(patch: Patch) -> None:
    real = Run._go_back

    def go_back(self: Run, started: Any) -> None:
        kept = self.progress
        real(self, started)
        self.progress = kept

    patch.setattr(Run, "_go_back", go_back)


VOID_FAULTS = [
    ShownFault("a void step counted", counted, void_in_the_middle),
    ShownFault("a void step changed the state", changed_state, void_in_the_middle),
    ShownFault("a void step that is not read yet counted", read_too_late, partial(void_in_the_middle, is_late=True)),
    ShownFault("a void step's cursor moved", moved_cursor, compare_runs),
    ShownFault("a void step counted in the progress", kept_progress, compare_runs),
]
