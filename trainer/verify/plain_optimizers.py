"""The optimizers once more, in plain torch on whole tensors: torch's own, and two that are written apart."""

import math
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from trainer.config import OptimConfig
from trainer.config.optim import GroupConfig


def plain_optimizers(optim: OptimConfig, state: Mapping[str, Tensor]) -> list[torch.optim.Optimizer]:
    """Return what updates the parameters, in groups of one; each has the `factor` of its rate."""
    groups, matrices = [], []
    for name, value in state.items():
        group = next((group for group in optim.groups if fnmatch(name, group.pattern)), GroupConfig(""))
        decay = float(value.dim() > 1) if group.decay_factor is None else group.decay_factor
        options = {"params": [value], "factor": group.lr_factor, "weight_decay": optim.weight_decay * decay}
        is_matrix = value.dim() > 1 and (".attn." in name or ".mlp." in name) and "router" not in name
        if optim.name == "muon" and is_matrix:
            matrices.append(options | {"factor": group.lr_factor * (optim.muon_lr or optim.lr) / optim.lr})
        else:
            groups.append(options)
    if optim.name == "sgd":
        return [torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov)]
    betas = optim.beta1, optim.beta2
    if optim.name == "lion":
        return [Lion(groups, betas)]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps)
    return [adamw, Muon(matrices, optim)] if matrices else [adamw]


class Lion(torch.optim.Optimizer):
    """Lion in plain torch; owned by one thread."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step by the sign of a mean of gradient and momentum."""
        for group in self.param_groups:
            first, second = group["betas"]
            for value in group["params"]:
                momentum = self.state[value].setdefault("momentum", torch.zeros_like(value))
                value *= 1 - group["lr"] * group["weight_decay"]
                value -= group["lr"] * torch.sign(first * momentum + (1 - first) * value.grad)
                momentum.copy_(second * momentum + (1 - second) * value.grad)


class Muon(torch.optim.Optimizer):
    """Muon in plain torch, with products in the weights' dtype; owned by one thread."""

    def __init__(self, groups: list[dict[str, Any]], optim: OptimConfig) -> None:
        super().__init__(groups, {})
        self.optim = optim

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each matrix, of a stack each one, by what is orthogonal to it."""
        mu = self.optim.muon_momentum
        for group in self.param_groups:
            for value in group["params"]:
                momentum = self.state[value].setdefault("momentum", torch.zeros_like(value))
                momentum.copy_(mu * momentum + (1 - mu) * value.grad)
                mean = (1 - mu) * value.grad + mu * momentum
                rows, columns = value.shape[-2:]
                scale = 0.2 * math.sqrt(max(rows, columns))
                if self.optim.muon_scale == "original":
                    scale = max(1.0, rows / columns) ** 0.5
                value *= 1 - group["lr"] * group["weight_decay"]
                for matrix, direction in zip(value.view(-1, rows, columns), mean.view(-1, rows, columns), strict=True):
                    matrix -= group["lr"] * scale * self._orthogonal(direction)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        x = matrix / matrix.square().sum().sqrt().clamp(min=1e-7)
        for _ in range(self.optim.muon_steps):
            square = x.T @ x
            x = 3.4445 * x - 4.7750 * x @ square + 2.0315 * x @ square @ square
        return x


def plain_rate(optim: OptimConfig, step: int) -> float:
    """Return the learning rate of a step, as a mixture of `lr` and `min_lr`; small runs have no cool-down."""
    if step < optim.warmup_steps:
        return optim.lr / optim.warmup_steps * (step + 1)
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "inverse-sqrt":
        slow = optim.lr * (max(optim.warmup_steps, 1) / max(step, 1)) ** 0.5
        return optim.min_lr if step > optim.decay_steps or slow < optim.min_lr else slow
    falls = optim.schedule == "wsd"
    span = optim.wsd_decay_steps if falls else optim.decay_steps - optim.warmup_steps
    way = 1 - (optim.decay_steps - step) / max(span, 1)
    if not 0 < way < 1:
        return optim.min_lr if way >= 1 else optim.lr
    shares = {
        "linear": 1 - way,
        "sqrt": 1 - way**0.5,
        "cosine": math.cos(math.pi / 2 * way) ** 2,
        "exponential": 2 ** (1 - way) - 1,
    }
    share = shares[optim.wsd_decay if falls else optim.schedule]
    return share * optim.lr + (1 - share) * optim.min_lr
