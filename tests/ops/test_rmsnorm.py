"""RMSNorm against float64, and its promises about bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.rmsnorm import rms_norm, rms_norm_reference

TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 6e-3}
# every shape of the CUDA kernels: a warp's rows, a block's, odd ones, and rows longer than registers hold
SHAPES = [(1, 2), (7, 64), (3, 5, 7), (2, 3, 4, 128), (33, 768), (5, 1001), (9, 2048), (6, 2500), (4, 4096)]
LONG_SHAPES = [(3, 8192), (2, 16384), (5, 20000), (2, 9001)]

Results = tuple[Tensor, Tensor, Tensor]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Results:
    generator = torch.Generator().manual_seed(len(shape) * 1000 + shape[-1])
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = 1 + 0.2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(device, dtype), weight.to(device, dtype), dy.to(device, dtype)


def results(x: Tensor, weight: Tensor, dy: Tensor, eps: float = 1e-5, *, form=rms_norm) -> Results:
    """y, dx, dweight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = form(x, weight, eps)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    return y.detach(), x.grad, weight.grad


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def assert_same_bits(got: Results, want: Results) -> None:
    for name, a, b in zip(("y", "dx", "dweight"), got, want, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + LONG_SHAPES, ids=str)
def test_equals_the_float64_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, weight, dy = inputs(shape, dtype, device)
    before = native.csrc_calls()
    got = results(x, weight, dy)
    after = native.csrc_calls()
    for op in ("add_rmsnorm_forward", "add_rmsnorm_backward"):
        assert after[op] == before.get(op, 0) + 1, f"the native {op} ran"
    want = results(x.cpu().double(), weight.cpu().double(), dy.cpu().double(), form=rms_norm_reference)
    for name, a, b in zip(("y", "dx", "dweight"), got, want, strict=True):
        assert a.dtype == dtype
        assert a.device.type == device
        assert relative_error(a.cpu(), b) < TOLERANCES[dtype], name


def test_equals_torch(device: str) -> None:
    x, weight, _ = inputs((6, 10, 96), torch.float64, device)
    want = torch.nn.functional.rms_norm(x, (96,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), want, rtol=1e-13, atol=1e-13)


def test_gradients_by_finite_differences(device: str) -> None:
    x, weight, _ = inputs((4, 3, 9), torch.float64, device)
    assert torch.autograd.gradcheck(rms_norm, (x.requires_grad_(), weight.requires_grad_(), 1e-3))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_cols", [40, 1000, 3000])
def test_a_row_does_not_depend_on_the_others(num_cols: int, dtype: torch.dtype, device: str) -> None:
    x, weight, dy = inputs((150, num_cols), dtype, device)
    y, dx, _ = results(x, weight, dy)
    for start, stop in ((0, 1), (3, 4), (17, 150)):
        part_y, part_dx, _ = results(x[start:stop], weight, dy[start:stop])
        assert torch.equal(part_y, y[start:stop])
        assert torch.equal(part_dx, dx[start:stop])


@given(num_rows=st.integers(1, 3000), num_cols=st.integers(400, 600), num_threads=st.integers(2, 5))
def test_bits_do_not_depend_on_threads(num_rows: int, num_cols: int, num_threads: int) -> None:
    x, weight, dy = inputs((num_rows, num_cols), torch.float32)
    torch.set_num_threads(1)
    want = results(x, weight, dy)
    torch.set_num_threads(num_threads)
    assert_same_bits(results(x, weight, dy), want)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_instruction_set(
    shape: tuple[int, ...], dtype: torch.dtype, every_simd: list[int]
) -> None:
    x, weight, dy = inputs(shape, dtype)
    found = []
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        assert native.simd() == native.SIMD_NAMES[simd]
        found.append(results(x, weight, dy))
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_weight_gradient_repeats_bit_for_bit(device: str) -> None:
    x, weight, dy = inputs((5000, 256), torch.float32, device)
    assert_same_bits(results(x, weight, dy), results(x, weight, dy))


@pytest.mark.parametrize("shape", [(70, 33), (12, 768)], ids=str)
def test_bf16_is_float32_rounded_once(shape: tuple[int, ...], every_simd: list[int]) -> None:
    x, weight, dy = inputs(shape, torch.bfloat16)
    want = tuple(one.bfloat16() for one in results(x.float(), weight.float(), dy.float()))
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        y, dx, dweight = results(x, weight, dy)
        assert_same_bits((y, dx, dweight), want)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype, device: str) -> None:
    x, weight, _ = inputs((5, 37), dtype, device)
    clean = rms_norm(x, weight)
    x[1, 3], x[3, 36] = float("nan"), float("inf")
    y = rms_norm(x, weight)
    assert y[1].isnan().all()
    assert y[3, 36].isnan()  # infinity times 1 / infinity
    assert torch.equal(y[::2], clean[::2])


def test_strided_inputs(device: str) -> None:
    x, weight, dy = inputs((6, 8, 20), torch.float64, device)
    want = results(x, weight, dy)
    swapped = results(x.mT.contiguous().mT, weight.repeat_interleave(2)[::2], dy.mT.contiguous().mT)
    assert_same_bits(swapped, want)
    ones = torch.ones(1, dtype=torch.float64, device=device)
    assert_same_bits(results(x, weight, ones.expand_as(x)), results(x, weight, torch.ones_like(x)))


@pytest.mark.parametrize("offset", [1, 3])
def test_unaligned_inputs(offset: int, device: str) -> None:
    x, weight, dy = inputs((40, 256), torch.bfloat16, device)
    want = results(x.cpu().double(), weight.cpu().double(), dy.cpu().double(), form=rms_norm_reference)
    shifted = []
    for tensor in (x, weight, dy):
        room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
        shifted.append(room[offset:].view_as(tensor).copy_(tensor))
    for got, exact in zip(results(*shifted), want, strict=True):
        assert relative_error(got.cpu(), exact) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)], ids=str)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    x, weight, dy = inputs(shape, torch.float32, device)
    y, dx, dweight = results(x, weight, dy)
    assert y.shape == dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros_like(weight))


def test_many_rows_of_few_columns(device: str) -> None:
    x, weight, dy = inputs((70_000, 2), torch.float32, device)
    for got, want in zip(
        results(x, weight, dy), results(x.double(), weight.double(), dy.double(), form=rms_norm_reference), strict=True
    ):
        assert relative_error(got, want) < TOLERANCES[torch.float32]


def test_bad_arguments_are_named() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(UserError, match=r"weight \[4\] does not fit the last dim of x \[4, 8\]"):
        rms_norm(x, torch.ones(4))
    with pytest.raises(UserError, match=r"does not fit the last dim of x \[\]"):
        rms_norm(torch.tensor(1.0), torch.ones(1))
    with pytest.raises(UserError, match=r"weight is torch.float64 on cpu, x is torch.float32 on cpu"):
        rms_norm(x, torch.ones(8, dtype=torch.float64))
    with pytest.raises(UserError, match=r"takes float64, float32 or bfloat16, not torch.float16"):
        rms_norm(x.half(), torch.ones(8).half())
    with pytest.raises(UserError, match="not on meta"):
        rms_norm(x.to("meta"), torch.ones(8, device="meta"))
