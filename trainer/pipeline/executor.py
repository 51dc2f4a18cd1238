"""The executor: runs a rank's row of actions against its neighbours, whatever schedule and passes made the row.

A receive is begun at its action and waited for by the pass that reads it, which may be the one after the next. A send
waits while `max_sends` earlier ones on its link are under way, so what is kept for sending stays bounded whatever the
number of micro-batches. Between the two passes of a micro-batch its graph is kept, but not its output: that is freed
once sent. Between B and W what the products for the gradients of weights read is kept: the input of each linear and
the gradient of its output. Whoever makes gradients may ask whether the pass in work is the last of its kind on its
stage.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainer.linear.weight import Product, Wgrads, make
from trainer.mesh.group import Group, Work
from trainer.pipeline.actions import Action

M = TypeVar("M")
# The forward pass of a stage: from what it received (None on the first stage) and a micro-batch to what the next stage
# receives, or on the last stage to the scalar that the backward pass starts from.
Chunk = Callable[[Tensor | None, M], Tensor]


def nothing_noted(_kind: str, _stage: int, _microbatch: int) -> None:
    """Leave an action out."""


class Executor(Generic[M]):
    """Runs rows of actions on one rank's thread; `peak_live` and `peak_sends` count what it held at once.

    `link_of` returns the group of two ranks that a transfer takes, `new_buffer` memory for what is received. `wgrads`
    is where the chunks' layers hand in gradients; `after_backward`, if there is one, is called after each
    backward pass. `around` encloses each pass of a step, F, B or W, once what it reads is there.
    `note` is called as each action begins, and with "" when the row has ended.
    """

    def __init__(
        self, link_of: Callable[[Action], Group], new_buffer: Callable[[], Tensor], wgrads: Wgrads, *, max_sends: int
    ) -> None:
        self._link_of, self._new_buffer, self._max_sends, self.wgrads = link_of, new_buffer, max_sends, wgrads
        self._read_by: dict[Action, Tensor | Work]  # what a pass reads, or its receive, which keeps the buffer
        self._live: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | Tensor]]
        self._put_off: dict[tuple[int, int], list[Product]]  # of a backward pass to its W
        self._sends: dict[tuple[str, tuple[int, ...]], deque[Work]]  # by group
        self.peak_live = self.peak_sends = 0
        self.after_backward: Callable[[], None] | None = None
        self.around: Callable[[Action], AbstractContextManager[object]] = unmarked
        self.note: Callable[[str, int, int], object] = nothing_noted

    def run(self, actions: Sequence[Action], chunks: Mapping[int, Chunk[M]], microbatches: Sequence[M]) -> list[Tensor]:
        """Run a row on the chunks of the rank's stages; return the outputs that no stage read, those of the last one.

        Without backward passes in the row nothing is kept for them.
        """
        self._read_by, self._live, self._put_off = {}, {}, {}
        self._sends = defaultdict(deque)
        trains = any(action.kind == "B" for action in actions)
        around = self.around if trains else unmarked
        has_w = {(stage, m) for kind, stage, m in actions if kind == "W"}
        last = {(kind, stage): m for kind, stage, m in actions}
        for action in actions:
            kind, stage, m = action
            self.note(kind, stage, m)
            self.wgrads.is_last = last[kind, stage] == m
            if kind == "F":
                received = self._taken(action)
                with around(action):
                    out = self._forward(action, received, chunks[stage], microbatches[m], trains=trains)
                self._read_by[Action("F", stage + 1, m)] = out
            elif kind == "B":
                gradient = self._taken(action)
                with around(action):
                    gradient = self._backward(action, gradient, puts_off=(stage, m) in has_w)
                if self.after_backward is not None:
                    self.after_backward()
                if gradient is not None:
                    self._read_by[Action("B", stage - 1, m)] = gradient
            elif kind == "W":
                with around(action):
                    make(self._put_off.pop((stage, m)))
            elif kind in ("SF", "SB"):
                reader = Action("F", stage + 1, m) if kind == "SF" else Action("B", stage - 1, m)
                self._send(self._link_of(action), self._taken(reader))
            else:
                link = self._link_of(action)
                reader = Action("F" if kind == "RF" else "B", stage, m)
                self._read_by[reader] = link.receive(self._new_buffer(), source=1 - link.index)
        self.wgrads.is_last = False
        for sends in self._sends.values():
            self._finish(sends, keep=0)
        self.note("", 0, 0)
        unread = [self._taken(reader) for reader in list(self._read_by)]
        return [tensor for tensor in unread if tensor is not None]

    def _forward(
        self, action: Action, received: Tensor | None, chunk: Chunk[M], microbatch: M, *, trains: bool
    ) -> Tensor:
        if received is not None and trains:
            received.requires_grad_()
        out = chunk(received, microbatch)
        if trains:  # of a tensor its place in the graph is enough, of the loss the shape is needed too
            self._live[action.stage, action.microbatch] = received, get_gradient_edge(out) if out.dim() else out
            self.peak_live = max(self.peak_live, len(self._live) + len(self._put_off))
        return out.detach()

    def _backward(self, action: Action, gradient: Tensor | None, *, puts_off: bool) -> Tensor | None:
        """Add the gradients of all weights, or put them off; return that of what the stage received."""
        place = (action.stage, action.microbatch)
        received, out = self._live.pop(place)
        if puts_off:
            with self.wgrads.putting_off() as self._put_off[place]:
                torch.autograd.backward(out, gradient)
        else:
            torch.autograd.backward(out, gradient)
        if received is None:
            return None
        assert received.grad is not None, "the stage's input takes part in its output"
        return received.grad

    def _taken(self, reader: Action) -> Tensor | None:
        found = self._read_by.pop(reader, None)
        return found.wait() if isinstance(found, Work) else found

    def _send(self, link: Group, tensor: Tensor | None) -> None:
        assert tensor is not None, "a pass made what is sent"
        sends = self._sends[link.name, link.ranks]
        self._finish(sends, keep=self._max_sends - 1)
        sends.append(link.send(tensor.contiguous(), to=1 - link.index))
        self.peak_sends = max(self.peak_sends, len(sends))

    def _finish(self, sends: deque[Work], *, keep: int) -> None:
        """Wait for all but the newest `keep` sends, and let go of their tensors."""
        while len(sends) > keep:
            sends.popleft().wait()


def unmarked(_action: Action) -> AbstractContextManager[object]:
    """Enclose a pass with nothing."""
    return nullcontext()
