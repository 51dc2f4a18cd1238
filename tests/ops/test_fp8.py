"""Tensors in fp8: against a formula of Python's floats and a table of all codes, in groups, transposed and cut."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.dtypes import wide_dtype
from trainer.ops.fp8 import LIMITS, Quantised, Scaling, maxima, quantise

FORMATS = {
    torch.float8_e4m3fn: (4, 3, 9),
    torch.float8_e5m2: (5, 2, 16),
}  # bits of exponent, of mantissa, e of the limit
SCALINGS: tuple[Scaling, ...] = ("tensor", "row", "tile", "block")
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EVERY_FORMAT = pytest.mark.parametrize("dtype", FORMATS, ids=str)
EVERY_SCALING = pytest.mark.parametrize("scaling", SCALINGS)
POW2 = pytest.mark.parametrize("pow2", [True, False], ids=["pow2", "quotient"])


def decoded(dtype: torch.dtype) -> list[float]:
    """What each of the 256 codes says, by the definition of the format; e4m3fn has no infinity and two NaN."""
    num_exponent, num_mantissa, _ = FORMATS[dtype]
    bias, numbers = 2 ** (num_exponent - 1) - 1, []
    for code in range(256):
        sign, rest = -1.0 if code & 128 else 1.0, code & 127
        exponent, fraction = rest >> num_mantissa, rest % (1 << num_mantissa)
        number = math.ldexp(fraction + (1 << num_mantissa) * (exponent > 0), max(exponent, 1) - bias - num_mantissa)
        if dtype == torch.float8_e5m2 and exponent == 31:
            number = math.nan if fraction else math.inf
        elif rest == 127:
            number = math.nan
        numbers.append(sign * number)
    return numbers


TABLES = {dtype: decoded(dtype) for dtype in FORMATS}


def code_of(number: float, dtype: torch.dtype) -> int:
    """The code nearest to a number within the limits, of two the even one."""
    if math.isnan(number):
        return 127
    number = max(-LIMITS[dtype], min(LIMITS[dtype], number))
    sign = 128 if math.copysign(1.0, number) < 0 else 0
    finite = [code for code in range(128) if math.isfinite(TABLES[dtype][code])]
    exact = Fraction(abs(number))
    return sign | min(finite, key=lambda code: (abs(exact - Fraction(TABLES[dtype][code])), code % 2))


def formula(values: list[float], dtype: torch.dtype, kind: Any, *, pow2: bool) -> tuple[float, list[int]]:
    """The scale of one group and its codes; `kind` is numpy's type of the arithmetic."""
    largest = math.nan if any(map(math.isnan, values)) else max(map(abs, values))
    if not math.isfinite(largest):
        return math.nan, [127] * len(values)
    scale = 1.0
    if largest and pow2:
        fraction, exponent = math.frexp(largest)
        scale = 2.0 ** max(-126, min(127, exponent - FORMATS[dtype][2] + (fraction > 0.875)))
    elif largest:
        quotient = np.float32(kind(largest) / kind(LIMITS[dtype]))
        scale = float(min(max(quotient, np.float32(2.0**-126)), np.finfo(np.float32).max))
    inverse = kind(1) / kind(scale)
    with np.errstate(over="ignore", under="ignore"):
        return scale, [code_of(float(np.float32(kind(value) * inverse)), dtype) for value in values]


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    """Numbers of many sizes, with a row, a column and a block of zeros."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-12, 3, (rows, columns), generator=generator))
    x[-1] = 0
    x[:, 3] = 0
    x[:128, -128:] = 0
    return x.to(device, dtype)


def codes(quantised: Quantised) -> Tensor:
    return quantised.values_RC.view(torch.uint8)


def is_same(one: Quantised, other: Quantised) -> bool:
    """Whether both have the same codes, scales of the same bits, and the same layouts."""
    scales = [quantised.scales.nan_to_num(-1.0).cpu() for quantised in (one, other)]
    return (
        torch.equal(codes(one).cpu(), codes(other).cpu())
        and torch.equal(*scales)
        and one.scales.stride() == other.scales.stride()
        and one.values_RC.is_contiguous()
        and one.values_RC.dtype == other.values_RC.dtype
    )


def both(x: Tensor, scaling: Scaling, dtype: torch.dtype, **options: Any) -> tuple[Quantised, Quantised]:
    by_row, by_column = quantise(x, scaling, dtype, **options)
    assert by_row is not None
    assert by_column is not None
    return by_row, by_column


def first(x: Tensor, scaling: Scaling, dtype: torch.dtype, **options: Any) -> Quantised:
    by_row, by_column = quantise(x, scaling, dtype, columns=False, **options)
    assert by_row is not None
    assert by_column is None
    return by_row


@EVERY_FORMAT
def test_the_table_is_torchs(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    table = torch.tensor(TABLES[dtype], dtype=torch.float64)
    assert torch.equal(numbers.isnan(), table.isnan())
    assert torch.equal(numbers.nan_to_num(0.0, 1e9, -1e9), table.nan_to_num(0.0, 1e9, -1e9))


NUMBERS = st.one_of(
    st.floats(width=32), st.floats(-500, 500, width=32), st.sampled_from([0.0, -0.0, 448.0, 464.0, 2.0**-149, 3e38])
)


@settings(max_examples=30)
@given(values=st.lists(NUMBERS, min_size=16, max_size=16), pow2=st.booleans(), wide=st.sampled_from(WIDE))
def test_any_row_is_what_the_formula_says(values: list[float], pow2: bool, wide: torch.dtype) -> None:
    x = torch.tensor([values], dtype=torch.float64).to(wide)
    kind = np.float64 if wide == torch.float64 else np.float32
    for dtype in FORMATS:
        scale, want = formula(x[0].tolist(), dtype, kind, pow2=pow2)
        got = first(x, "row", dtype, pow2=pow2)
        assert codes(got)[0].tolist() == want
        assert got.scales.item() == scale or (math.isnan(scale) and got.scales.isnan().all())


@EVERY_FORMAT
@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_the_largest_magnitude_chooses_the_power(wide: torch.dtype, dtype: torch.dtype, device: str) -> None:
    limit = LIMITS[dtype]
    for power in (-8, 0, 3) if wide != torch.float16 or limit < 1000 else (-8, 0):
        at_limit = torch.tensor(limit * 2.0**power, dtype=wide)
        above = torch.nextafter(at_limit, torch.tensor(torch.inf, dtype=wide))
        for largest, want in ((at_limit, power), (above, power + 1)):
            if largest.isfinite():
                x = torch.zeros(1, 16, dtype=wide)
                x[0, 5] = -largest
                got = first(x.to(device), "row", dtype)
                assert got.scales.item() == 2.0**want
                assert got.wide(torch.float64)[0, 5].item() == pytest.approx(-largest.item(), rel=0.07)


@EVERY_FORMAT
@POW2
@EVERY_SCALING
@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_zeros_tiny_and_bad_groups(
    scaling: Scaling, pow2: bool, dtype: torch.dtype, wide: torch.dtype, device: str
) -> None:
    zeros = torch.zeros(128, 128, dtype=wide, device=device)
    for got in both(zeros, scaling, dtype, pow2=pow2):
        assert got.scales.eq(1).all()
        assert not codes(got).any()
    tiny = torch.full_like(zeros, torch.finfo(wide).smallest_normal * torch.finfo(wide).eps)
    tiny[:, ::2] = 0
    for got in both(tiny, scaling, dtype, pow2=pow2):
        assert got.scales.min() >= 2.0**-126
        assert got.wide(torch.float64).isfinite().all()
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        x = torch.ones_like(zeros)
        x[70, 9] = bad
        for got, place in zip(both(x, scaling, dtype, pow2=pow2), ((70, 9), (9, 70)), strict=True):
            assert codes(got)[place] == 127
            assert got.scales.isnan().any()
            num_bad = 128 if scaling in ("row", "tile") else 128 * 128
            assert int(got.wide(torch.float32).isnan().sum()) == num_bad


@EVERY_FORMAT
@POW2
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float64], ids=str)
def test_groups_are_rows_of_their_own(wide: torch.dtype, pow2: bool, dtype: torch.dtype) -> None:
    x = drawn(256, 384, wide)

    def of_group(rows: slice, columns: slice) -> tuple[float, Tensor]:
        group = x[rows, columns]
        got = first(group.reshape(1, -1), "row", dtype, pow2=pow2)
        return got.scales.item(), codes(got).view(group.shape)

    blocks = [slice(at, at + 128) for at in (0, 128, 256)]
    tile, block, tensor = (first(x, scaling, dtype, pow2=pow2) for scaling in ("tile", "block", "tensor"))
    for row, (place, columns) in product((0, 5, 200, 255), enumerate(blocks)):
        scale, want = of_group(slice(row, row + 1), columns)
        assert tile.scales[row, place].item() == scale
        assert torch.equal(codes(tile)[row : row + 1, columns], want)
    for (down, rows), (place, columns) in product(enumerate(blocks[:2]), enumerate(blocks)):
        scale, want = of_group(rows, columns)
        assert block.scales[down, place].item() == scale
        assert torch.equal(codes(block)[rows, columns], want)
    scale, want = of_group(slice(None), slice(None))
    assert tensor.scales.item() == scale
    assert torch.equal(codes(tensor), want)


@EVERY_FORMAT
@EVERY_SCALING
def test_an_error_is_at_most_half_a_step(scaling: Scaling, dtype: torch.dtype, device: str) -> None:
    x = drawn(256, 256, device=device)
    num_exponent, num_mantissa, _ = FORMATS[dtype]
    for got, want in zip(both(x, scaling, dtype), (x, x.t()), strict=True):
        wide = got.wide(torch.float64)
        ones = Quantised(torch.ones_like(wide), got.scales, got.scaling).wide(torch.float64)
        exponents = (want.double() / ones).frexp().exponent.clamp(min=3 - 2 ** (num_exponent - 1))
        assert ((wide - want.double()).abs() <= torch.exp2(exponents - num_mantissa - 2) * ones).all()


@EVERY_SCALING
def test_scales_are_laid_out_for_scaled_mm(scaling: Scaling, device: str) -> None:
    rows, columns = 256, 640
    by_row, by_column = both(drawn(rows, columns, device=device), scaling, torch.float8_e4m3fn)
    shapes = {
        "tensor": [((1,), (1,)), ((1,), (1,))],
        "row": [((rows, 1), (1, 1)), ((columns, 1), (1, 1))],
        "tile": [((rows, 5), (1, rows)), ((columns, 2), (1, columns))],
        "block": [((2, 8), (8, 1)), ((5, 4), (4, 1))],
    }
    for got, (shape, stride) in zip((by_row, by_column), shapes[scaling], strict=True):
        assert (tuple(got.scales.shape), got.scales.stride()) == (shape, stride)
        assert got.scales.dtype == torch.float32
    if scaling == "block":
        assert torch.equal(by_row.scales[:, :5].t(), by_column.scales[:, :2])
        assert by_row.scales[:, 5:].eq(1).all()
        assert by_column.scales[:, 2:].eq(1).all()
    assert by_row.values_RC.shape == (rows, columns)
    assert by_column.values_RC.shape == (columns, rows)


@EVERY_FORMAT
@EVERY_SCALING
@POW2
@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_the_transposed_copy_is_that_of_the_transposed_matrix(
    scaling: Scaling, dtype: torch.dtype, pow2: bool, wide: torch.dtype, device: str
) -> None:
    x = drawn(128, 384, wide, device)
    by_row, by_column = both(x, scaling, dtype, pow2=pow2)
    assert is_same(by_column, first(x.t().contiguous(), scaling, dtype, pow2=pow2))
    assert is_same(by_row, first(x, scaling, dtype, pow2=pow2))
    alone = quantise(x, scaling, dtype, pow2=pow2, rows=False)
    assert alone[0] is None
    assert alone[1] is not None
    assert is_same(alone[1], by_column)


@EVERY_FORMAT
@pytest.mark.parametrize("scaling", ["tile", "block"])
def test_parts_cut_at_groups_have_the_numbers_of_the_whole(scaling: Scaling, dtype: torch.dtype, device: str) -> None:
    x = drawn(384, 512, device=device)
    by_row, by_column = both(x, scaling, dtype)
    wide, transposed = by_row.wide(torch.float64), by_column.wide(torch.float64)
    for rows, columns in ((slice(0, 128), slice(None)), (slice(128, 384), slice(256, 512)), (slice(None), slice(384))):
        part, part_of_columns = both(x[rows, columns].contiguous(), scaling, dtype)
        assert torch.equal(codes(part), codes(by_row)[rows, columns])
        assert torch.equal(part.wide(torch.float64), wide[rows, columns])
        assert torch.equal(codes(part_of_columns), codes(by_column)[columns, rows])
        assert torch.equal(part_of_columns.wide(torch.float64), transposed[columns, rows])


@EVERY_FORMAT
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_maxima_of_all_ranks_make_the_scales(scaling: Scaling, dtype: torch.dtype, device: str) -> None:
    x = drawn(64, 96, device=device)
    whole = both(x, scaling, dtype)
    found_by_row, found_by_column = maxima(x, scaling)
    assert found_by_row is not None
    assert found_by_column is not None
    assert found_by_row.dtype == found_by_column.dtype == torch.float32
    again = both(x, scaling, dtype, maxima=(found_by_row, found_by_column))
    assert all(map(is_same, again, whole))
    by_row, by_column = both(x, scaling, dtype, maxima=(2 * found_by_row, 4 * found_by_column))
    for got, alone, factor in zip((by_row, by_column), whole, (2, 4), strict=True):
        has_numbers = alone.scales.view(-1) != 1
        want = torch.where(has_numbers, factor * alone.scales.view(-1), 1)
        assert torch.equal(got.scales.view(-1), want)
    assert maxima(x, scaling, columns=False)[1] is None
    assert maxima(x, scaling, rows=False)[0] is None


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_maxima_are_the_largest_magnitudes(scaling: Scaling, device: str) -> None:
    for wide in WIDE:
        for rows, columns in ((1, 16), (7, 48), (130, 1040)):
            x = drawn(rows, columns, wide, device)
            magnitudes = x.abs().to(wide_dtype(wide))
            want = [magnitudes.amax().view(1)] * 2 if scaling == "tensor" else [magnitudes.amax(1), magnitudes.amax(0)]
            for got, expected in zip(maxima(x, scaling), want, strict=True):
                assert got is not None
                assert torch.equal(got, expected)
            x[rows // 2, 4] = torch.nan
            assert [int(got.isnan().sum()) for got in maxima(x, scaling) if got is not None] == [1, 1]


@EVERY_SCALING
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_any_number_of_rows_has_a_first_copy(rows: int, scaling: Scaling, device: str) -> None:
    x = drawn(rows, 256, device=device)
    got = first(x, scaling, torch.float8_e4m3fn)
    assert is_same(got, first(x.cpu(), scaling, torch.float8_e4m3fn, form="torch"))
    assert got.scales.shape[0] == {"tensor": 1, "block": -(-rows // 128)}.get(scaling, rows)


def test_kernels_run_on_cuda_alone() -> None:
    x = torch.ones(16, 16)
    with pytest.raises(UserError, match="fp8_maxima runs on cuda, not on cpu"):
        native.call("fp8_maxima", x, 0, x.data_ptr(), x.data_ptr(), 16, 16)


def test_what_does_not_fit_is_an_error() -> None:
    for scaling, shape, words in (
        ("tensor", (16, 24), "multiple of 16, and rows of 16"),
        ("row", (24, 16), "multiple of 16, and rows of 16"),
        ("tile", (16, 128), "multiple of 128, and rows of 128"),
        ("block", (24, 128), "multiple of 128, and rows of 16"),
        ("row", (0, 16), "multiple of 16"),
    ):
        with pytest.raises(UserError, match=words):
            quantise(torch.ones(shape), scaling, torch.float8_e4m3fn)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"columns must be a multiple of 128$"):
        quantise(torch.ones(4, 64), "tile", torch.float8_e4m3fn, columns=False)
    for size in (1, 3):
        with pytest.raises(UserError, match="scaled by row"):
            quantise(torch.ones(4, 16), "row", torch.float8_e4m3fn, columns=False, maxima=(torch.ones(size), None))
    with pytest.raises(UserError, match="maxima by tile are not made apart"):
        maxima(torch.ones(4, 64), "tile")
