"""A program for Triton's interpreter: gradients of many matrices against float64, on the CPU.

    TRITON_INTERPRET=1 python -m tests.trainer.support.grouped_triton

Triton reads the variable when it is imported, so this is a process of its own. It prints the largest gap of each case.
"""

import json

import torch

from tests.support.checks import require_equal
from trainer.linear.grouped_triton import add_products

# rows of each expert, parts, rows and columns of a matrix: more than one tile, none that divides, experts without rows
CASES = [
    ([1, 7, 129], 1, 24, 40),
    ([0, 5, 0, 64, 0], 2, 130, 17),
    ([0, 0], 1, 8, 8),
    ([3], 1, 33, 300),
    ([65, 0, 1], 3, 16, 16),
]


def gap_of(counts: list[int], num_parts: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> float:
    """Contribute twice to memory that held other numbers; the gap to sums of float64, relative to the largest."""
    generator = torch.Generator().manual_seed(sum(counts))
    ends = torch.tensor(counts).cumsum(0).int()
    out = torch.full((num_parts * len(counts), num_rows, num_columns), 1e6)
    want = torch.zeros_like(out, dtype=torch.float64)
    for first in (True, False):
        dy, x = (
            torch.randn(sum(counts), size, generator=generator).to(dtype)
            for size in (num_parts * num_rows, num_columns)
        )
        add_products(out, dy, x, ends, first=first)
        for part, columns in enumerate(dy.double().split(num_rows, 1)):
            for expert, stop in enumerate(ends.tolist()):
                rows = slice(stop - counts[expert], stop)
                want[part * len(counts) + expert] += columns[rows].t() @ x[rows].double()
    empty = [number for number in range(len(want)) if counts[number % len(counts)] == 0]
    require_equal(bool((out[empty] == 0).all()), "a matrix without rows is zero")
    return float((out - want).abs().max() / want.abs().max().clamp(min=1e-300))


def left_alone() -> bool:
    """Whether a later contribution leaves a matrix without rows as it is, whatever bits it has."""
    out = torch.full((2, 8, 8), float("nan"))
    out[1] = 0
    add_products(out, torch.ones(3, 8), torch.ones(3, 8), torch.tensor([0, 3], dtype=torch.int32), first=False)
    return bool(out[0].isnan().all()) and bool((out[1] == 3).all())


if __name__ == "__main__":
    require_equal(left_alone(), "a matrix without rows is left as it is")
    gaps = {f"{dtype} {case}": gap_of(*case, dtype) for dtype in (torch.float32, torch.bfloat16) for case in CASES}
    print(json.dumps(gaps))
