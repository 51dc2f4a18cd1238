"""A backward that is differentiable once: its guard is there where a graph of gradients is asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.ops.norm import rms_norm
from trainer.ops.once import differentiable_once


class Doubled(torch.autograd.Function):
    modes: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        Doubled.modes.append(torch.is_grad_enabled())
        return 2 * dy


@pytest.mark.parametrize("makes_graph", [False, True])
def test_no_graph_is_made_inside_and_a_second_gradient_is_refused(*, makes_graph: bool) -> None:
    Doubled.modes = []
    x = torch.ones(3, requires_grad=True)
    doubled: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
    (dx,) = torch.autograd.grad(doubled.square().sum(), x, create_graph=makes_graph)
    assert dx.tolist() == [8.0] * 3
    assert Doubled.modes == [False]
    assert dx.requires_grad == makes_graph
    if makes_graph:
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.backward(dx.sum())


def test_an_op_is_differentiable_once() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.backward(dx.sum())
