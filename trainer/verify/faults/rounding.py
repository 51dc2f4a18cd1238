"""Faults of gradients that are rounded to travel: what is drawn, and the scales of blocks."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.ops import rounding
from trainer.verify.faults.fault import DP, ROUNDED, Fault
from trainer.verify.faults.planting import Patch, wrapping


def drawn_by_rank() -> Callable[[Patch], None]:
    """Let each rank draw from a generator of its own, which begins with its run."""
    own = threading.local()

    def drawn(real: Any, places: Tensor, key: Any, words: Any) -> Tensor:
        if not hasattr(own, "generator"):
            own.generator = torch.Generator().manual_seed(words[1])
        return torch.rand(len(places), rounding.BLOCK, generator=own.generator)

    return wrapping(rounding, "drawn", drawn)


def largest_of_all(real: Any, rows: Tensor, num_parts: int, out: Tensor) -> None:
    """Take the scale of the first block for all."""
    rows[:, rounding.BLOCK :] = rows[0, rounding.BLOCK :].clone()
    real(rows, num_parts, out)


ROUNDING_FAULTS = (
    Fault(
        "int8-rounded-by-rank",
        "gradients in int8 are rounded by what each rank has drawn since its start",
        DP,
        drawn_by_rank(),
        grad_reduce="int8",
        check=ROUNDED,
    ),
    Fault(
        "int8-one-scale",
        "gradients in int8 are read by the scale of another block",
        DP,
        wrapping(rounding, "sum_packed", largest_of_all),
        grad_reduce="int8",
        check=ROUNDED,
    ),
)
