"""SGD against torch's own, Lion against its definition, and the bits that both promise."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trainer.config import OptimConfig
from trainer.ops import split
from trainer.ops.momentum import AT_ONCE, MomentumPart, MomentumTable
from trainer.verify.plain_optimizers import Lion

SIZES, LR = (1, 3, 64, 1000, 4099), 3e-3
OPTIMS = [
    OptimConfig(name="sgd", weight_decay=0.1),
    OptimConfig(name="sgd", weight_decay=0.1, momentum=0.5, nesterov=True),
    OptimConfig(name="lion", weight_decay=0.1, beta1=0.9, beta2=0.99),
]
of_each = pytest.mark.parametrize("optim", OPTIMS, ids=["sgd", "nesterov", "lion"])
FIELDS = ("gradient", "moment", "master", "published")


def parts_of(dtype: torch.dtype, *, moments: torch.dtype | None = None, splits: bool = False) -> list[MomentumPart]:
    generator, parts = torch.Generator().manual_seed(3), []
    for row, size in enumerate(SIZES):
        values = torch.randn(3, size, generator=generator, dtype=torch.float64).to(dtype)
        published = torch.empty(size, dtype=torch.bfloat16) if dtype == torch.float32 else None
        gradient, moment, master = values.unbind()
        if splits:
            assert published is not None
            low = torch.empty(size, dtype=split.LOW)
            split.split_into(published, low, master)
            master = low
        parts.append(MomentumPart(gradient, moment.to(moments or dtype), master, published, row % 2 == 0, row))
    return parts


def step(
    parts: Sequence[MomentumPart],
    optim: OptimConfig,
    *,
    factor: float = 0.5,
    is_bad: float = 0.0,
    at_once: int = AT_ONCE,
) -> None:
    table, decisions = MomentumTable(parts, at_once), {"factor": torch.tensor(factor), "is_bad": torch.tensor(is_bad)}
    (table.lion if optim.name == "lion" else table.sgd)(optim, LR, **decisions)


def states(parts: Sequence[MomentumPart]) -> list[Tensor]:
    kept = [getattr(part, name) for part in parts for name in FIELDS]
    return [state.clone() for state in kept if state is not None]


@of_each
def test_equals_plain_torch(optim: OptimConfig) -> None:
    parts = parts_of(torch.float64)
    values = [torch.nn.Parameter(part.master.clone()) for part in parts]
    decays = [optim.weight_decay * part.decays for part in parts]
    groups = [{"params": [value], "lr": LR, "weight_decay": decay} for value, decay in zip(values, decays, strict=True)]
    if optim.name == "lion":
        plain: torch.optim.Optimizer = Lion(groups, (optim.beta1, optim.beta2))
    else:
        plain = torch.optim.SGD(groups, momentum=optim.momentum, nesterov=optim.nesterov)
    for part in parts:
        part.moment.zero_()
    for number in range(4):
        for part, value in zip(parts, values, strict=True):
            part.gradient.add_(number)
            value.grad = part.gradient * 0.5
        plain.step()
        step(parts, optim)
    for part, value in zip(parts, values, strict=True):
        torch.testing.assert_close(part.master, value.detach(), rtol=1e-13, atol=1e-15)
        if not part.decays and optim.name == "sgd":
            assert torch.equal(part.moment, plain.state[value]["momentum_buffer"])


@of_each
def test_a_bad_step_changes_nothing(optim: OptimConfig) -> None:
    for parts in (parts_of(torch.float64), parts_of(torch.float32, splits=True)):
        step(parts, optim)
        before = states(parts)
        for part in parts:
            part.gradient.fill_(torch.nan)
        step(parts, optim, factor=float("inf"), is_bad=1.0)
        for part, state in zip(states(parts), before, strict=True):
            assert torch.equal(part, state) or torch.isnan(part).all()
        for part in parts:
            assert part.master.isfinite().all()
            part.gradient.fill_(1.0)
        step(parts, optim)
        assert not torch.equal(parts[-1].master, before[-1 if parts[-1].published is None else -2])


@of_each
def test_bits_do_not_depend_on_cuts_or_threads(optim: OptimConfig) -> None:
    whole, cut = parts_of(torch.float32), parts_of(torch.float32)
    pieces = []
    for part in cut:
        middle = part.gradient.numel() // 3 + 1
        pieces += [
            replace(part, **{name: getattr(part, name)[bounds] for name in FIELDS})
            for bounds in (slice(0, middle), slice(middle, None))
        ]
    step(whole, optim)
    torch.set_num_threads(2)
    step(pieces, optim, at_once=100)
    for own, expected in zip(states(cut), states(whole), strict=True):
        assert torch.equal(own, expected)


@of_each
def test_split_masters_and_bf16_moments_take_the_same_step(optim: OptimConfig) -> None:
    wide, narrow = parts_of(torch.float32), parts_of(torch.float32, moments=torch.bfloat16, splits=True)
    for part, other in zip(wide, narrow, strict=True):
        part.moment.copy_(other.moment)
        assert other.published is not None
        part.master.copy_(split.joined(other.published, other.master))
    step(wide, optim)
    step(narrow, optim)
    for part, other in zip(wide, narrow, strict=True):
        assert other.published is not None
        assert part.published is not None
        low = torch.empty_like(other.master)
        high = torch.empty_like(other.published)
        split.split_into(high, low, part.master)
        assert torch.equal(other.published, high)
        assert torch.equal(other.master, low)
        assert torch.equal(other.moment, part.moment.bfloat16())
        assert torch.equal(part.published, part.master.bfloat16())
