"""The gradients of many matrices as one Triton kernel: each is the product of the rows that its expert has.

Where rows begin and end is read on the device, so that nothing waits for it. Sums are made in fp32, and added to fp32:
nothing is rounded to the factors' bf16. A matrix without rows is written as zero by the first contribution, and left as
it is by the others. The order of a matrix's sums depends on its rows alone. The module is imported where it is used:
it needs triton, which torch for CUDA brings along.
"""

import triton
import triton.language as tl
from torch import Tensor

N, K, R = (tl.constexpr(size) for size in (128, 256, 64))  # of a program: its part of a matrix, and rows at a time


def add_products(out_GNK: Tensor, dy_RC: Tensor, x_RK: Tensor, ends_E: Tensor, *, first: bool) -> None:
    """Add dy^T x of each matrix's rows to `out`, [P E, N, K], or write it there; dy has the columns of all P parts.

    For example ends [0, 2, 5] and P 1: matrix 1 is the product of rows 0-1, and matrix 2 of rows 2-4.
    """
    num_matrices, num_rows, num_columns = out_GNK.shape
    assert all((dy_RC.stride(1) == 1, x_RK.is_contiguous(), out_GNK.is_contiguous())), "rows and matrices are dense"
    assert dy_RC.shape[1] * len(ends_E) == num_matrices * num_rows, "dy has as many columns as all parts have rows"
    tiles = triton.cdiv(num_rows, N.value) * triton.cdiv(num_columns, K.value)
    sizes = (len(ends_E), num_rows, num_columns, dy_RC.stride(0))
    is_interpreted = not out_GNK.is_cuda
    _add_products[tiles, num_matrices](
        out_GNK, dy_RC, x_RK, ends_E, sizes, FIRST=first, WIDENS=is_interpreted, num_warps=8, num_stages=3
    )


@triton.jit
def _add_products(
    out: tl.tensor,
    dy: tl.tensor,
    x: tl.tensor,
    ends: tl.tensor,
    sizes: tl.tuple,
    FIRST: tl.constexpr,
    WIDENS: tl.constexpr,  # for the interpreter, which has no product of bf16; those of fp32 are as exact
) -> None:
    num_experts, num_rows, num_columns, dy_stride = sizes
    tile, matrix = tl.program_id(0), tl.program_id(1)
    expert, part = matrix % num_experts, matrix // num_experts
    start = tl.where(expert > 0, tl.load(ends + tl.maximum(expert - 1, 0)), 0)
    stop = tl.load(ends + expert)
    tiles_k = tl.cdiv(num_columns, K)
    places_n = (tile // tiles_k) * N + tl.arange(0, N)
    places_k = (tile % tiles_k) * K + tl.arange(0, K)
    is_n, is_k = places_n < num_rows, places_k < num_columns
    sums = tl.zeros((N, K), dtype=tl.float32)
    for row in range(start, stop, R):
        places_r = row + tl.arange(0, R)
        is_r, at = places_r < stop, places_r.to(tl.int64)
        dy_from = dy + at[:, None] * dy_stride + (part * num_rows + places_n)[None, :]
        dy_block = tl.load(dy_from, mask=is_r[:, None] & is_n[None, :], other=0.0)
        x_block = tl.load(
            x + at[:, None] * num_columns + places_k[None, :], mask=is_r[:, None] & is_k[None, :], other=0.0
        )
        if WIDENS:
            dy_block, x_block = dy_block.to(tl.float32), x_block.to(tl.float32)
        sums = tl.dot(tl.trans(dy_block), x_block, sums, input_precision="ieee")
    first_row = matrix.to(tl.int64) * num_rows
    to = out + (first_row + places_n)[:, None] * num_columns + places_k[None, :]
    last = num_rows if FIRST else tl.where(stop > start, num_rows, 0)
    is_written = (places_n < last)[:, None] & is_k[None, :]
    if not FIRST:
        sums += tl.load(to, mask=is_written, other=0.0)
    tl.store(to, sums, mask=is_written)
