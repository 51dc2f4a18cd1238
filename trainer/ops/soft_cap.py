"""Soft caps of logits: y = cap tanh(x / cap), in the memory of x. Source: Gemma 2 (Gemma Team 2024, arXiv 2408.00118).

The gradient is taken of y, dx = dy (1 - (y / cap)^2), so that x is not kept. Arithmetic is wide and rounded once, of
some rows at a time: not all logits are in memory twice. A bit depends on its element alone.
"""

from collections.abc import Iterator

from torch import Tensor

from trainer.ops.dtypes import wide_dtype

BLOCK = 1 << 24  # elements that are wide at once, unless one row alone has more


def soft_cap(x_TV: Tensor, cap: float) -> None:
    """Overwrite logits by capped ones: numbers far below the cap stay nearly, and none is beyond it."""
    for rows in blocks(x_TV):
        y_TV = x_TV[rows]
        y_TV.copy_(y_TV.to(wide_dtype(y_TV.dtype), copy=True).div_(cap).tanh_().mul_(cap))


def slopes(y_TV: Tensor, cap: float) -> Tensor:
    """Return the derivative of capped logits by those before, wide; 0 where a logit is NaN."""
    wide_TV = y_TV.to(wide_dtype(y_TV.dtype), copy=True)
    return wide_TV.div_(cap).square_().neg_().add_(1).nan_to_num_(nan=0.0)


def blocks(x_TV: Tensor, num_elements: int = BLOCK) -> Iterator[slice]:
    """Yield rows that are wide at once: of so many elements, or one."""
    size = max(num_elements // max(x_TV.shape[1], 1), 1)
    for start in range(0, len(x_TV), size):
        yield slice(start, start + size)
