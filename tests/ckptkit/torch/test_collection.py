"""Pauses of garbage collection: none while a save is planned, and the program's own setting comes back."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptkit.torch import Run
from ckptkit.torch.collection import paused_collection


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Return the generations that were collected."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_a_save_and_a_load_of_many_tensors_collect_next_to_nothing(tmp_path: Path, collections: list[int]) -> None:
    model = nn.ParameterList(torch.zeros(2) for _ in range(2000))
    with Run(tmp_path) as run:
        collections.clear()
        run.save(1, {"model": model})
        run.load({"model": model})
    assert len(collections) < 15  # dozens of thousands of objects were made


def test_the_setting_of_the_program_comes_back() -> None:
    seen = []

    def fail() -> None:
        seen.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError), paused_collection():
        fail()
    assert [*seen, gc.isenabled()] == [False, True]
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
