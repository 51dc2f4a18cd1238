"""Tensors in eight bits: x as fp8 values and scales that decode them, as it is and transposed.

A group of values has one scale: all of a tensor, a row, a tile of 1 x 128 values of a row, or a block of 128 x 128. The
scale is the smallest power of two that takes the group's largest magnitude to at most the largest fp8 number, or the
very quotient of both. For example a row whose largest magnitude is 3 has the scale 2^-7 in e4m3: 3 / 2^-7 = 384 <= 448.
A group of zeros has the scale 1; one with a NaN or an infinity has NaN for all its numbers, so that a step sees it.

The reference is plain torch, on every device and for float64 too. The native kernels have its bits, for bf16, half and
fp32 on CUDA: one pass over x writes both copies and their scales, after another one for the maxima of rows and tensors.
Scales are laid out as torch.nn.functional.scaled_mm wants them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.errors import UserError
from trainer.ops.dtypes import wide_dtype

Scaling = Literal["tensor", "row", "tile", "block"]
Maxima = tuple[Tensor | None, Tensor | None]
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # both are 0.875 * 2^e
_LIMIT_EXPONENTS = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 16}  # that e
_LIMIT_FRACTION = 0.875
SIZE = 128  # of a tile, and of the sides of a block
_PACK = 16  # bytes of an access: rows of both copies are whole ones
_SMALLEST, _LARGEST = 2.0**-126, torch.finfo(torch.float32).max  # scales have an inverse in fp32


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix in fp8 whose values are `values_RC` times their group's scale.

    Scales are fp32: [1] of a tensor, [R, 1] of rows, [R, C / 128] of tiles in the memory of [C / 128, R], and of blocks
    [R / 128, C / 128], both rounded up and the second to a multiple of four, padded with 1.
    """

    values_RC: Tensor
    scales: Tensor
    scaling: Scaling

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in a wide dtype, [R, C]."""
        rows, columns = self.values_RC.shape
        scales = self.scales
        if self.scaling == "block":
            scales = scales[:, : _num_groups(columns)].repeat_interleave(SIZE, 0)[:rows]
        if self.scaling in ("tile", "block"):
            scales = scales.repeat_interleave(SIZE, 1)[:, :columns]
        arithmetic = wide_dtype(dtype)
        return (self.values_RC.to(arithmetic) * scales.to(arithmetic)).to(dtype)


def maxima(x_RC: Tensor, scaling: Scaling, *, rows: bool = True, columns: bool = True) -> Maxima:
    """Return the largest magnitudes that scales of a copy, and of the transposed copy, are made of.

    Of a tensor it is [1] for both, of rows [R] and, of the columns of x, [C]. The dtype is fp32, of float64 itself.
    """
    if scaling not in ("tensor", "row"):
        raise UserError(f"fp8: maxima by {scaling} are not made apart: the cast makes them itself")
    magnitudes_RC = x_RC.abs()
    if scaling == "tensor":
        largest = magnitudes_RC.amax().to(wide_dtype(x_RC.dtype)).view(1)
        return largest if rows else None, largest if columns else None
    by_row, by_column = (
        magnitudes_RC.amax(dim).to(wide_dtype(x_RC.dtype)) if needed else None
        for dim, needed in ((1, rows), (0, columns))
    )
    return by_row, by_column


def quantise(
    x_RC: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    *,
    pow2: bool = True,
    rows: bool = True,
    columns: bool = True,
    maxima: Maxima = (None, None),
    form: str = "csrc",
) -> tuple[Quantised | None, Quantised | None]:
    """Return x in fp8, [R, C], for products that sum over columns, and transposed, [C, R], for those over rows.

    The second is what x^T would be as the first: it has scales of its own. Tensors and rows take the largest magnitudes
    from `maxima` if they are there, for example those of all ranks. Scales are powers of two, or not if not `pow2`.
    """
    _check(x_RC, scaling, columns=columns)
    by_row, by_column = maxima
    return (
        _reference(x_RC, scaling, dtype, by_row, pow2=pow2) if rows else None,
        _reference(x_RC.t().contiguous(), scaling, dtype, by_column, pow2=pow2) if columns else None,
    )


def _check(x_RC: Tensor, scaling: Scaling, *, columns: bool) -> None:
    """Raise UserError for a matrix that the kernels could not take on a GPU: sizes are the same everywhere."""
    num_rows, num_columns = x_RC.shape
    of_columns = SIZE if scaling in ("tile", "block") else _PACK
    of_rows = 1 if not columns else SIZE if scaling == "tile" else _PACK
    if not num_rows or not num_columns or num_columns % of_columns or num_rows % of_rows:
        needed = f"columns must be a multiple of {of_columns}"
        if columns:
            needed += f", and rows of {of_rows} for the transposed copy"
        raise UserError(f"fp8: a matrix {list(x_RC.shape)} scaled by {scaling}: {needed}")


def _reference(x_RC: Tensor, scaling: Scaling, dtype: torch.dtype, largest: Tensor | None, *, pow2: bool) -> Quantised:
    """Return x in fp8 by plain torch, with arithmetic in the wide dtype."""
    wide_RC = x_RC.to(wide_dtype(x_RC.dtype))
    scales = scales_of(_group_maxima(wide_RC, scaling) if largest is None else largest, dtype, pow2=pow2)
    scales = _laid_out(scales, scaling)
    inverses = Quantised(torch.ones_like(wide_RC), 1 / scales.to(wide_RC.dtype), scaling).wide(wide_RC.dtype)
    limit = LIMITS[dtype]
    values_RC = (wide_RC * inverses).clamp(-limit, limit).float()
    return Quantised(values_RC.masked_fill(values_RC.isnan(), torch.nan).to(dtype), scales, scaling)


def scales_of(largest: Tensor, dtype: torch.dtype, *, pow2: bool) -> Tensor:
    """Return the fp32 scales of groups by their largest magnitudes: exact powers of two, or quotients rounded once."""
    if pow2:
        fractions, exponents = largest.frexp()  # 3 = 0.75 * 2^2
        powers = exponents.int() - _LIMIT_EXPONENTS[dtype] + (fractions > _LIMIT_FRACTION).int()
        scales = ((powers.clamp(-126, 127) + 127) << 23).view(torch.float32)
    else:
        scales = (largest / LIMITS[dtype]).float().clamp(_SMALLEST, _LARGEST)
    return scales.masked_fill(largest == 0, 1.0).masked_fill(~largest.isfinite(), torch.nan)


def _group_maxima(wide_RC: Tensor, scaling: Scaling) -> Tensor:
    """Return the largest magnitude of each group: [1], [R], [R, C / 128] or [R / 128, C / 128], rounded up."""
    magnitudes_RC = wide_RC.abs()
    if scaling == "tensor":
        return magnitudes_RC.amax().view(1)
    if scaling == "row":
        return magnitudes_RC.amax(1)
    num_rows, num_columns = wide_RC.shape
    if scaling == "tile":
        return magnitudes_RC.view(num_rows, -1, SIZE).amax(2)
    groups_R, groups_C = _num_groups(num_rows), _num_groups(num_columns)
    padded_RC = F.pad(magnitudes_RC, (0, groups_C * SIZE - num_columns, 0, groups_R * SIZE - num_rows))
    return padded_RC.view(groups_R, SIZE, groups_C, SIZE).amax((1, 3))


def _laid_out(scales: Tensor, scaling: Scaling) -> Tensor:
    """Return the scales of groups in the memory that `Quantised` says."""
    if scaling == "row":
        return scales.view(-1, 1)
    if scaling == "tile":
        return scales.t().contiguous().t()
    if scaling == "block":
        return F.pad(scales, (0, -scales.shape[1] % 4), value=1.0)
    return scales


def _num_groups(size: int) -> int:
    return -(-size // SIZE)
