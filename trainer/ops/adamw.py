"""AdamW over all parts of parameters that a rank updates, and the squared norms of their gradients, one pass each.

A step reads gradient, moments and master once, and writes moments, master and the 16-bit weight. Arithmetic has the
dtype of the master; moments may be kept in bf16, rounded once a step. A split master is the bf16 weight and the 16 bits
below it. The bits of an element depend on its own numbers and the step alone: not on threads, on the device or on how
parameters are cut.
Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import adamw as torch_adamw

from threefold.errors import UserError
from threefold.native import DOUBLE, INT64
from trainer.config import OptimConfig
from trainer.ops import forms, native, split
from trainer.ops.squares import CHUNK, Squares, chunk_table


@dataclass(frozen=True, slots=True)
class Interval:
    """A part of one parameter with its gradient and optimizer state: flat, of one size and one wide dtype.

    Both moments may be of bf16 where the others are of fp32. `published` takes the master rounded to bf16 or fp16;
    it is None if the master is the weight itself. If `master` is of int16, it has the low bits and `published`
    the high ones, as `trainer.ops.split` says. `decays`: weight decay applies. `row` is the place of the squared norm.
    """

    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor
    published: Tensor | None
    decays: bool
    row: int


class IntervalTable:
    """Where a rank's intervals are, in the memory of their device, so that one call walks them all.

    It keeps the intervals; owned by the training thread.
    """

    def __init__(self, intervals: Sequence[Interval]) -> None:
        """Note the intervals; UserError if one has tensors of several sizes, dtypes or devices."""
        self._intervals = [each for each in intervals if each.gradient.numel() > 0]
        self._squares = Squares([each.gradient for each in self._intervals], [each.row for each in self._intervals])
        if not self._intervals:
            return
        self._published = next((each.published.dtype for each in intervals if each.published is not None), None)
        for each in intervals:
            _check(each, self._intervals[0], self._published)
        chunks, bounds = chunk_table([each.gradient.numel() for each in self._intervals])
        rows = torch.tensor([_row(each) for each in self._intervals])
        device = self._intervals[0].master.device
        self._chunks = chunks.to(device)
        self._rows = torch.cat([rows, bounds], 1).to(device)

    def adamw(
        self, optim: OptimConfig, lr: float, step: int, *, factor: Tensor, is_bad: Tensor, form: str = "csrc"
    ) -> None:
        """Make one step in place, after `step` steps, with the gradients scaled by `factor`; none where `is_bad` is 1.

        Both are numbers on the device, which decides: the host does not wait for them.
        """
        if not self._intervals:
            return
        if form != "csrc":
            whole = [with_whole_master(each) for each in self._intervals]
            _FORMS[form](whole, optim, lr, step, factor=factor, is_bad=is_bad)
            for each, updated in zip(self._intervals, whole, strict=True):
                if updated is not each and each.published is not None:
                    split.split_into(each.published, each.master, updated.master)
            return
        first = self._intervals[0]
        moments, is_split = native.DTYPE_CODES[first.exp_avg.dtype], first.master.dtype == split.LOW
        published = native.DTYPE_CODES[self._published or torch.bfloat16]
        numbers = _Step(lr, optim.beta1, optim.beta2, optim.eps, optim.weight_decay, step, moments, is_split, published)
        factor, is_bad = factor.double(), is_bad.float()
        tables = (self._rows.data_ptr(), self._chunks.data_ptr(), len(self._chunks))
        decisions = (factor.data_ptr(), is_bad.data_ptr())
        native.call("adamw", first.gradient, *tables, ctypes.byref(numbers), *decisions)

    def write_squared_norms(self, out: Tensor) -> None:
        """Write the squared norm of each interval's gradient into its row of `out`, float64; leave the other rows."""
        self._squares.write(out)


def with_whole_master(interval: Interval) -> Interval:
    """Return an interval itself, or with a copy of its split master put together, which is then not published."""
    if interval.master.dtype != split.LOW:
        return interval
    assert interval.published is not None, "the high bits"
    return replace(interval, master=split.joined(interval.published, interval.master), published=None)


@torch.no_grad()
def _torch_adamw(
    intervals: Sequence[Interval], optim: OptimConfig, lr: float, step: int, *, factor: Tensor, is_bad: Tensor
) -> None:
    """Make the step of `IntervalTable.adamw` by torch's fused AdamW, whose moments have the dtype of the masters."""
    for decay, lists in _by_decay(intervals, optim):
        steps = list(torch.full((len(lists[0]),), float(step), device=factor.device))
        masters, gradients, *moments = lists
        torch._foreach_mul_(gradients, torch.where(is_bad > 0, 1.0, factor).to(gradients[0].dtype))
        update: Any = torch_adamw.adamw
        update(
            masters, gradients, *moments, [], steps, fused=True, found_inf=is_bad.float(), amsgrad=False,
            beta1=optim.beta1, beta2=optim.beta2, lr=lr, weight_decay=decay, eps=optim.eps, maximize=False,
        )  # fmt: skip
    _publish(intervals)


@torch.no_grad()
def _apex_adamw(
    intervals: Sequence[Interval], optim: OptimConfig, lr: float, step: int, *, factor: Tensor, is_bad: Tensor
) -> None:
    update, device = forms.package("amp_C").multi_tensor_adam_capturable, factor.device
    is_left_out, of_step = is_bad.int().view(1), torch.full((1,), step + 1, dtype=torch.int32, device=device)
    rate = torch.full((), lr, device=device)
    for decay, (masters, gradients, *moments) in _by_decay(intervals, optim):
        numbers = (rate, optim.beta1, optim.beta2, optim.eps, of_step)
        update(CHUNK, is_left_out, [gradients, masters, *moments], *numbers, 1, 1, decay, factor.float().view(1))
    _publish(intervals)


def _by_decay(
    intervals: Sequence[Interval], optim: OptimConfig
) -> Iterator[tuple[float, tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]]]:
    """Yield the weight decay, the masters, gradients and moments of those that decay and of those that do not."""
    for decays in (True, False):
        some = [each for each in intervals if each.decays == decays]
        if some:
            lists = ([each.master for each in some], [each.gradient for each in some],
                     [each.exp_avg for each in some], [each.exp_avg_sq for each in some])  # fmt: skip
            yield optim.weight_decay * decays, lists


def _publish(intervals: Sequence[Interval]) -> None:
    copies = [(each.published, each.master) for each in intervals if each.published is not None]
    if copies:
        torch._foreach_copy_([published for published, _ in copies], [master for _, master in copies])


_FORMS = {"torch": _torch_adamw, "apex": _apex_adamw}


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, DOUBLE) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        ("step", INT64),
        ("moments", INT64),
        ("is_split", INT64),
        ("published", INT64),
    )


def _row(interval: Interval) -> list[int]:
    published = 0 if interval.published is None else interval.published.data_ptr()
    states = (interval.gradient, interval.exp_avg, interval.exp_avg_sq, interval.master)
    numbers = (published, interval.gradient.numel(), interval.decays, interval.row)
    return [*(state.data_ptr() for state in states), *numbers]


def _check(interval: Interval, first: Interval, published: torch.dtype | None) -> None:
    is_split, moments, device = first.master.dtype == split.LOW, first.exp_avg.dtype, first.master.device
    wide = torch.float32 if is_split else first.master.dtype
    if wide == torch.float64 and (interval.published is not None or moments != wide):
        raise UserError("adamw: a float64 master has float64 moments, and is published as it is")
    if is_split and interval.published is None:
        raise UserError("adamw: the high bits of a split master are the published weight, which is not there")
    kinds = {"exp_avg": moments, "exp_avg_sq": moments, "master": first.master.dtype}
    kinds["published"] = torch.float16 if published == torch.float16 and not is_split else torch.bfloat16
    for name in ("gradient", "exp_avg", "exp_avg_sq", "master", "published"):
        tensor, dtype = getattr(interval, name), kinds.get(name, wide)
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
            raise UserError(
                f"adamw: {name} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}, "
                f"not {dtype} on {device} without gaps"
            )
        if tensor.numel() != interval.gradient.numel():
            raise UserError(f"adamw: {name} has {tensor.numel()} elements, the gradient {interval.gradient.numel()}")
    if moments not in (wide, torch.bfloat16):
        raise UserError(f"adamw: moments are of {wide} or bfloat16, not of {moments}")
