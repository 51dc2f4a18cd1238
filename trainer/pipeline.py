"""Runs a schedule's actions on one stage: receive, compute, send.

Receives wait, sends do not; the tensors in flight are kept until the step's end. `peak_live` counts the micro-batches
whose activations were held at once.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.mesh import Link, ProcessMesh
from trainer.schedule import Action
from trainer.stage import MicroBatch, Stage


class Pipeline:
    """Executes actions of one stage against its neighbours."""

    def __init__(self, stage: Stage, mesh: ProcessMesh, activation_shape: Sequence[int]) -> None:
        self.stage, self.mesh = stage, mesh
        self.activation_shape = tuple(activation_shape)  # [B, S, D]
        self.peak_live = 0

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
        in_flight: list[tuple[dist.Work, Tensor]] = []
        is_training = any(action.kind == "B" for action in actions)
        for kind, number in actions:
            if kind == "F":
                received = self._receive(mesh.activations.previous)
                if received is not None and is_training:
                    received.requires_grad_()
                out = self.stage(received, batches[number])
                if mesh.is_last_stage:
                    out = reduce_loss(out, batches[number])
                    total += out.detach()
                self._send(mesh.activations.following, out.detach(), in_flight)
                if is_training:
                    live[number] = (received, out)
                    self.peak_live = max(self.peak_live, len(live))
            else:
                gradient = self._receive(mesh.gradients.following)
                received, out = live.pop(number)
                torch.autograd.backward(out, gradient)
                if received is not None:
                    assert received.grad is not None, "the stage's input takes part in its output"
                    self._send(mesh.gradients.previous, received.grad, in_flight)
        for work, _ in in_flight:
            work.wait()
        return total

    def _receive(self, link: Link | None) -> Tensor | None:
        if link is None:
            return None
        tensor = torch.empty(self.activation_shape, dtype=self.stage.dtype, device=self.mesh.device)
        with self.mesh.clock.span("bubble"):
            work = dist.irecv(tensor, src=link.peer, group=link.handle)
            assert work is not None, "a receive from another rank"
            work.wait()
        return tensor

    @staticmethod
    def _send(link: Link | None, tensor: Tensor, in_flight: list[tuple[dist.Work, Tensor]]) -> None:
        if link is not None:
            tensor = tensor.contiguous()
            work = dist.isend(tensor, dst=link.peer, group=link.handle)
            assert work is not None, "a send to another rank"
            in_flight.append((work, tensor))
