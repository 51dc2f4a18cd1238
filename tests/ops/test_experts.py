"""Rows of tokens by expert: their order, their weights inside the nonlinearity, and their sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.ops.experts import combine, sort_rows, weighted_swiglu, weighted_swiglu_backward

CHOICES = st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3, unique=True), min_size=1, max_size=20)


def test_the_example_of_two_tokens() -> None:
    rows, counts = sort_rows(torch.tensor([[2, 0], [0, 1]]), 4)
    assert rows.tolist() == [1, 2, 3, 0]
    assert counts.tolist() == [2, 1, 1, 0]


@settings(max_examples=20)
@given(choices=CHOICES)
def test_rows_are_sorted_by_expert_and_then_by_number(choices: list[list[int]]) -> None:
    flat = [expert for row in choices for expert in row]
    rows, counts = sort_rows(torch.tensor(choices), 7)
    assert rows.tolist() == sorted(range(len(flat)), key=lambda row: (flat[row], row))
    assert counts.tolist() == [flat.count(expert) for expert in range(7)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_token_is_the_sum_of_its_rows_from_the_first_expert_on(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, _ = sort_rows(torch.tensor([[2, 0, 1], [0, 1, 2], [1, 2, 0]]), 3)
    y = torch.randn(9, 4, generator=generator, dtype=torch.float64).to(dtype)
    out = combine(y, rows, 3, 3)
    places = {row: place for place, row in enumerate(rows.tolist())}
    for token in range(3):
        first, second, third = (
            y[places[3 * token + k]].to(torch.promote_types(dtype, torch.float32)) for k in range(3)
        )
        assert torch.equal(out[token], (first + second + third).to(dtype))


def test_weights_and_rows_have_the_gradients_of_autograd() -> None:
    generator = torch.Generator().manual_seed(2)
    packed, weights, dact = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 10), (7,), (7, 5))
    )
    packed.requires_grad_()
    weights.requires_grad_()
    act = weighted_swiglu(packed, weights)
    expected = torch.autograd.grad(act, (packed, weights), dact)
    dpacked, dweights, again = weighted_swiglu_backward(dact, packed.detach(), weights.detach())
    torch.testing.assert_close((dpacked, dweights), expected)
    torch.testing.assert_close(again, act.detach())


def test_narrow_rows_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(64, 32, generator=generator)
    packed, weights = wide.bfloat16(), torch.rand(64, generator=generator)
    exact = weighted_swiglu(packed.double(), weights.double())
    assert torch.equal(weighted_swiglu(packed, weights), weighted_swiglu(packed.float(), weights).bfloat16())
    gap = (weighted_swiglu(packed, weights).double() - exact).norm() / exact.norm()
    assert gap < 6e-3
