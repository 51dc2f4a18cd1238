"""Muon's arithmetic: an average of gradients, made orthogonal by Newton-Schulz, is the direction of a matrix.

The bits are those of torch.optim.Muon. Its products are of bf16; for float64 weights they are of float64 here.
Sources: Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024; Liu and others, "Muon is
Scalable for LLM Training", 2025 (the scale match_rms).
"""

import math

import torch
from torch import Tensor

from trainer.config.optim import MuonScale

COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7


def direction_dtype(wide: torch.dtype) -> torch.dtype:
    """Return the dtype in which directions travel and are made orthogonal."""
    return torch.float64 if wide == torch.float64 else torch.bfloat16


def direction(gradient: Tensor, moment: Tensor, momentum: float, *, is_bad: Tensor) -> Tensor:
    """Average a gradient into its moment, in place, and return Nesterov's mean of both; a bad step keeps the moment."""
    wide = moment.to(gradient.dtype)
    averaged = wide.lerp(gradient, 1 - momentum)
    moment.copy_(torch.where(is_bad > 0, wide, averaged))
    return gradient.lerp(averaged, momentum).to(direction_dtype(gradient.dtype))


def orthogonal(matrices: Tensor, steps: int) -> Tensor:
    """Return matrices [N, rows, columns] with the same singular vectors and singular values near 1.

    The polynomial is of fifth degree. A matrix that is less than EPS has smaller values.
    """
    first, third, fifth = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.mT if is_tall else x


def scale_of(scale: MuonScale, rows: int, columns: int) -> float:
    """Return by what the rate of a matrix is multiplied: for match_rms a step is as large as one of AdamW."""
    if scale == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def step(master: Tensor, update: Tensor, *, decay: float, rate: float, is_bad: Tensor) -> None:
    """Decay a part of a master and step by an update, in place; a bad step changes nothing."""
    stepped = master.mul(decay).add_(update, alpha=-rate)
    master.copy_(torch.where(is_bad > 0, master, stepped))
