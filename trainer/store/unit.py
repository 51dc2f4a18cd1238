"""Unit: weights that passes use together, those of an attention, an MLP or the head, and the borders between units.

Going forward over a border is the end of the one's pass and the begin of the other's, going backward the same the other
way round. The norm that a unit begins with goes over it; where there is none an empty node of the graph does. All that
a unit adds to gradients comes between two borders, or is put off in that order with the borders as marks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.linear.weight import Weight, Wgrads
from trainer.store.residence import Residence


class Unit:
    """The weights of a unit of a stage; owned by the training thread.

    `find` returns a weight and where it resides, None if the model has it not. Without `reads_backward` a backward pass
    adds to gradients alone.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[str], tuple[Weight, Residence] | None],
        wgrads: Wgrads,
        *,
        reads_backward: bool = True,
    ) -> None:
        self.name, self.weights, self.residences = name, list[Weight](), list[Residence]()
        self._find, self._wgrads, self._reads_backward = find, wgrads, reads_backward

    def weight(self, *names: str) -> Weight:
        """Return the handle of a parameter, or of several that were planned as one run, as one that the unit uses."""
        weight = self.weight_if_any(*names)
        assert weight is not None, f"{names[0]} is not on this stage, or not the first of a run"
        assert weight.name == " + ".join(names), f"{names} are not one run: {weight.name}"
        return weight

    def weight_if_any(self, *names: str) -> Weight | None:
        """Return the same, or None if the model has no such parameter."""
        found = self._find(names[0])
        if found is None:
            return None
        weight, residence = found
        weight.num_users += 1
        self.weights.append(weight)
        residence.is_read_backward |= self._reads_backward
        if residence not in self.residences:
            self.residences.append(residence)
        return weight

    def use(self) -> list[Residence]:
        """Begin a pass that reads the values, once they are up to date; return where it is the first that does."""
        return [residence for residence in self.residences if residence.use(self)]

    def release(self) -> None:
        """End a pass that reads them; one that has ended stays so."""
        for residence in self.residences:
            residence.release(self)

    def begin_adding(self) -> None:
        """Begin a pass that adds to gradients."""
        for residence in self.residences:
            residence.begin_adding(self)

    def end_adding(self) -> None:
        """End it: all gradients of the micro-batch are in."""
        for residence in self.residences:
            residence.end_adding(self)

    @contextmanager
    def passing(self, *, adds: bool) -> Iterator[None]:
        """Enclose a whole pass: the values are read, and gradients added to at once if `adds`."""
        self.use()
        if adds:
            self.begin_adding()
        yield
        if adds:
            self.end_adding()
        self.release()

    def begin_backward(self) -> list[Residence]:
        """Begin the backward pass, whose gradients may be put off; return as `use`."""
        opened = self.use() if self._reads_backward else []
        self._wgrads.add(self.begin_adding)
        return opened

    def end_backward(self) -> None:
        """End it."""
        self._wgrads.add(self.end_adding)
        self.release()


@dataclass(frozen=True, slots=True)
class Border:
    """Between the units before and after it; None is what no unit of this stage makes, or takes."""

    before: Unit | None
    after: Unit | None

    def forward(self) -> None:
        """End the forward pass of the one, begin that of the other: first, as they may reside together."""
        opened = [] if self.after is None else self.after.use()
        if self.before is not None:
            self.before.release()
        for residence in opened:
            if residence.following is not None:
                residence.following.prefetch()

    def backward(self) -> None:
        """End the backward pass of the other, begin that of the one: first, as they may reside together."""
        opened = [] if self.before is None else self.before.begin_backward()
        if self.after is not None:
            self.after.end_backward()
        for residence in opened:
            if residence.previous is not None and residence.previous.is_read_backward:
                residence.previous.prefetch()

    def cross(self, x: Tensor) -> Tensor:
        """Return x, which goes over the border, unchanged."""
        if torch.is_grad_enabled():
            return _Cross.apply(x, self)
        self.forward()
        return x


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, border: Border) -> Tensor:
        ctx.border = border
        ctx.set_materialize_grads(False)
        border.forward()
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, None]:
        ctx.border.backward()
        return dx, None
