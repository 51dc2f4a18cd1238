"""The linear op against autograd on leaves, and its gradients in the wide dtype."""

import pytest
import torch
import torch.nn.functional as F

from tests.trainer.support.weights import handle
from trainer.linear.linear import add_bias, linear
from trainer.linear.weight import add_product
from trainer.ops.activation import ACTIVATIONS, SWIGLU, Activation, activate


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_are_those_of_leaves(has_bias: bool) -> None:
    x, values, bias_values = random(7, 3).requires_grad_(), random(5, 3, seed=1), random(5, seed=2)
    (weight, gradient), (bias, bias_gradient) = handle(values), handle(bias_values)
    leaves = values.clone().requires_grad_(), bias_values.clone().requires_grad_()
    own_x, dy = x.detach().clone().requires_grad_(), random(7, 5, seed=3)
    for _ in range(2):  # the second adds
        y = linear(x, weight, bias if has_bias else None)
        expected = F.linear(own_x, leaves[0], leaves[1] if has_bias else None)
        torch.testing.assert_close(y, expected)
        y.backward(dy)
        expected.backward(dy)
    torch.testing.assert_close(x.grad, own_x.grad)
    torch.testing.assert_close(gradient, leaves[0].grad)
    if has_bias:
        torch.testing.assert_close(bias_gradient, leaves[1].grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_an_op_that_makes_x_again_is_the_op_and_a_linear(
    has_bias: bool, activation: Activation, dtype: torch.dtype
) -> None:
    values, bias_values, dy = (
        random(5, 12, dtype=dtype, seed=1),
        random(5, dtype=dtype, seed=2),
        random(7, 5, dtype=dtype),
    )
    packed, results, kept_tensors = random(7, 12 * activation.num_parts, dtype=dtype), [], []
    for is_one in (True, False):
        (weight, gradient), (bias, bias_gradient) = handle(values), handle(bias_values)
        own_bias = bias if has_bias else None
        sums = torch.zeros_like(packed)
        for _ in range(2):  # the second adds
            x = packed.clone().requires_grad_()
            if is_one:
                y = linear(x, weight, own_bias, make_x=activation)
            else:
                y = linear(activate(x, activation), weight, own_bias)
            saved = [each.shape for each in y.grad_fn.saved_tensors]
            y.backward(dy)
            sums += x.grad
        kept_tensors.append(saved)
        results.append([y, sums, gradient] + [bias_gradient] * has_bias)
    assert kept_tensors == [[packed.shape], [(7, 12)]], "the product is not saved"
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_a_backward_that_wrote_over_what_was_saved_runs_once() -> None:
    (weight, _), x = handle(random(5, 12)), random(7, 24).requires_grad_()
    loss = linear(1 * x, weight, make_x=SWIGLU).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@torch.no_grad()
def test_without_gradients_nothing_is_overwritten() -> None:
    (weight, _), x = handle(random(5, 12)), random(7, 24)
    before = x.clone()
    torch.testing.assert_close(linear(x, weight, make_x=SWIGLU), activate(x, SWIGLU) @ weight.values.T)
    assert torch.equal(x, before)
    with torch.inference_mode():
        assert linear(x.clone(), weight, make_x=SWIGLU).shape == (7, 5)


def test_a_bias_after_a_sum_has_its_gradient() -> None:
    x, (bias, gradient) = random(4, 3).requires_grad_(), handle(random(3, seed=1))
    y = add_bias(x, bias)
    torch.testing.assert_close(y, x + bias.values)
    y.backward(torch.ones(4, 3, dtype=torch.float64))
    assert gradient.tolist() == [4.0] * 3
    assert x.grad is not None
    assert x.grad.eq(1).all()


def test_gradients_of_bf16_are_never_rounded_to_it() -> None:
    weight, gradient = handle(torch.ones(1, 2, dtype=torch.bfloat16))
    for value in (256.0, 1.0):  # their sum is not a bf16
        x = torch.full((1, 2), value, dtype=torch.bfloat16, requires_grad=True)
        linear(x, weight).sum().backward()
    assert gradient.dtype == torch.float32
    assert gradient.tolist() == [[257.0, 257.0]]
    out = torch.empty(1, 1)
    add_product(out, torch.ones(257, 1, dtype=torch.bfloat16), torch.ones(257, 1, dtype=torch.bfloat16), first=True)
    assert out.item() == 257.0


def test_an_input_that_would_lose_the_gradient_is_refused() -> None:
    weight, _ = handle(random(5, 3))
    with pytest.raises(AssertionError, match="the input of w requires no gradient"):
        linear(random(7, 3), weight)
    with torch.no_grad():
        assert linear(random(7, 3), weight).shape == (7, 5)
