"""How a fault is planted: an attribute of a module or a class is another one for a while."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol

import torch

from trainer.mesh.group import Group, Work
from trainer.verify.host_waits import replace_in


class Patch(Protocol):
    """What replaces attributes, and later puts back what was there."""

    def setattr(self, target: object, name: str, value: object, raising: bool = True) -> None:
        """Replace an attribute; one that is not there yet only if that is not to raise."""


Plant = Callable[[Patch], None]


class Patches:
    """Attributes that are replaced while the context is entered; owned by one thread, seen by all."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> "Patches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def setattr(self, target: object, name: str, value: object, raising: bool = True) -> None:
        """Replace an attribute; AttributeError if there is none, unless that is allowed."""
        if raising:
            getattr(target, name)
        replace_in(self._stack, target, name, value)


def wrapping(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Replace a function by change(the function, *its arguments)."""

    def plant(patch: Patch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **options: change(real, *args, **options))

    return plant


def together(*plants: Plant) -> Plant:
    """Plant several changes, which are one fault."""

    def plant(patch: Patch) -> None:
        for part in plants:
            part(patch)

    return plant


def skipping(kind: str, group: str) -> Plant:
    """Leave one kind of collective out on the groups of a name."""

    def call(real: Any, self: Group, called: str, *args: Any, **options: Any) -> Any:
        is_left_out = (called.removesuffix("_coalesced"), self.name) == (kind, group)
        return None if is_left_out else real(self, called, *args, **options)

    return wrapping(Group, "_call", call)


def read_at_once(kind: str, name: str) -> Plant:
    """Do not wait for one kind of call on the groups of a name."""

    def wait(real: Any, self: Work) -> torch.Tensor:
        return self.tensor.clone() if self.kind == kind and self.group.name == name else real(self)

    return wrapping(Work, "wait", wait)


def in_one_buffer(name: str) -> Plant:
    """Let all that a group passes to a method go through the same memory."""
    buffers: dict[Any, torch.Tensor] = {}

    def call(real: Any, self: Group, tensor: torch.Tensor, *args: Any, **options: Any) -> Work:
        own = buffers.setdefault((self.name, self.ranks, self.index), torch.empty(4096, dtype=tensor.dtype))
        return real(self, own[: tensor.numel()].view_as(tensor).copy_(tensor), *args, **options)

    return wrapping(Group, name, call)


def not_summed(real: Any, self: Group, whole: torch.Tensor, share: torch.Tensor | None = None) -> Work:
    """Leave each rank its own part in place of the sum."""
    own = self.share(whole).clone()
    return Work(self, "reduce_scatter", own if share is None else share.copy_(own), None)
