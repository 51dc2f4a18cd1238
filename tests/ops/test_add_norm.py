"""The residual add and a norm in one pass: against float64, and against the norm of a sum that was made elsewhere."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.test_norm import LONG_SHAPES, NORMS, SHAPES, TOLERANCES, relative_error
from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.norm import add_norm, add_norm_reference, rms_norm

EPS = 1e-5
LEAVES = ("x", "residual", "weight", "bias")
NAMES = ("y", "sum", "dx", "dresidual", "dweight", "dbias")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill all memory that an op asks for with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(norm: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    shapes = {"x": shape, "residual": shape, "weight": shape[-1:], "dy": shape, "dsum": shape}
    if norm == "layer":
        shapes["bias"] = shape[-1:]
    drawn = {name: torch.randn(each, generator=generator, dtype=torch.float64) for name, each in shapes.items()}
    return {name: each.to(device, dtype) for name, each in drawn.items()}


def leaves_of(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: case[name].detach().requires_grad_() for name in LEAVES if name in case}


def apply(leaves: dict[str, Tensor], form: Any = add_norm) -> tuple[Tensor, Tensor]:
    y, total = form(leaves["x"], leaves.get("residual"), leaves["weight"], leaves.get("bias"), EPS)
    return y, total


def results(case: dict[str, Tensor], form: Any = add_norm) -> tuple[Tensor, ...]:
    leaves = leaves_of(case)
    y, total = apply(leaves, form)
    return y.detach(), total.detach(), *torch.autograd.grad([y, total], [*leaves.values()], [case["dy"], case["dsum"]])


def exact(case: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the results in float64 of the sum as the dtype rounds it."""
    total = case["x"] + case["residual"]
    wide = {name: each.cpu().double() for name, each in case.items()}
    return results({**wide, "x": total.cpu().double(), "residual": torch.zeros_like(wide["x"])}, add_norm_reference)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + LONG_SHAPES, ids=str)
def test_equals_the_float64_reference(norm: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    case = inputs(norm, shape, dtype, device)
    before = native.csrc_calls()
    got = results(case)
    after = native.csrc_calls()
    for op in ("add_norm_forward", "add_norm_backward"):
        assert after[op] == before.get(op, 0) + 1, f"the native {op} ran"
    assert torch.equal(got[1], case["x"] + case["residual"])
    for name, a, b in zip(NAMES[: len(got)], got, exact(case), strict=True):
        assert a.dtype == dtype
        assert relative_error(norm, a.cpu(), b) < TOLERANCES[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(33, 64), (9, 2048)], ids=str)
def test_a_sum_from_elsewhere_has_the_same_bits(
    norm: str, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    case = inputs(norm, shape, dtype, device)
    y, total, dx, dresidual, *dweights = results(case)
    received = {**case, "x": case["x"] + case["residual"]}
    del received["residual"]
    again, passed_on, d_received, *d_again = results(received)
    want = (y, total, dx, dresidual, *dweights)
    for a, b in zip((again, passed_on, d_received, d_received, *d_again), want, strict=True):
        assert torch.equal(a, b)


def test_gradients_by_finite_differences(norm: str, device: str) -> None:
    leaves = leaves_of(inputs(norm, (4, 9), torch.float64, device))

    def form(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return apply(dict(zip(leaves, tensors, strict=True)))

    assert torch.autograd.gradcheck(form, tuple(leaves.values()))


def cases(max_rows: int, max_cols: int) -> dict[str, st.SearchStrategy[Any]]:
    return {
        "norm": st.sampled_from(list(NORMS)),
        "num_rows": st.integers(0, max_rows), "num_cols": st.integers(1, max_cols),
        "dtype": st.sampled_from(list(TOLERANCES)), "offset": st.integers(0, 9),
        "swapped": st.sets(st.sampled_from(["x", "residual", "dy", "dsum"])),
    }  # fmt: skip


@given(**cases(70, 700))
def test_any_shape_stride_and_alignment(norm: str, num_rows: int, num_cols: int, **how: Any) -> None:
    compare_any(inputs(norm, (num_rows, num_cols), how.pop("dtype")), **how)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@given(**cases(5000, 20000))
def test_any_shape_stride_and_alignment_on_a_gpu(norm: str, num_rows: int, num_cols: int, **how: Any) -> None:
    shape = min(num_rows, 10**7 // num_cols), num_cols // 16 * 16 or num_cols
    compare_any(inputs(norm, shape, how.pop("dtype"), "cuda"), **how)


def compare_any(case: dict[str, Tensor], swapped: set[str], offset: int) -> None:
    for name, each in case.items():
        room = torch.empty(each.numel() + offset, dtype=each.dtype, device=each.device)
        case[name] = room[offset:].view_as(each).copy_(each)
        if name in swapped:
            case[name] = case[name].mT.contiguous().mT
    norm, got = "layer" if "bias" in case else "rms", results(case)
    tolerance = 2 * TOLERANCES[case["x"].dtype] * (magnified(case) if norm == "layer" else 1.0)
    for name, a, b in zip(NAMES[: len(got)], got, exact(case), strict=True):
        assert torch.equal(a.cpu().double(), b) or relative_error(norm, a.cpu(), b) <= tolerance, name


def magnified(case: dict[str, Tensor]) -> float:
    """By how much rounding may grow, in the reference too, where a row's numbers are nearly equal, as of one column."""
    total = (case["x"] + case["residual"]).double()
    variance = (total - total.mean(-1, keepdim=True)).square().mean(-1)
    return max([1.0, *(variance + EPS).rsqrt().tolist()])


def test_results_that_nobody_uses_need_no_gradient(device: str) -> None:
    case = inputs("rms", (6, 32), torch.float64, device)
    leaves = leaves_of(case)
    x, residual, weight = leaves.values()
    _, total = apply(leaves)
    assert all(torch.equal(each, case["dy"]) for each in torch.autograd.grad(total, (x, residual), case["dy"]))
    y, _ = apply(leaves)
    plain = (x + residual).detach().requires_grad_()
    (want,) = torch.autograd.grad(rms_norm(plain, weight, EPS), plain, case["dy"])
    assert torch.equal(torch.autograd.grad(y, x, case["dy"])[0], want)


def test_the_gradients_of_the_weights_can_be_taken_unrounded(norm: str, device: str) -> None:
    case = inputs(norm, (40, 64), torch.bfloat16, device)
    weights, partials = (case["weight"], case.get("bias")), list[tuple[Tensor, ...]]()
    forward = tuple(None if each is None else each.clone() for each in weights)

    class Handles:
        """What the forward had is gone."""

        def read(self) -> tuple[Tensor, Tensor | None]:
            return weights

        def take(self, gradients: tuple[Tensor, ...]) -> None:
            partials.append(gradients)

    y, _ = add_norm(case["x"].requires_grad_(), case["residual"], *forward, EPS, Handles())
    for each in forward:
        if each is not None:
            each.fill_(torch.nan)
    y.backward(case["dy"])
    (gradients,) = partials
    want = exact({**case, "x": case["x"].detach()})[4:]
    for gradient, expected in zip(gradients, want, strict=True):
        assert gradient.dtype == torch.float32
        assert relative_error(norm, gradient.cpu(), expected) < TOLERANCES[torch.float32] * 5


def test_a_residual_that_does_not_fit_is_named() -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    with pytest.raises(UserError, match=r"residual \[3, 8\] does not fit x \[4, 8\]"):
        add_norm(x, x[1:], weight, None, EPS)
    with pytest.raises(UserError, match=r"residual is torch.float64 on cpu, x is torch.float32 on cpu"):
        add_norm(x, x.double(), weight, None, EPS)
