"""Products of many matrices, each with rows of its own, against one product a matrix in float64."""

import pytest
import torch

from tests.trainer.support.weights import handle
from trainer.linear import grouped
from trainer.linear.grouped import GroupedGemm

COUNTS = [[1, 7, 129, 0], [0, 0, 5, 0], [3, 0, 0, 2], [0, 0, 0, 0], [2, 2, 2, 2]]
NUM, WIDE, NARROW = 4, 6, 10  # matrices, their rows and their columns


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


def inputs(num_rows: int, num_parts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Matrices, x and the gradient of y."""
    generator = torch.Generator().manual_seed(num_rows)
    shapes = (num_parts * NUM, WIDE, NARROW), (num_rows, NARROW), (num_rows, num_parts * WIDE)
    values, x, dy = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return values, x, dy


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_each_matrix(counts: list[int], num_parts: int, dtype: torch.dtype) -> None:
    values, x, dy = inputs(sum(counts), num_parts, dtype)
    weight, gradient = handle(values)
    gemm = GroupedGemm(weight, num_parts)
    assert gemm.num_experts == NUM
    ends = ends_of(counts)
    y, dx = gemm.forward(x, ends), gemm.dgrad(dy, ends)
    gemm.wgrad(lambda: (dy, x), ends)
    gemm.wgrad(lambda: (dy, x), ends)
    within = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    rows = torch.arange(NUM).repeat_interleave(torch.tensor(counts))
    wide = values.double().view(num_parts, NUM, WIDE, NARROW)
    expected = torch.einsum("prnk,rk->rpn", wide[:, rows], x.double()).flatten(1)
    torch.testing.assert_close(y.double(), expected, rtol=within, atol=within)
    parts = dy.double().unflatten(1, (num_parts, WIDE))
    torch.testing.assert_close(
        dx.double(), torch.einsum("prnk,rpn->rk", wide[:, rows], parts), rtol=within, atol=4 * within
    )
    sums = torch.zeros_like(wide)
    for place, number in enumerate(rows.tolist()):
        sums[:, number] += torch.einsum("pn,k->pnk", parts[place], x[place].double())
    exact = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(gradient.double(), 2 * sums.flatten(0, 1), rtol=exact, atol=exact)


def test_a_matrix_without_rows_has_no_gradient_and_keeps_what_others_added() -> None:
    values, x, dy = inputs(5, 1, torch.float64)
    weight, gradient = handle(values)
    gemm = GroupedGemm(weight)
    gemm.wgrad(lambda: (dy, x), ends_of([5, 0, 0, 0]))
    before = gradient.clone()
    assert not before[1:].any()
    gemm.wgrad(lambda: (dy, x), ends_of([0, 5, 0, 0]))
    assert torch.equal(gradient[0], before[0])
    assert torch.equal(gradient[1], before[0])


def test_bf16_gradients_are_added_in_the_wide_dtype() -> None:
    """After 16 contributions as exact as one; rounded to bf16 they would be 1e-3 apart."""
    values, x, dy = inputs(40, 2, torch.bfloat16)
    weight, gradient = handle(values)
    gemm, ends = GroupedGemm(weight, 2), ends_of([10, 20, 0, 10])
    exact, expected = handle(values.double())
    for _ in range(16):
        gemm.wgrad(lambda: (dy, x), ends)
        GroupedGemm(exact, 2).wgrad(lambda: (dy.double(), x.double()), ends)
    assert (gradient.double() - expected).norm() / expected.norm() < 1e-6


def test_the_ends_of_rows_are_read_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a tensor are nowhere else read by the host."""
    reads = []
    monkeypatch.setattr(grouped, "read_ends", lambda ends: reads.append(ends) or [1, 3, 3, 4])
    values, x, _ = inputs(4, 1, torch.float64)
    weight, _ = handle(values)
    ends = ends_of([1, 2, 0, 1])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("read on the host"))
    GroupedGemm(weight).forward(x, ends)
    assert reads == [ends]
