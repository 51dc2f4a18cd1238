"""Muon's arithmetic: an average of gradients, made orthogonal by Newton-Schulz, is the direction of a matrix.

The bits are those of torch.optim.Muon. Its products are of bf16; for float64 weights they are of float64 here. On CUDA
each of the two passes over state is one kernel: of an element the first reads gradient and moment and writes moment and
direction, the other reads direction and master and writes master and weight.
Sources: Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024; Liu and others, "Muon is
Scalable for LLM Training", 2025 (the scale match_rms).
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.native import DOUBLE, INT64
from trainer.config.optim import MuonScale
from trainer.ops import native, split
from trainer.ops.squares import chunk_table

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


@dataclass(frozen=True, slots=True)
class MuonPart:
    """A range of a matrix with its gradient and its state: flat, of one size.

    `master` and `published` are as an `Interval` of AdamW has them. Its directions are `sent` from an element of what
    travels on, if they are; its updates are `returned` from one on. `rate` and `decay` are factors of the learning rate
    and of weight decay, `scale` is what the matrix's rate is multiplied by.
    """

    gradient: Tensor
    moment: Tensor
    master: Tensor
    published: Tensor | None
    sent: int | None
    returned: int
    rate: float
    decay: float
    scale: float


class _MuonStep(ctypes.Structure):
    _fields_ = (
        *((name, DOUBLE) for name in ("momentum", "lr", "weight_decay")),
        *((name, INT64) for name in ("moments", "is_split", "published")),
    )


class MuonTable:
    """Where a rank's parts are, in the memory of their device, so that one call walks them all.

    It keeps the parts, none of them empty; owned by the training thread. The form "csrc" is that of GPUs.
    """

    def __init__(self, parts: Sequence[MuonPart]) -> None:
        self._parts = list(parts)
        if not self._parts:
            return
        first = self._parts[0]
        device, published = first.gradient.device, first.published
        self._has_kernels = device.type == "cuda" and native.lacks_kernels(device) is None
        numbers = torch.tensor([_numbers(part) for part in self._parts])
        factors = torch.tensor([[part.rate, part.decay, part.scale] for part in self._parts], dtype=torch.float64)
        chunks, _ = chunk_table([part.gradient.numel() for part in self._parts])
        self._rows, self._chunks = torch.cat([numbers, factors.view(torch.int64)], 1).to(device), chunks.to(device)
        self._kinds = native.DTYPE_CODES[first.moment.dtype], first.master.dtype == split.LOW
        self._published = native.DTYPE_CODES[torch.bfloat16 if published is None else published.dtype]

    def write_directions(
        self, out: Tensor, momentum: float, *, factor: Tensor, is_bad: Tensor, form: str = "csrc"
    ) -> None:
        """Average the gradients, scaled by `factor`, into the moments, and write what is sent of their directions.

        A bad step keeps the moments.
        """
        if form == "csrc" and self._parts and self._has_kernels:
            decisions = factor.double(), is_bad.float()
            self._call("muon_direction", _MuonStep(momentum), *decisions, out)
            return
        for part in self._parts:
            gradient = part.gradient * factor.to(part.gradient.dtype)
            values = direction(gradient, part.moment, momentum, is_bad=is_bad)
            if part.sent is not None:
                out[part.sent : part.sent + len(values)] = values

    def step(self, updates: Tensor, lr: float, weight_decay: float, *, is_bad: Tensor, form: str = "csrc") -> None:
        """Decay the masters, step by what is returned, and publish them; a bad step changes nothing."""
        if form == "csrc" and self._parts and self._has_kernels:
            self._call("muon_update", _MuonStep(0.0, lr, weight_decay), is_bad.float(), updates)
            return
        for part in self._parts:
            rate, values = lr * part.rate, updates[part.returned : part.returned + part.gradient.numel()]
            master = split.whole_master(part.master, part.published)
            decay = 1 - rate * weight_decay * part.decay
            step(master, values, decay=decay, rate=rate * part.scale, is_bad=is_bad)
            split.publish(master, part.master, part.published)

    def _call(self, op: str, numbers: _MuonStep, *tensors: Tensor) -> None:
        numbers.moments, numbers.is_split = self._kinds
        numbers.published = self._published
        tables = self._rows.data_ptr(), self._chunks.data_ptr(), len(self._chunks)
        pointers = [tensor.data_ptr() for tensor in tensors]
        native.call(op, self._parts[0].gradient, *tables, ctypes.byref(numbers), *pointers)


def _numbers(part: MuonPart) -> list[int]:
    pointers = [native.pointer(each) or 0 for each in (part.gradient, part.moment, part.master, part.published)]
    return [*pointers, part.gradient.numel(), -1 if part.sent is None else part.sent, part.returned]
