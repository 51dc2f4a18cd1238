"""Faults of the update: its rate, its decay, its count, and which weights it takes."""

from dataclasses import replace
from typing import Any

import torch

from trainer import engine
from trainer.config.optim import GroupConfig
from trainer.engine import Engine
from trainer.model import chunk, table
from trainer.ops.activation import Activation
from trainer.store import lr
from trainer.store.optimizers import Updates
from trainer.verdict import Verdict
from trainer.verify.faults.fault import PRECISION, Fault
from trainer.verify.faults.planting import wrapping


def every_row_decays(real: Any, config: Any) -> Any:
    return {name: replace(row, decay=1.0) for name, row in real(config).items()}


def neighbours_factors(real: Any, rows: Any, groups: Any) -> Any:
    found = real(rows, groups)
    names = list(found)
    shifted = {name: found[after] for name, after in zip(names, names[1:] + names[:1], strict=True)}
    return {name: replace(found[name], rate=row.rate, decay=row.decay) for name, row in shifted.items()}


def narrow_angles(real: Any, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Any:
    return real(positions, frequencies, torch.float32).to(dtype)


def gradient_for_product(real: Any, self: Activation, dy: torch.Tensor, x: torch.Tensor) -> Any:
    own = dy.clone()
    return real(self, dy, x)[0], own


def tied_twice(real: Any, self: Updates, parts: Any) -> None:
    """Update a matrix with two users once for each of them."""
    rows = list(parts)
    real(self, [*rows, *(pair for pair in rows if pair[0].shape[0] == 13)])


def counted_nowhere(real: Any, self: Engine, batch: Any) -> tuple[float, ...]:
    """Let no rank count what it evaluates."""
    return tuple(0.0 for _ in real(self, batch))


def stepping_in_evaluation(real: Any, self: Engine, batch: Any) -> tuple[float, ...]:
    """Let an evaluation take a step."""
    sums: tuple[float, ...] = real(self, batch)
    self.train_step(0, batch)
    return sums


def unpublished(real: Any, self: Engine, *args: Any, **options: Any) -> Any:
    """Leave the parameters that are computed with as they were before the update of their masters."""
    apart = [bucket for bucket in self.store.buckets if bucket.master.dtype != bucket.parameters.dtype]
    before = [bucket.parameters.clone() for bucket in apart]
    pending = real(self, *args, **options)
    self.store.join()
    for bucket, values in zip(apart, before, strict=True):
        bucket.parameters.copy_(values)
    return pending


def widened(real: Any, self: Engine) -> None:
    """Let weights in 16 bits be others than their masters."""
    real(self)
    for _, value in self.store.values() if self.dtype == torch.bfloat16 else ():
        value.mul_(1.5)


GROUPS = (GroupConfig("*.norm?.weight", 0.5, 0.3), GroupConfig("embed.*", 2.0), GroupConfig("*.down.*", 1.0, 3.0))

UPDATE_FAULTS = (
    Fault(
        "adamw-count",
        "AdamW counts a step too many",
        None,
        wrapping(Updates, "update", lambda real, *args, **named: real(*args[:-1], args[-1] + 1, **named)),
    ),
    Fault(
        "rate-falls-otherwise",
        "the learning rate falls by another curve",
        None,
        wrapping(lr, "fallen", lambda real, start, end, shape, way: real(start, end, shape, way * way)),
    ),
    Fault(
        "rate-off-by-one",
        "the learning rate is that of the step behind",
        None,
        wrapping(engine, "learning_rate", lambda real, optim, step: real(optim, step + 1)),
    ),
    Fault(
        "not-clipped",
        "gradients are not clipped",
        None,
        wrapping(Verdict, "judge", lambda real, *args: torch.ones_like(real(*args))),
    ),
    Fault("norms-decay", "norms and biases decay", None, wrapping(engine, "parameter_table", every_row_decays)),
    Fault(
        "factors-of-neighbour",
        "a group's factors are applied to the neighbour",
        None,
        wrapping(table, "with_groups", neighbours_factors),
        groups=GROUPS,
    ),
    Fault(
        "group-decay-left-out",
        "a group's weight decay is left out",
        None,
        wrapping(
            table,
            "with_groups",
            lambda real, rows, groups: real(rows, [replace(group, decay_factor=None) for group in groups]),
        ),
        groups=GROUPS,
    ),
    Fault(
        "tied-updated-twice",
        "a tied matrix is updated twice",
        None,
        wrapping(Updates, "__init__", tied_twice),
        peer="NVIDIA/Megatron-LM#7452",
    ),
    Fault(
        "evaluation-counts-nowhere",
        "no rank counts an evaluation",
        None,
        wrapping(Engine, "eval_batch", counted_nowhere),
    ),
    Fault(
        "evaluation-trains", "an evaluation takes a step", None, wrapping(Engine, "eval_batch", stepping_in_evaluation)
    ),
    Fault(
        "gradient-for-product",
        "down's gradient is made of its input's gradient",
        None,
        wrapping(Activation, "backward", gradient_for_product),
    ),
    Fault(
        "narrow-angles",
        "rotary angles are of float32",
        None,
        wrapping(chunk, "turns_at", narrow_angles),
        model={"position": "rope"},
    ),
    Fault(
        "masters-not-published",
        "parameters of bf16 stay behind their masters",
        None,
        wrapping(Engine, "start_step", unpublished),
        check=PRECISION,
        precision="bf16",
        optim={"lr": 0.1, "min_lr": 0.1, "clip": 0.05},
    ),
    Fault(
        "weights-beside-masters",
        "parameters of bf16 are others than their masters",
        None,
        wrapping(Engine, "initialise", widened),
        check=PRECISION,
        precision="bf16",
    ),
)
