"""A small model with dropout and its samples, which trainers of others train."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_SAMPLES = 40


class Samples(torch.utils.data.Dataset[Any]):
    """Numbers to be fitted."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum()}


class Small(nn.Module):
    """A model with dropout, whose random numbers count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.layers(x).squeeze(-1)
        return {"loss": (predicted - y).square().mean(), "predicted": predicted}


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of a model's parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def damage(step: Path) -> None:
    """Flip a byte at the end of a step's data."""
    file = next(step.rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
