"""SGD with momentum and Lion: optimizers with one moment, over all parts of parameters that a rank updates.

Each number of a product or a sum is rounded by itself, in the dtype of the master. So the bits of an element depend on
its own numbers alone: not on threads, on the device or on how parameters are cut. A moment in bf16 is rounded once a
step.
Sources: Sutskever and others, "On the Importance of Initialization and Momentum in Deep Learning", 2013; Chen and
others, "Symbolic Discovery of Optimization Algorithms", 2023 (Lion).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import OptimConfig
from trainer.ops import split
from trainer.ops.squares import Squares

AT_ONCE = 1 << 24  # elements whose temporaries are there together
Tensors = tuple[Tensor, ...] | list[Tensor]


@dataclass(frozen=True, slots=True)
class MomentumPart:
    """A part of one parameter with its gradient and its moment: flat, of one size.

    `master`, `published`, `decays` and `row` are as an `Interval` of AdamW has them.
    """

    gradient: Tensor
    moment: Tensor
    master: Tensor
    published: Tensor | None
    decays: bool
    row: int


@dataclass(frozen=True, slots=True)
class _Lists:
    """The wide numbers of some parts that all decay, or do not: gradients are copies, scaled, and 0 in a bad step."""

    gradients: Tensors
    moments: Tensors
    masters: Tensors
    decays: bool


class MomentumTable:
    """A rank's parts; owned by the training thread."""

    def __init__(self, parts: Sequence[MomentumPart], at_once: int = AT_ONCE) -> None:
        """Group the parts that are updated together, of about `at_once` elements."""
        kept = [part for part in parts if part.gradient.numel() > 0]
        self._squares = Squares([part.gradient for part in kept], [part.row for part in kept])
        self._groups = [group for decays in (True, False) for group in _groups(kept, at_once, decays=decays)]

    def write_squared_norms(self, out: Tensor) -> None:
        """Write the squared norm of each part's gradient into its row of `out`, float64; leave the other rows."""
        self._squares.write(out)

    @torch.no_grad()
    def sgd(self, optim: OptimConfig, lr: float, *, factor: Tensor, is_bad: Tensor) -> None:
        """Make one step as torch.optim.SGD, with the gradients scaled by `factor`; none where `is_bad` is 1.

        Weight decay is added to the gradient, as there. Both are numbers on the device, which decides.
        """
        for lists in self._lists(factor, is_bad):
            counts = _counts(is_bad, lists)
            if lists.decays:
                torch._foreach_add_(lists.gradients, torch._foreach_mul(lists.masters, counts * optim.weight_decay))
            torch._foreach_mul_(lists.moments, _or_one(optim.momentum, counts))
            torch._foreach_add_(lists.moments, lists.gradients)
            steps: Tensors = lists.moments
            if optim.nesterov:
                steps = torch._foreach_mul(lists.moments, optim.momentum)
                torch._foreach_add_(steps, lists.gradients)
            torch._foreach_sub_(lists.masters, torch._foreach_mul(steps, counts * lr))

    @torch.no_grad()
    def lion(self, optim: OptimConfig, lr: float, *, factor: Tensor, is_bad: Tensor) -> None:
        """Make one step of Lion, with the gradients scaled by `factor`; none where `is_bad` is 1."""
        for lists in self._lists(factor, is_bad):
            counts = _counts(is_bad, lists)
            steps = torch._foreach_mul(lists.moments, optim.beta1)
            torch._foreach_add_(steps, torch._foreach_mul(lists.gradients, 1 - optim.beta1))
            torch._foreach_sign_(steps)
            torch._foreach_mul_(lists.masters, _or_one(1 - lr * optim.weight_decay * lists.decays, counts))
            torch._foreach_mul_(steps, counts * lr)
            torch._foreach_sub_(lists.masters, steps)
            torch._foreach_mul_(lists.moments, _or_one(optim.beta2, counts))
            torch._foreach_mul_(lists.gradients, 1 - optim.beta2)
            torch._foreach_add_(lists.moments, lists.gradients)

    def _lists(self, factor: Tensor, is_bad: Tensor) -> Iterator[_Lists]:
        """Yield the numbers of each group, and write what they became to where the parts keep it."""
        for group in self._groups:
            wide = group[0].gradient.dtype
            gradients = torch._foreach_mul([part.gradient for part in group], factor.to(wide))
            for gradient in gradients:
                gradient.masked_fill_(is_bad > 0, 0.0)
            masters = [split.whole_master(part.master, part.published) for part in group]
            lists = _Lists(gradients, [part.moment.to(wide) for part in group], masters, group[0].decays)
            yield lists
            for part, moment, master in zip(group, lists.moments, lists.masters, strict=True):
                if moment is not part.moment:
                    part.moment.copy_(moment)
                split.publish(master, part.master, part.published)


def _groups(parts: Sequence[MomentumPart], at_once: int, *, decays: bool) -> list[list[MomentumPart]]:
    """Return the parts that decay, or those that do not, in groups of about so many elements."""
    groups, filled = list[list[MomentumPart]](), at_once
    for part in parts:
        if part.decays != decays:
            continue
        if filled >= at_once:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += part.gradient.numel()
    return groups


def _counts(is_bad: Tensor, lists: _Lists) -> Tensor:
    """Return 1 on the device, or 0 in a bad step."""
    return (is_bad <= 0).to(lists.gradients[0].dtype)


def _or_one(factor: float, counts: Tensor) -> Tensor:
    """Return a factor, or 1 in a bad step: in its place nothing changes."""
    return torch.where(counts > 0, factor, torch.ones_like(counts))
