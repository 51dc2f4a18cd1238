"""The residual add and RMSNorm in one pass: against float64, and against the norm of a sum that was made elsewhere."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.test_rmsnorm import LONG_SHAPES, SHAPES, TOLERANCES, relative_error
from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.rmsnorm import add_rms_norm, add_rms_norm_reference, rms_norm

EPS = 1e-5
NAMES = ("y", "sum", "dx", "dresidual", "dweight")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill all memory that an op asks for with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    shapes = {"x": shape, "residual": shape, "weight": shape[-1:], "dy": shape, "dsum": shape}
    drawn = {name: torch.randn(each, generator=generator, dtype=torch.float64) for name, each in shapes.items()}
    return {name: each.to(device, dtype) for name, each in drawn.items()}


def results(case: dict[str, Tensor], form=add_rms_norm) -> tuple[Tensor, ...]:
    x, residual, weight = (case[name].detach().requires_grad_() for name in ("x", "residual", "weight"))
    y, total = form(x, residual, weight, EPS)
    torch.autograd.backward([y, total], [case["dy"], case["dsum"]])
    assert x.grad is not None
    assert residual.grad is not None
    assert weight.grad is not None
    return y.detach(), total.detach(), x.grad, residual.grad, weight.grad


def exact(case: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the results in float64 of the sum as the dtype rounds it."""
    total = case["x"] + case["residual"]
    wide = {name: each.cpu().double() for name, each in case.items()}
    return results({**wide, "x": total.cpu().double(), "residual": torch.zeros_like(wide["x"])}, add_rms_norm_reference)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + LONG_SHAPES, ids=str)
def test_equals_the_float64_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    case = inputs(shape, dtype, device)
    before = native.csrc_calls()
    got = results(case)
    after = native.csrc_calls()
    for op in ("add_rmsnorm_forward", "add_rmsnorm_backward"):
        assert after[op] == before.get(op, 0) + 1, f"the native {op} ran"
    assert torch.equal(got[1], case["x"] + case["residual"])
    for name, a, b in zip(NAMES, got, exact(case), strict=True):
        assert a.dtype == dtype
        assert relative_error(a.cpu(), b) < TOLERANCES[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(33, 64), (9, 2048)], ids=str)
def test_a_sum_from_elsewhere_has_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    case = inputs(shape, dtype, device)
    y, total, dx, dresidual, dweight = results(case)
    received = (case["x"] + case["residual"]).requires_grad_()
    weight = case["weight"].detach().requires_grad_()
    again, passed_on = add_rms_norm(received, None, weight, EPS)
    torch.autograd.backward([again, passed_on], [case["dy"], case["dsum"]])
    for a, b in (
        (again, y),
        (passed_on, total),
        (received.grad, dx),
        (received.grad, dresidual),
        (weight.grad, dweight),
    ):
        assert torch.equal(a, b)


def test_gradients_by_finite_differences(device: str) -> None:
    case = inputs((4, 9), torch.float64, device)
    leaves = tuple(case[name].requires_grad_() for name in ("x", "residual", "weight"))
    assert torch.autograd.gradcheck(lambda *each: add_rms_norm(*each, 1e-3), leaves)


def cases(max_rows: int, max_cols: int) -> dict[str, st.SearchStrategy[Any]]:
    return {
        "num_rows": st.integers(0, max_rows), "num_cols": st.integers(1, max_cols),
        "dtype": st.sampled_from(list(TOLERANCES)), "offset": st.integers(0, 9),
        "swapped": st.sets(st.sampled_from(["x", "residual", "dy", "dsum"])),
    }  # fmt: skip


@given(**cases(70, 700))
def test_any_shape_stride_and_alignment(num_rows: int, num_cols: int, **how: Any) -> None:
    compare_any("cpu", num_rows, num_cols, **how)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@given(**cases(5000, 20000))
def test_any_shape_stride_and_alignment_on_a_gpu(num_rows: int, num_cols: int, **how: Any) -> None:
    compare_any("cuda", min(num_rows, 10**7 // num_cols), num_cols // 16 * 16 or num_cols, **how)


def compare_any(device: str, num_rows: int, num_cols: int, dtype: torch.dtype, swapped: set[str], offset: int) -> None:
    case = inputs((num_rows, num_cols), dtype, device)
    for name, each in case.items():
        room = torch.empty(each.numel() + offset, dtype=dtype, device=device)
        case[name] = room[offset:].view_as(each).copy_(each)
        if name in swapped:
            case[name] = case[name].mT.contiguous().mT
    for name, a, b in zip(NAMES, results(case), exact(case), strict=True):
        assert float((a.cpu().double() - b).norm()) <= 2 * TOLERANCES[dtype] * float(b.norm()), name


def test_results_that_nobody_uses_need_no_gradient(device: str) -> None:
    case = inputs((6, 32), torch.float64, device)
    x, residual, weight = (case[name].requires_grad_() for name in ("x", "residual", "weight"))
    _, total = add_rms_norm(x, residual, weight, EPS)
    assert all(torch.equal(each, case["dy"]) for each in torch.autograd.grad(total, (x, residual), case["dy"]))
    y, _ = add_rms_norm(x, residual, weight, EPS)
    plain = (x + residual).detach().requires_grad_()
    (want,) = torch.autograd.grad(rms_norm(plain, weight, EPS), plain, case["dy"])
    assert torch.equal(torch.autograd.grad(y, x, case["dy"])[0], want)


def test_the_gradient_of_the_weight_can_be_taken_unrounded(device: str) -> None:
    case = inputs((40, 64), torch.bfloat16, device)
    taken: list[Tensor] = []
    y, _ = add_rms_norm(case["x"].requires_grad_(), case["residual"], case["weight"], EPS, taken.append)
    y.backward(case["dy"])
    (gradient,) = taken
    assert gradient.dtype == torch.float32
    assert relative_error(gradient.cpu(), exact({**case, "x": case["x"].detach()})[4]) < TOLERANCES[torch.float32] * 5


def test_a_residual_that_does_not_fit_is_named() -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    with pytest.raises(UserError, match=r"residual \[3, 8\] does not fit x \[4, 8\]"):
        add_rms_norm(x, x[1:], weight)
    with pytest.raises(UserError, match=r"residual is torch.float64 on cpu, x is torch.float32 on cpu"):
        add_rms_norm(x, x.double(), weight)
