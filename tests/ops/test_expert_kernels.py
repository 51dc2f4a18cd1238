"""The native kernels of rows of experts against plain torch: equal bits of orders and sums, SwiGLU against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.dtypes import wide_dtype
from trainer.ops.experts import ExpertRows, weighted_swiglu, weighted_swiglu_backward

TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
CSRC, TORCH = ExpertRows(), ExpertRows("torch")
IDS = {"ids": str}
# tokens, experts a token, experts, columns: whole packs, odd ones, more rows than a block sorts, experts without rows
SHAPES = [(1, 1, 1, 1), (7, 2, 5, 64), (129, 4, 3, 33), (700, 3, 300, 8), (40, 8, 64, 2056)]
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, **IDS)


def experts_of(num_tokens: int, k: int, num_experts: int, device: str) -> Tensor:
    """Experts of tokens, of which the lower numbers have more; two of a token may be equal."""
    generator = torch.Generator().manual_seed(num_tokens)
    return (torch.rand(num_tokens, k, generator=generator).square() * num_experts).long().to(device)


def drawn(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize("shape", SHAPES, **IDS)
def test_orders_are_those_of_plain_torch(shape: tuple[int, int, int, int], device: str) -> None:
    num_tokens, k, num_experts, _ = shape
    experts = experts_of(num_tokens, k, num_experts, device)
    for got, want in zip(CSRC.sort(experts, num_experts), TORCH.sort(experts, num_experts), strict=True):
        assert (got.dtype, got.device) == (torch.int64, experts.device)
        assert torch.equal(got, want)


@settings(max_examples=20)
@given(flat=st.lists(st.integers(0, 8), max_size=60), num_experts=st.integers(9, 12))
def test_any_choice_is_sorted_stably(flat: list[int], num_experts: int) -> None:
    rows, counts = CSRC.sort(torch.tensor(flat, dtype=torch.int64).view(-1, 1), num_experts)
    assert rows.tolist() == sorted(range(len(flat)), key=lambda row: (flat[row], row))
    assert counts.tolist() == [flat.count(expert) for expert in range(num_experts)]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, **IDS)
def test_gathered_and_summed_rows_have_the_bits_of_plain_torch(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> None:
    num_tokens, k, num_experts, num_columns = shape
    rows, _ = TORCH.sort(experts_of(num_tokens, k, num_experts, device), num_experts)
    x = drawn(num_tokens, num_columns, dtype=dtype, device=device)
    assert torch.equal(CSRC.gather(x, rows, k), TORCH.gather(x, rows, k))
    y = drawn(num_tokens * k, num_columns, dtype=dtype, device=device)
    before = native.csrc_calls().get("combine_rows", 0)
    got = CSRC.combine(y, rows, num_tokens, k)
    assert native.csrc_calls()["combine_rows"] == before + 1
    assert torch.equal(got, TORCH.combine(y, rows, num_tokens, k))
    assert torch.equal(got.cpu(), TORCH.combine(y.cpu(), rows.cpu(), num_tokens, k))


@DTYPES
def test_padding_takes_no_part(dtype: torch.dtype, device: str) -> None:
    num_tokens, k, num_columns, num_used = 40, 4, 72, 57
    rows, _ = TORCH.sort(experts_of(num_tokens, k, 5, device), 5)
    rows = torch.cat([rows[:num_used], rows.new_full((30,), num_tokens * k)])
    used = torch.tensor([3, num_used], dtype=torch.int32, device=device)[-1]
    x = drawn(num_tokens, num_columns, dtype=dtype, device=device)
    assert torch.equal(CSRC.gather(x, rows, k, used)[:num_used], TORCH.gather(x, rows, k, used)[:num_used])
    y = drawn(len(rows), num_columns, dtype=dtype, device=device)
    y[num_used:] = torch.nan
    want = TORCH.combine(y[:num_used], rows[:num_used], num_tokens, k)
    for form in (CSRC, TORCH):
        assert torch.equal(form.combine(y, rows, num_tokens, k, used), want)
    packed, weights, dact = swiglu_inputs(len(rows), num_columns, dtype, device)
    assert torch.equal(
        CSRC.weighted_swiglu(packed, weights, used)[:num_used], CSRC.weighted_swiglu(packed, weights)[:num_used]
    )
    whole = CSRC.weighted_swiglu_backward(dact.clone(), packed.clone(), weights)
    some = CSRC.weighted_swiglu_backward(dact.clone(), packed.clone(), weights, used)
    assert all(torch.equal(one[:num_used], other[:num_used]) for one, other in zip(some, whole, strict=True))
    assert torch.equal(some[0][num_used:], packed[num_used:]), "padding is left as it is"


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want).norm() / want.norm().clamp(min=1e-300))


def swiglu_inputs(num_rows: int, num_columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Packed rows, with numbers at which exp overflows, weights, and the gradient of the product."""
    packed = 2 * drawn(num_rows, 2 * num_columns, dtype=dtype, device=device)
    if num_rows > 1 and num_columns >= 4:
        packed[0, :4] = torch.tensor([-1000.0, -30.0, 30.0, 1000.0])
    weights = drawn(num_rows, dtype=wide_dtype(dtype), device=device).abs()
    weights[-1] = 0
    return packed, weights, drawn(num_rows, num_columns, dtype=dtype, device=device)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (7, 64), (130, 33), (5, 2056), (3, 768)], **IDS)
def test_weighted_swiglu_equals_float64(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    packed, weights, dact = swiglu_inputs(*shape, dtype, device)
    exact = [tensor.cpu().double() for tensor in (packed, weights, dact)]
    act = CSRC.weighted_swiglu(packed, weights)
    got = CSRC.weighted_swiglu_backward(dact.clone(), packed.clone(), weights)
    want = weighted_swiglu_backward(exact[2], exact[0], exact[1])
    for one, other in zip((act, *got), (weighted_swiglu(*exact[:2]), *want), strict=True):
        assert (one.shape, one.device) == (other.shape, packed.device)
        assert relative_error(one, other) < TOLERANCES[dtype]
    assert torch.equal(got[2], act)
    assert got[1].dtype == weights.dtype


@DTYPES
def test_the_backward_is_in_the_memory_of_its_inputs(dtype: torch.dtype, device: str) -> None:
    packed, weights, dact = swiglu_inputs(9, 40, dtype, device)
    dpacked, _, act = CSRC.weighted_swiglu_backward(dact, packed, weights)
    assert (dpacked.data_ptr(), act.data_ptr()) == (packed.data_ptr(), dact.data_ptr())


@DTYPES
def test_a_row_depends_on_no_other(dtype: torch.dtype, device: str) -> None:
    packed, weights, dact = swiglu_inputs(40, 96, dtype, device)
    whole = CSRC.weighted_swiglu_backward(dact.clone(), packed.clone(), weights)
    for rows in (slice(3, 4), slice(5, 40)):
        parts = CSRC.weighted_swiglu_backward(dact[rows].clone(), packed[rows].clone(), weights[rows])
        assert all(torch.equal(part, tensor[rows]) for part, tensor in zip(parts, whole, strict=True))


@DTYPES
def test_bits_do_not_depend_on_threads_or_the_instruction_set(dtype: torch.dtype, every_simd: list[int]) -> None:
    packed, weights, dact = swiglu_inputs(300, 501, dtype, "cpu")
    rows, _ = CSRC.sort(experts_of(100, 3, 7, "cpu"), 7)

    def results() -> tuple[Tensor, ...]:
        backward = CSRC.weighted_swiglu_backward(dact.clone(), packed.clone(), weights)
        return (CSRC.weighted_swiglu(packed, weights), *backward, CSRC.combine(dact, rows, 100, 3))

    want = results()
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            assert all(torch.equal(one, other) for one, other in zip(results(), want, strict=True))


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"op_sort_rows on cpu, torch.int64 \[2, 1\]: bad argument"):
        CSRC.sort(torch.tensor([[3], [0]]), 3)
    with pytest.raises(UserError, match=r"sort_rows takes int64, not torch\.int32"):
        CSRC.sort(torch.zeros(2, 1, dtype=torch.int32), 3)
    packed = torch.ones(4, 6, dtype=torch.bfloat16)
    for weights in (torch.ones(4, dtype=torch.bfloat16), torch.ones(3)):
        with pytest.raises(UserError, match=r"weighted_swiglu: packed \[4, 6\] with strides \[6, 1\], weights"):
            CSRC.weighted_swiglu(packed, weights)
