"""Faults of a scaled loss, which leaves no trace in what is trained: what is scaled, and compared. See `faults`."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require, require_equal
from tests.trainer.support.faults import ShownFault
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from tests.trainer.support.training import call, curve, hash_of, write_config, write_stores
from tests.trainer.support.void_faults import counted, metadata, read_too_late, require_same
from trainer.checkpoint import progress
from trainer.config import Config
from trainer.engine import Engine
from trainer.loss_scale import LARGEST, LossScale
from trainer.verdict import PendingStats, StepStats, Verdict
from trainer.verify.faults.planting import Patch

FLAGS = ("--fp16", "--optim.schedule", "constant", "--train-steps", 14)
SCALE_FLAGS = ("--initial-loss-scale", 2**24, "--loss-scale-window", 4, "--hysteresis", 2)
STOPS = (3, 9)  # after a void step, and in the middle of a window


def half_config(layout: ParallelLayout | None = None, **train: Any) -> Config:
    config = small(config_for("llama", layout or ParallelLayout(), precision="fp16"))
    constant = replace(config.optim, schedule="constant")
    return replace(config, optim=constant, train=replace(config.train, **train))


def trained(
    config: Config, batches: list[int], scale: LossScale | None, *, is_late: bool
) -> tuple[Engine, list[StepStats]]:
    """An engine and what is read of its steps, at once or when the next one is started."""
    engine = make_engine(0, config)
    if scale is not None:
        engine.verdict = Verdict(engine.mesh.device, config.optim.clip, scale)
    pending, stats = list[PendingStats](), list[StepStats]()
    for step, number in enumerate(batches):
        pending.append(engine.start_step(step, local_batch(config, number, engine.mesh)))
        if len(pending) > is_late:
            stats.append(pending.pop(0).read())
    return engine, stats + [each.read() for each in pending]


def compare_scaled() -> None:
    """A float64 run whose scale is doubled by every step with one that scales nothing: no bit differs."""
    config = small(config_for("llama", ParallelLayout()))
    moving = LossScale(2.0**10, 1.0, LARGEST, window=1, hysteresis=1)
    engine, stats = trained(config, [0, 1, 2, 3], moving, is_late=True)
    expected, plain = trained(config, [0, 1, 2, 3], None, is_late=True)
    for scaled, other in zip(stats, plain, strict=True):
        found = scaled.loss, scaled.grad_norm
        require_equal(found == (other.loss, other.grad_norm), f"{found} in place of {other.loss}, {other.grad_norm}")
    require_same(engine, expected)
    require_equal([each.scale[0] for each in stats] == [2.0**power for power in range(11, 15)], "scales")


def overflow(engine: Engine, *steps: int) -> None:
    """Let the gradients of some steps of a rank overflow: what it scales its loss by is far too large."""
    real, taken = engine.verdict.scaled, iter(range(10**6))
    engine.verdict.scaled = lambda factor: real(factor) * (2.0**90 if next(taken) in steps else 1.0)  # type: ignore[method-assign]


def compare_overflowed(*, is_late: bool = True) -> None:
    """An fp16 run with two steps that overflow with one that never had their batches: AdamW counts updates."""
    config = half_config(loss_scale=2.0**10)
    engine, pending = make_engine(0, config), list[PendingStats]()
    overflow(engine, 1, 3)
    for step, number in enumerate([0, 5, 1, 6, 2, 3]):
        pending.append(engine.start_step(step, local_batch(config, number, engine.mesh)))
        if len(pending) > is_late:
            pending.pop(0).read()
    require_equal(int(engine.verdict.numbers[5]) == 2, "void steps")
    require_same(engine, trained(config, [0, 1, 2, 3], None, is_late=False)[0])


def compare_resumed() -> None:
    """A run that ends after a void step, and in the middle of a window, and goes on, with one that does not end."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_stores(folder)
        config = write_config(folder)

        def train(run: str, *flags: object) -> None:
            where = ("--save", folder / run, "--metrics", folder / f"{run}.jsonl")
            require(call("train", config, *where, *FLAGS, *SCALE_FLAGS, *flags) == 0, f"the run {run}")

        train("whole")
        for stop in STOPS:
            train("parts", "--train-steps", stop)
        train("parts")
        for field in ("loss_scale", "void_steps", "loss", "grad_norm"):
            values, expected = (curve(folder / f"{run}.jsonl", field) for run in ("parts", "whole"))
            require_equal(values == expected, f"{field}: {values} in place of {expected}")
        for key in ("loss_scale", "updates", "loss"):
            values, expected = (metadata(folder / run, 14)[key] for run in ("parts", "whole"))
            require_equal(values == expected, f"{key}: {values} in place of {expected}")
        require_equal(hash_of(folder / "parts", 14).all == hash_of(folder / "whole", 14).all, "the state")


def unscaled_twice(patch: Patch) -> None:
    real = Verdict.judge

    def judge(self: Verdict, *arguments: Any) -> Tensor:
        scale = self.numbers[6]
        return real(self, *arguments) / scale

    patch.setattr(Verdict, "judge", judge)


def scaled_norm(patch: Patch) -> None:
    real = Verdict.judge

    def judge(self: Verdict, step: int, loss: Tensor, squares: Tensor, num_tokens: Tensor) -> Tensor:
        return real(self, step, loss, squares * self.numbers[6].square(), num_tokens)

    patch.setattr(Verdict, "judge", judge)


def late_scale(patch: Patch) -> None:
    """The host multiplies by what it has read, a step late."""
    real = PendingStats.read

    def read(self: PendingStats) -> StepStats:
        stats = real(self)
        known.append(stats.scale[0] if stats.scale else 1.0)
        return stats

    known = [2.0**10]
    patch.setattr(PendingStats, "read", read)
    patch.setattr(Verdict, "scaled", lambda self, factor: factor * known[-1] if self.loss_scale else factor)


def not_saved(patch: Patch) -> None:
    patch.setattr(progress, "recorded", lambda state: {})


def lost_overflow(patch: Patch) -> None:
    patch.setattr(LossScale, "after", lambda self, state, overflows: state)


def kept_count(patch: Patch) -> None:
    """Steps after a void one go on with the window of those before it."""
    real = LossScale.after

    def after(self: LossScale, state: Tensor, overflows: Tensor) -> Tensor:
        moved = real(self, state, overflows)
        moved[1] = torch.where(overflows, state[1], moved[1])
        return moved

    patch.setattr(LossScale, "after", after)


def compare_scaler() -> None:
    """Some hundred decisions with those of torch's GradScaler, by the function that it calls."""
    steps = torch.rand(300, generator=torch.Generator().manual_seed(3)) < 0.08
    moving = LossScale(2.0**16, 2.0**-60, LARGEST, window=5, hysteresis=1)
    state, scale, count = torch.tensor(moving.start(), dtype=torch.float64), torch.tensor([2.0**16]), torch.tensor([0])
    count = count.to(torch.int32)
    for step, overflows in enumerate(steps):
        torch._amp_update_scale_(scale, count, overflows.float().view(1), 2.0, 0.5, 5)
        state = moving.after(state, overflows)
        require_equal(state[:2].tolist() == [float(scale), int(count)], f"scale and count after step {step}")


SCALE_FAULTS = [
    ShownFault("gradients were unscaled twice", unscaled_twice, compare_scaled),
    ShownFault("the norm was of scaled gradients", scaled_norm, compare_scaled),
    ShownFault("the scale was read late", late_scale, compare_scaled),
    ShownFault("the scale was not saved", not_saved, compare_resumed),
    ShownFault("updates were counted on void steps", counted, compare_overflowed),
    ShownFault("a void step that is not read yet was an update", read_too_late, compare_overflowed),
    ShownFault("the scale stayed", lost_overflow, compare_scaler),
    ShownFault("a void step did not end a window", kept_count, compare_scaler),
]
