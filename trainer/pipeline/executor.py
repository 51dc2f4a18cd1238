"""Runs a schedule's actions on one stage: receive, compute, send.

Receives wait; a send waits only once `num_stages` earlier ones to the same neighbour are under way, so what is kept for
sending stays bounded whatever the number of micro-batches. `peak_live` counts the micro-batches whose activations were
held at once, `peak_sends` the sends under way to one neighbour.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.mesh.group import Group, Work
from trainer.mesh.mesh import ProcessMesh
from trainer.pipeline.actions import Action
from trainer.stage import MicroBatch, Stage


class Pipeline:
    """Executes actions of one stage against its neighbours."""

    def __init__(self, stage: Stage, mesh: ProcessMesh, activation_shape: Sequence[int]) -> None:
        self.stage, self.mesh = stage, mesh
        self.activation_shape = tuple(activation_shape)  # [B, S, D]
        self.peak_live = 0
        self.peak_sends = 0

    def run(
        self,
        actions: Sequence[Action],
        batches: Sequence[MicroBatch],
        reduce_loss: Callable[[Tensor, MicroBatch], Tensor],
    ) -> Tensor:
        """Run all actions; return the sum of `reduce_loss` over the micro-batches, float64 and 0 off the last stage.

        `reduce_loss` turns the token losses [B, S] into the scalar that the backward starts from.
        """
        mesh = self.mesh
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        live: dict[int, tuple[Tensor | None, Tensor]] = {}
        activations, gradients = _Sends(mesh.activations.following), _Sends(mesh.gradients.previous)
        is_training = any(action.kind == "B" for action in actions)
        for kind, _, number in actions:
            if kind == "F":
                received = self._receive(mesh.activations.previous)
                if received is not None and is_training:
                    received.requires_grad_()
                out = self.stage(received, batches[number])
                if mesh.is_last_stage:
                    out = reduce_loss(out, batches[number])
                    total += out.detach()
                self._send(activations, out.detach())
                if is_training:
                    live[number] = (received, out)
                    self.peak_live = max(self.peak_live, len(live))
            else:
                gradient = self._receive(mesh.gradients.following)
                received, out = live.pop(number)
                torch.autograd.backward(out, gradient)
                if received is not None:
                    assert received.grad is not None, "the stage's input takes part in its output"
                    self._send(gradients, received.grad)
        for sends in (activations, gradients):
            self._finish(sends, keep=0)
        return total

    def _receive(self, link: Group | None) -> Tensor | None:
        if link is None:
            return None
        tensor = torch.empty(self.activation_shape, dtype=self.stage.dtype, device=self.mesh.device)
        return link.receive(tensor, source=1 - link.index).wait()

    def _send(self, sends: "_Sends", tensor: Tensor) -> None:
        if sends.link is None:
            return
        self._finish(sends, keep=self.mesh.layout.pp - 1)
        sends.under_way.append(sends.link.send(tensor.contiguous(), to=1 - sends.link.index))
        self.peak_sends = max(self.peak_sends, len(sends.under_way))

    def _finish(self, sends: "_Sends", *, keep: int) -> None:
        """Wait for all but the newest `keep` sends and let go of their tensors."""
        while len(sends.under_way) > keep:
            sends.under_way.popleft().wait()


class _Sends:
    """The sends under way to one neighbour, oldest first, each of which keeps the tensor that it reads."""

    def __init__(self, link: Group | None) -> None:
        self.link = link
        self.under_way: deque[Work] = deque()
