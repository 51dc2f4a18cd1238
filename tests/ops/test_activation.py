"""SwiGLU and GELU against float64, and their promises about bits and memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.activation import ACTIVATIONS, GELU, SWIGLU, Activation, activate, activate_reference

TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
# rows, columns: whole packs, odd rows, one element, a block's tile and a little more, columns that no block fills
SHAPES = [(1, 1), (7, 64), (3, 33), (130, 96), (5, 2056), (2, 5001), (1, 256)]
IDS = {"ids": str}
EACH = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def inputs_of(activation: Activation, shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """An input, with numbers at which exp overflows, and a gradient of the product."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = 2 * torch.randn(shape[0], shape[1] * activation.num_parts, generator=generator, dtype=torch.float64)
    far = torch.tensor([-1000.0, -90.0, -30.0, 0.0, -0.0, 30.0, 90.0, 1000.0], dtype=torch.float64)
    x.view(-1)[: 8 * (x.numel() > 64)] = far[: 8 * (x.numel() > 64)]
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(device, dtype), dy.to(device, dtype)


def results(activation: Activation, x: Tensor, dy: Tensor, form=activate) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = form(x, activation)
    return [y.detach(), *torch.autograd.grad(y, x, dy)]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want).norm() / want.norm().clamp(min=1e-300))


@EACH
@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
@pytest.mark.parametrize("shape", SHAPES, **IDS)
def test_equals_the_float64_reference(
    activation: Activation, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    x, dy = inputs_of(activation, shape, dtype, device)
    before = native.csrc_calls()
    got = results(activation, x, dy)
    after = native.csrc_calls()
    for op in ("activation_forward", "activation_backward"):
        assert after[op] == before.get(op, 0) + 1, f"the native {op} ran"
    want = results(activation, x.cpu().double(), dy.cpu().double(), activate_reference)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.device.type, a.shape) == (dtype, device, b.shape)
        assert relative_error(a, b) < TOLERANCES[dtype]


@EACH
@settings(max_examples=10)
@given(rows=st.integers(0, 40), cols=st.integers(0, 300), dtype=st.sampled_from(sorted(TOLERANCES, key=str)))
def test_any_shape(activation: Activation, rows: int, cols: int, dtype: torch.dtype) -> None:
    x, dy = inputs_of(activation, (rows, cols), dtype, "cpu")
    want = results(activation, x.double(), dy.double(), activate_reference)
    for a, b in zip(results(activation, x, dy), want, strict=True):
        assert relative_error(a, b) < TOLERANCES[dtype]


@EACH
def test_gradients_by_finite_differences(activation: Activation, device: str) -> None:
    x, _ = inputs_of(activation, (3, 8), torch.float64, device)
    assert torch.autograd.gradcheck(lambda x: activate(x, activation), x.requires_grad_())


@EACH
@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
@pytest.mark.parametrize("shape", [(7, 64), (3, 33), (0, 8)], **IDS)
def test_the_backward_in_place_makes_the_product_again(
    activation: Activation, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    x, dy = inputs_of(activation, shape, dtype, device)
    y, dx = results(activation, x, dy)
    x, dy = x.clone(), dy.clone()
    got = activation.backward(dy, x)
    assert [each.data_ptr() for each in got] == [x.data_ptr(), dy.data_ptr()]
    assert torch.equal(got[0], dx)
    assert torch.equal(got[1], y)


@EACH
@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
def test_an_element_does_not_depend_on_the_others(activation: Activation, dtype: torch.dtype, device: str) -> None:
    """Nor on its place, so that rows and columns may be cut."""
    x, dy = inputs_of(activation, (40, 96), dtype, device)
    whole = results(activation, x, dy)
    parts = [each.view(40, -1, 96) for each in (x, dy)]
    for rows, cols in ((slice(3, 4), slice(0, 96)), (slice(5, 40), slice(16, 64)), (slice(0, 40), slice(1, 30))):
        y, dx = results(activation, *(each[rows, :, cols].flatten(1) for each in parts))
        assert relative_error(y, whole[0][rows, cols].cpu().double()) < TOLERANCES[dtype]
        if device == "cpu":
            assert torch.equal(y, whole[0][rows, cols])
            assert torch.equal(dx, whole[1].view(40, -1, 96)[rows, :, cols].flatten(1))


@EACH
@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
def test_bits_do_not_depend_on_threads_or_the_instruction_set(
    activation: Activation, dtype: torch.dtype, every_simd: list[int]
) -> None:
    x, dy = inputs_of(activation, (300, 501), dtype, "cpu")
    want = results(activation, x, dy)
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for a, b in zip(results(activation, x, dy), want, strict=True):
                assert torch.equal(a, b)


@EACH
def test_bf16_is_float32_rounded_once(activation: Activation) -> None:
    x, dy = inputs_of(activation, (9, 70), torch.bfloat16, "cpu")
    for narrow, wide in zip(results(activation, x, dy), results(activation, x.float(), dy.float()), strict=True):
        assert torch.equal(narrow, wide.bfloat16())


@EACH
@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
def test_tensors_that_start_anywhere(activation: Activation, dtype: torch.dtype, device: str) -> None:
    x, dy = inputs_of(activation, (6, 64), dtype, device)
    want = results(activation, x, dy)
    views = [each.mT.contiguous().mT for each in (x, dy)]  # columns first in memory
    for a, b in zip(results(activation, *views), want, strict=True):
        assert torch.equal(a, b)
    shifted = [torch.empty(each.numel() + 1, dtype=dtype, device=device)[1:].view_as(each).copy_(each)
               for each in (x, dy)]  # fmt: skip
    got = activation.forward(shifted[0]), activation.backward(shifted[1], shifted[0])[0]
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b.cpu().double()) < TOLERANCES[dtype]


@EACH
def test_what_is_not_finite_stays_so(activation: Activation, device: str) -> None:
    x = torch.zeros(3, 8 * activation.num_parts, device=device)
    for row, value in enumerate((float("inf"), float("-inf"), float("nan"))):
        x[row, row] = value
        x[row, row + 8 * (activation.num_parts - 1)] = value
    y = activate(x, activation)
    assert [bool(y[row].isfinite().all()) for row in range(3)] in ([False] * 3, [False, True, False])
    assert y[2].isnan().sum() == 1


def test_a_large_tensor(device: str) -> None:
    x, dy = inputs_of(SWIGLU, (600, 1024), torch.bfloat16, device)
    want = results(SWIGLU, x.cpu().double(), dy.cpu().double(), activate_reference)
    for a, b in zip(results(SWIGLU, x, dy), want, strict=True):
        assert relative_error(a, b) < TOLERANCES[torch.bfloat16]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rows", "cols"), [(70_000, 2048), (3, 2**25), (2**18, 8192)], **IDS)
def test_more_rows_and_elements_than_a_grid_or_32_bits_hold(rows: int, cols: int) -> None:
    x = torch.randn(rows, 2 * cols, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda")
    y = SWIGLU.forward(x)
    ends = [(each[:2].clone(), each[-2:].clone()) for each in (x, dy, y)]
    dx, again = SWIGLU.backward(dy, x)
    assert torch.equal(again[-2:], ends[2][1])
    for at, rows_at in enumerate((slice(0, 2), slice(-2, None))):
        want = results(SWIGLU, ends[0][at].cpu().double(), ends[1][at].cpu().double(), activate_reference)
        assert relative_error(ends[2][at], want[0]) < TOLERANCES[torch.bfloat16]
        assert relative_error(dx[rows_at], want[1]) < TOLERANCES[torch.bfloat16]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UserError, match=r"swiglu: x \[2, 5\] .* does not hold dense rows of 2 equal parts"):
        activate(torch.ones(2, 5), SWIGLU)
    with pytest.raises(UserError, match=r"gelu: x \[3, 2\] with strides \[1, 3\]"):
        GELU.forward(torch.ones(2, 3).mT)
    with pytest.raises(UserError, match=r"not torch\.int32"):
        activate(torch.ones(2, 4, dtype=torch.int32), GELU)
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="bad argument"):
        native.call("activation_forward", x, 7, x.data_ptr(), x.data_ptr(), 2, 4)


@EACH
@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
def test_the_largest_numbers_saturate(activation: Activation, dtype: torch.dtype, device: str) -> None:
    most = torch.finfo(dtype).max if dtype != torch.float64 else 1e300
    large = min(1e20, most / 2)
    far = torch.tensor([[-most], [-large], [large], [most]], dtype=torch.float64)
    x = torch.cat([far, torch.ones_like(far)], 1) if activation.num_parts == 2 else far
    y, dx = results(activation, x.to(device, dtype), torch.ones(4, 1, dtype=dtype, device=device))
    assert y.flatten().tolist() == [0.0, 0.0, *x[2:, 0].to(dtype).tolist()]
    assert dx[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
