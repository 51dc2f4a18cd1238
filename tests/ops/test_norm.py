"""RMSNorm and LayerNorm against float64, and their promises about bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.norm import add_norm_reference, layer_norm, rms_norm

TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
# every shape of the CUDA kernels: a warp's rows, a block's, odd ones, and rows longer than registers hold
SHAPES = [(1, 2), (7, 64), (3, 5, 7), (2, 3, 4, 128), (33, 768), (5, 1001), (9, 2048), (6, 2500), (4, 4096)]
LONG_SHAPES = [(3, 8192), (2, 16384), (5, 20000), (2, 9001)]
NORMS = {"rms": rms_norm, "layer": layer_norm}

Inputs = tuple[Tensor, tuple[Tensor, ...], Tensor]


def inputs(norm: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Return x, the weights (weight, for LayerNorm also bias) and dy."""
    generator = torch.Generator().manual_seed(len(shape) * 1000 + shape[-1])
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = 1 + 0.2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = [weight, torch.randn(shape[-1], generator=generator, dtype=torch.float64)][: 1 + (norm == "layer")]
    return (x + 0.5).to(device, dtype), tuple(each.to(device, dtype) for each in weights), dy.to(device, dtype)


def results(x: Tensor, weights: tuple[Tensor, ...], dy: Tensor, eps: float = 1e-5) -> tuple[Tensor, ...]:
    """Return y, dx and the gradients of the weights."""
    x, weights = x.detach().requires_grad_(), tuple(each.detach().requires_grad_() for each in weights)
    y = apply(x, *weights, eps)
    return y.detach(), *torch.autograd.grad(y, (x, *weights), dy)


def apply(x: Tensor, weight: Tensor, *bias_and_eps: Tensor | float) -> Tensor:
    return (rms_norm if len(bias_and_eps) == 1 else layer_norm)(x, weight, *bias_and_eps)  # type: ignore[operator]


def exact(x: Tensor, weights: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """Return the same of the plain form in float64."""
    x, weights = x.detach().cpu().double().requires_grad_(), tuple(each.cpu().double() for each in weights)
    weights = tuple(each.detach().requires_grad_() for each in weights)
    y, _ = add_norm_reference(x, None, weights[0], weights[1] if len(weights) > 1 else None, 1e-5)
    return y.detach(), *torch.autograd.grad(y, (x, *weights), dy.cpu().double())


def relative_error(norm: str, got: Tensor, want: Tensor) -> float:
    """Return the error by the size of what is wanted; LayerNorm's, which may cancel (two columns), counts as 1s."""
    size = float(want.double().norm())
    return float((got.double() - want.double()).norm()) / (max(size, want.numel() ** 0.5) if norm == "layer" else size)


def assert_same_bits(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), ("y", "dx", "dweight", "dbias")[number]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + LONG_SHAPES, ids=str)
def test_equals_the_float64_reference(norm: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    case = inputs(norm, shape, dtype, device)
    before = native.csrc_calls()
    got = results(*case)
    after = native.csrc_calls()
    for op in ("add_norm_forward", "add_norm_backward"):
        assert after[op] == before.get(op, 0) + 1, f"the native {op} ran"
    for a, b in zip(got, exact(*case), strict=True):
        assert a.dtype == dtype
        assert a.device.type == device
        assert relative_error(norm, a.cpu(), b) < TOLERANCES[dtype]


def test_equals_torch(device: str) -> None:
    x, (weight, bias), _ = inputs("layer", (6, 10, 96), torch.float64, device)
    functional = torch.nn.functional
    for got, want in (
        (rms_norm(x, weight, 1e-5), functional.rms_norm(x, (96,), weight, 1e-5)),
        (layer_norm(x, weight, bias, 1e-5), functional.layer_norm(x, (96,), weight, bias, 1e-5)),
    ):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_the_variance_is_that_around_the_mean(device: str) -> None:
    """A mean of squares less the square of the mean would lose all digits here."""
    x, weights, dy = inputs("layer", (5, 300), torch.float32, device)
    far = (x + 4096).requires_grad_()
    want = exact(far, weights, dy)
    assert relative_error("layer", results(far, weights, dy)[0].cpu(), want[0]) < 1e-3


def test_gradients_by_finite_differences(norm: str, device: str) -> None:
    x, weights, _ = inputs(norm, (4, 3, 9), torch.float64, device)
    leaves = tuple(each.requires_grad_() for each in (x, *weights))
    assert torch.autograd.gradcheck(lambda *each: apply(*each, 1e-3), leaves)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_cols", [40, 1000, 3000])
def test_a_row_does_not_depend_on_the_others(norm: str, num_cols: int, dtype: torch.dtype, device: str) -> None:
    x, weights, dy = inputs(norm, (150, num_cols), dtype, device)
    y, dx, *_ = results(x, weights, dy)
    for start, stop in ((0, 1), (3, 4), (17, 150)):
        part_y, part_dx, *_ = results(x[start:stop], weights, dy[start:stop])
        assert torch.equal(part_y, y[start:stop])
        assert torch.equal(part_dx, dx[start:stop])


@given(
    norm=st.sampled_from(list(NORMS)), num_rows=st.integers(1, 3000), num_cols=st.integers(400, 600),
    num_threads=st.integers(2, 5),
)  # fmt: skip
def test_bits_do_not_depend_on_threads(norm: str, num_rows: int, num_cols: int, num_threads: int) -> None:
    case = inputs(norm, (num_rows, num_cols), torch.float32)
    torch.set_num_threads(1)
    want = results(*case)
    torch.set_num_threads(num_threads)
    assert_same_bits(results(*case), want)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_instruction_set(
    norm: str, shape: tuple[int, ...], dtype: torch.dtype, every_simd: list[int]
) -> None:
    case = inputs(norm, shape, dtype)
    outcomes = []
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        assert native.simd() == native.SIMD_NAMES[simd]
        outcomes.append(results(*case))
    for other in outcomes[1:]:
        assert_same_bits(other, outcomes[0])


def test_gradients_of_the_weights_repeat_bit_for_bit(norm: str, device: str) -> None:
    case = inputs(norm, (5000, 256), torch.float32, device)
    assert_same_bits(results(*case), results(*case))


@pytest.mark.parametrize("shape", [(70, 33), (12, 768)], ids=str)
def test_bf16_is_float32_rounded_once(norm: str, shape: tuple[int, ...], every_simd: list[int]) -> None:
    x, weights, dy = inputs(norm, shape, torch.bfloat16)
    wide = results(x.float(), tuple(each.float() for each in weights), dy.float())
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        assert_same_bits(results(x, weights, dy), tuple(each.bfloat16() for each in wide))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_nan_and_infinity_stay_in_their_row(norm: str, dtype: torch.dtype, device: str) -> None:
    x, weights, _ = inputs(norm, (5, 37), dtype, device)
    clean = apply(x, *weights, 1e-5)
    x[1, 3], x[3, 36] = float("nan"), float("inf")
    y = apply(x, *weights, 1e-5)
    assert y[1].isnan().all()
    assert y[3, 36].isnan()  # infinity times 1 / infinity
    assert torch.equal(y[::2], clean[::2])


def test_strided_inputs(norm: str, device: str) -> None:
    x, weights, dy = inputs(norm, (6, 8, 20), torch.float64, device)
    want = results(x, weights, dy)
    strided = tuple(each.repeat_interleave(2)[::2] for each in weights)
    assert_same_bits(results(x.mT.contiguous().mT, strided, dy.mT.contiguous().mT), want)
    ones = torch.ones(1, dtype=torch.float64, device=device)
    assert_same_bits(results(x, weights, ones.expand_as(x)), results(x, weights, torch.ones_like(x)))


@pytest.mark.parametrize("offset", [1, 3])
def test_unaligned_inputs(norm: str, offset: int, device: str) -> None:
    x, weights, dy = inputs(norm, (40, 256), torch.bfloat16, device)

    def shifted(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
        return room[offset:].view_as(tensor).copy_(tensor)

    got = results(shifted(x), tuple(map(shifted, weights)), shifted(dy))
    for a, b in zip(got, exact(x, weights, dy), strict=True):
        assert relative_error(norm, a.cpu(), b) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)], ids=str)
def test_empty(norm: str, shape: tuple[int, ...], device: str) -> None:
    x, weights, dy = inputs(norm, shape, torch.float32, device)
    y, dx, *dweights = results(x, weights, dy)
    assert y.shape == dx.shape == x.shape
    assert all(torch.equal(each, torch.zeros_like(weights[0])) for each in dweights)


def test_many_rows_of_few_columns(norm: str, device: str) -> None:
    case = inputs(norm, (70_000, 3), torch.float32, device)
    for got, want in zip(results(*case), exact(*case), strict=True):
        assert relative_error(norm, got.cpu(), want) < (5 if norm == "layer" else 1) * TOLERANCES[torch.float32]


def test_bad_arguments_are_named() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(UserError, match=r"weight \[4\] does not fit the last dim of x \[4, 8\]"):
        rms_norm(x, torch.ones(4))
    with pytest.raises(UserError, match=r"does not fit the last dim of x \[\]"):
        rms_norm(torch.tensor(1.0), torch.ones(1))
    with pytest.raises(UserError, match=r"weight is torch.float64 on cpu, x is torch.float32 on cpu"):
        rms_norm(x, torch.ones(8, dtype=torch.float64))
    with pytest.raises(UserError, match=r"bias \[4\] does not fit x \[4, 8\]"):
        layer_norm(x, torch.ones(8), torch.ones(4))
    with pytest.raises(UserError, match=r"takes float64, float32, bfloat16 or float16, not torch.int32"):
        rms_norm(x.int(), torch.ones(8).int())
    with pytest.raises(UserError, match="not on meta"):
        rms_norm(x.to("meta"), torch.ones(8, device="meta"))
