"""Halves: every one is read as it is, and every float is rounded to the nearest, whatever the instruction set."""

import pytest
import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.config import OptimConfig
from trainer.ops import native, split
from trainer.ops.adamw import Interval, IntervalTable
from trainer.ops.dropout import dropout


def all_halves() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)


def published(masters: Tensor) -> Tensor:
    """Masters in halves, by an update that leaves them as they are."""
    states = [torch.zeros_like(masters) for _ in range(3)]
    halves = torch.zeros_like(masters, dtype=torch.float16)
    table = IntervalTable([Interval(states[0], states[1], states[2], masters, halves, False, 0)])
    one, zero = (torch.full((), value, dtype=torch.float64, device=masters.device) for value in (1.0, 0.0))
    table.adamw(OptimConfig(), 1.0, 0, factor=one, is_bad=zero)
    return halves


def require_same(halves: Tensor, expected: Tensor) -> None:
    is_nan = expected.isnan()
    assert torch.equal(halves.isnan(), is_nan)
    assert torch.equal(halves[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


def test_every_half_is_read_and_written_as_it_is(every_simd: list[int]) -> None:
    halves = all_halves()
    p = 2.0**-60  # so that nothing is dropped, and what is kept is divided by 1
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        same = dropout(halves.view(1, 1, -1), p, seed=0, step=0, layer=0, site=0, first_sample=0).flatten()
        require_same(same, halves)


def test_floats_are_rounded_to_the_nearest_half(every_simd: list[int]) -> None:
    numbers = all_halves().float()
    numbers = numbers[numbers.isfinite()]
    near = [numbers.view(torch.int32) + ulps for ulps in (-0x1001, -0x1000, -0xFFF, -1, 1, 0xFFF, 0x1000, 0x1001)]
    bits = torch.randint(-(1 << 31), 1 << 31, (100_003,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    masters = torch.cat([each.view(torch.float32) for each in (*near, bits)])
    masters = torch.cat([masters, torch.tensor([65519.9, 65520.0, 1e30, float("inf"), -65520.0, 2.0**-25, 2.0**-24])])
    masters = masters[~masters.isnan()]
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        require_same(published(masters.clone()), masters.half())


def test_masters_are_published_in_halves(device: str) -> None:
    masters = torch.randn(4099, generator=torch.Generator().manual_seed(2)).to(device) * 1e-3
    for shift in (0, 1):
        assert torch.equal(published(masters[shift:].clone()), masters[shift:].half())


def test_a_master_is_not_split_into_a_half() -> None:
    zeros, halves = [torch.zeros(3) for _ in range(3)], torch.zeros(3, dtype=torch.float16)
    with pytest.raises(UserError, match=r"published is torch.float16 .* not torch.bfloat16"):
        IntervalTable([Interval(zeros[0], zeros[1], zeros[2], torch.zeros(3, dtype=split.LOW), halves, False, 0)])
