"""Tensors in eight bits: x as fp8 values and scales that decode them, as it is and transposed.

A group of values has one scale: all of a tensor, a row, a tile of 1 x 128 values of a row, or a block of 128 x 128. The
scale is the smallest power of two that takes the group's largest magnitude to at most the largest fp8 number, or the
very quotient of both. For example a row whose largest magnitude is 3 has the scale 2^-7 in e4m3: 3 / 2^-7 = 384 <= 448.
A group of zeros has the scale 1; one with a NaN or an infinity has NaN for all its numbers, so that a step sees it.

The reference is plain torch, on every device and for float64 too. The native kernels have its bits, for bf16, half and
fp32 on CUDA: one pass over x writes both copies and their scales, after another one for the maxima of rows and tensors.
Scales are laid out as torch.nn.functional.scaled_mm wants them.
"""

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.dtypes import wide_dtype

Scaling = Literal["tensor", "row", "tile", "block"]
SCALINGS: tuple[Scaling, ...] = ("tensor", "row", "tile", "block")  # op_fp8_scaling of csrc/ops/ops.h
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


def maxima(x_RC: Tensor, scaling: Scaling, *, rows: bool = True, columns: bool = True, form: str = "csrc") -> Maxima:
    """Return the largest magnitudes that scales of a copy, and of the transposed copy, are made of.

    Of a tensor it is [1] for both, of rows [R] and, of the columns of x, [C]. The dtype is fp32, of float64 itself. A
    NaN is the maximum of its group.
    """
    if scaling not in ("tensor", "row"):
        raise UserError(f"fp8: maxima by {scaling} are not made apart: the cast makes them itself")
    _check(x_RC, scaling, columns=False)
    if has_kernels(x_RC, form):
        x_RC = _aligned(x_RC)
        sizes = (1,) if scaling == "tensor" else x_RC.shape
        largest = torch.empty(sum(sizes), dtype=torch.float32, device=x_RC.device)
        native.call("fp8_maxima", x_RC, SCALINGS.index(scaling), x_RC.data_ptr(), largest.data_ptr(), *x_RC.shape)
        parts = largest.split(sizes)
        return parts[0] if rows else None, parts[-1] if columns else None
    wide = wide_dtype(x_RC.dtype)
    if scaling == "tensor":
        largest = _group_maxima(x_RC, scaling).to(wide)
        return largest if rows else None, largest if columns else None
    by_row, by_column = (
        _group_maxima(each, scaling).to(wide) if needed else None
        for each, needed in ((x_RC, rows), (x_RC.t(), columns))
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
    by_row, by_column = _checked(maxima, x_RC, scaling)
    if has_kernels(x_RC, form):
        return _cast(x_RC, scaling, dtype, (by_row, by_column), pow2=pow2, needed=(rows, columns))
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


def _checked(maxima: Maxima, x_RC: Tensor, scaling: Scaling) -> Maxima:
    """Return maxima that the caller has; UserError where they are not a number a group."""
    sizes = (1, 1) if scaling == "tensor" else x_RC.shape
    for largest, size in zip(maxima, sizes, strict=True):
        if largest is not None and (scaling not in ("tensor", "row") or largest.shape != (size,)):
            raise UserError(f"fp8: maxima {list(largest.shape)} for a matrix {list(x_RC.shape)} scaled by {scaling}")
    return maxima


def has_kernels(x_RC: Tensor, form: str = "csrc") -> bool:
    """Return whether native kernels make the numbers of x, which are those of plain torch."""
    return form == "csrc" and x_RC.is_cuda and x_RC.dtype != torch.float64


def _aligned(x_RC: Tensor) -> Tensor:
    """Return x in dense rows that start at a whole access, which a part of another tensor may not."""
    x_RC = x_RC.contiguous()
    return x_RC.clone() if x_RC.data_ptr() % _PACK else x_RC


def _cast(
    x_RC: Tensor, scaling: Scaling, dtype: torch.dtype, largest: Maxima, *, pow2: bool, needed: tuple[bool, bool]
) -> tuple[Quantised | None, Quantised | None]:
    """Return the copies that are needed, by the native kernels; maxima that are needed and missing are made first."""
    x_RC = _aligned(x_RC)
    by_row, by_column = largest
    if scaling in ("tensor", "row"):
        if (needed[0] and by_row is None) or (needed[1] and by_column is None):
            of_x = maxima(x_RC, scaling)
            by_row, by_column = (of_x[0] if by_row is None else by_row), (of_x[1] if by_column is None else by_column)
        by_row, by_column = (None if known is None else known.float().contiguous() for known in (by_row, by_column))
    num_rows, num_columns = x_RC.shape
    plain = _empty(x_RC, num_rows, num_columns, scaling, dtype) if needed[0] else None
    transposed = _empty(x_RC, num_columns, num_rows, scaling, dtype) if needed[1] else None
    codes = (list(LIMITS).index(dtype), SCALINGS.index(scaling), int(pow2), x_RC.data_ptr())
    copies = (_Copy.of(plain, by_row), _Copy.of(transposed, by_column))
    native.call("fp8_cast", x_RC, *codes, *map(ctypes.byref, copies), num_rows, num_columns)
    return plain, transposed


def _empty(x_RC: Tensor, num_rows: int, num_columns: int, scaling: Scaling, dtype: torch.dtype) -> Quantised:
    """Return the memory of a copy of this shape."""
    shape = {
        "tensor": (1,),
        "row": (num_rows, 1),
        "tile": (num_columns // SIZE, num_rows),
        "block": (_num_groups(num_rows), -(-_num_groups(num_columns) // 4) * 4),
    }[scaling]
    scales = x_RC.new_empty(shape, dtype=torch.float32)
    values = x_RC.new_empty(num_rows, num_columns, dtype=dtype)
    return Quantised(values, scales.t() if scaling == "tile" else scales, scaling)


class _Copy(ctypes.Structure):  # op_fp8_copy of csrc/ops/ops.h
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("values", "maxima", "scales"))

    @classmethod
    def of(cls, copy: Quantised | None, largest: Tensor | None) -> "_Copy":
        """Return the addresses of a copy and of the maxima of its groups; null for one that is not needed."""
        if copy is None:
            return cls()
        return cls(copy.values_RC.data_ptr(), native.pointer(largest), copy.scales.data_ptr())


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
        limits = torch.full_like(largest, LIMITS[dtype])  # by a number CUDA multiplies with its inverse
        scales = (largest / limits).float().clamp(_SMALLEST, _LARGEST)
    return scales.masked_fill(largest == 0, 1.0).masked_fill(~largest.isfinite(), torch.nan)


def _group_maxima(x_RC: Tensor, scaling: Scaling) -> Tensor:
    """Return the largest magnitude of each group: [1], [R], [R, C / 128] or [R / 128, C / 128], rounded up."""
    magnitudes_RC = x_RC.abs()
    if scaling == "tensor":
        return magnitudes_RC.amax().view(1)
    if scaling == "row":
        return magnitudes_RC.amax(1)
    num_rows, num_columns = x_RC.shape
    if scaling == "tile":
        return magnitudes_RC.reshape(num_rows, -1, SIZE).amax(2)
    groups_R, groups_C = _num_groups(num_rows), _num_groups(num_columns)
    padded_RC = F.pad(magnitudes_RC, (0, groups_C * SIZE - num_columns, 0, groups_R * SIZE - num_rows))
    return padded_RC.view(groups_R, SIZE, groups_C, SIZE).amax((1, 3))


def _laid_out(scales: Tensor, scaling: Scaling) -> Tensor:
    """Return the scales of groups in the memory that `Quantised` says."""
    if scaling == "row":
        return scales.view(-1, 1)
    if scaling == "tile":
        return scales.new_empty(scales.shape[::-1]).t().copy_(scales)
    if scaling == "block":
        return F.pad(scales, (0, -scales.shape[1] % 4), value=1.0)
    return scales


def _num_groups(size: int) -> int:
    return -(-size // SIZE)
