"""Each op under torch.compile is one graph, of the plain form; all in one file, since the compiler costs seconds."""

import pytest
import torch

from trainer.ops.activation import SWIGLU, activate
from trainer.ops.dropout import dropout
from trainer.ops.norm import layer_norm, rms_norm
from trainer.ops.rope import rope, rope_turns


@pytest.mark.ci
@pytest.mark.slow
def test_dropout_has_the_same_bits() -> None:
    def form(x: torch.Tensor) -> torch.Tensor:
        return dropout(2 * x, 0.5, seed=7, step=3, layer=2, site=1, first_sample=5) + 1

    x = torch.randn(2, 3, 8)
    assert torch.equal(torch.compile(form, backend="eager", fullgraph=True)(x), form(x))


@pytest.mark.ci
@pytest.mark.slow
def test_rms_norm() -> None:
    def form(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(2 * x, weight) + 1

    x, weight = torch.randn(4, 16), torch.randn(16)
    compiled = torch.compile(form, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), form(x, weight))


@pytest.mark.slow
@pytest.mark.ci
def test_layer_norm() -> None:
    def form(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return layer_norm(2 * x, weight, weight) + 1

    x, weight = torch.randn(4, 16), torch.randn(16)
    compiled = torch.compile(form, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), form(x, weight))


@pytest.mark.ci
@pytest.mark.slow
def test_rope() -> None:
    turns = rope_turns(torch.arange(4), 8, 1e4, torch.float32)

    def form(qkv: torch.Tensor) -> torch.Tensor:
        return rope(2 * qkv, turns, 2, 1)[0] + 1

    qkv = torch.randn(4, 32)
    torch.testing.assert_close(torch.compile(form, backend="eager", fullgraph=True)(qkv), form(qkv))


@pytest.mark.slow
@pytest.mark.ci
def test_swiglu() -> None:
    def form(x: torch.Tensor) -> torch.Tensor:
        return activate(2 * x, SWIGLU) + 1

    x = torch.randn(4, 16)
    torch.testing.assert_close(torch.compile(form, backend="eager", fullgraph=True)(x), form(x))
