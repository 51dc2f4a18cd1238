"""The random states of a program are those of one that did not stop, through whatever draws numbers meanwhile."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckptkit.torch import Run

pytestmark = pytest.mark.ci


def dropped(url: str, stops: list[int]) -> list[float]:
    """Train with dropout on batches of a DataLoader with a generator of its own; each stop ends a process's turn."""
    losses = []
    for stop in stops:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        state = {"model": model, "rng": True, "step": 0}
        with Run(url) as run:
            if run.newest() is not None:
                run.load(state)
            rows = torch.arange(40.0).view(10, 4)[state["step"] :]
            for row in DataLoader(list(rows), batch_size=None, generator=torch.Generator()):
                loss = model(row).sum()
                loss.backward()
                losses.append(loss.item())
                state["step"] += 1
                if state["step"] == stop:
                    break
            run.save(stop, state)
    return losses


def test_a_dataloader_with_a_generator_leaves_dropouts_numbers_alone(tmp_path: Path) -> None:
    assert dropped(f"{tmp_path}/parts", [3, 6]) == dropped(f"{tmp_path}/whole", [6])


@pytest.mark.slow
def test_random_states_come_back(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1, {"rng": True})
        expected = random.random(), np.random.random(), torch.rand(3).tolist()
        run.load({"rng": True})
    assert (random.random(), np.random.random(), torch.rand(3).tolist()) == expected
