"""StepMemory: memory is used again once nothing refers to it, and never before."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import Blend, Loader, write_store
from datakit.batches.step_memory import StepMemory


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Blend:
    store = write_store(tmp_path_factory.mktemp("memory") / "store", [range(90)] * 20, vocab_size=99)
    return Blend([(store, 1.0)], seq_length=8)


def test_memory_that_nothing_refers_to_is_used_again() -> None:
    memory = StepMemory(2)
    addresses = {memory.take(4096).ctypes.data for _ in range(5)}
    assert len(addresses) == 1


def test_memory_with_a_view_or_a_tensor_is_left_alone() -> None:
    memory = StepMemory(4)
    held = [memory.take(4096)]
    held.append(memory.take(4096).view(np.int64).reshape(2, -1)[1:])
    held.append(memory.take(4096)[:8])
    tensor = torch.from_numpy(memory.take(4096).view(np.int64))
    begins = [each.ctypes.data for each in held] + [tensor.data_ptr()]
    taken = memory.take(4096)
    assert all(not taken.ctypes.data <= begin < taken.ctypes.data + 4096 for begin in begins)


def test_it_keeps_a_few_and_those_of_one_size() -> None:
    memory = StepMemory(2)
    several = [memory.take(4096) for _ in range(5)]
    assert len({array.ctypes.data for array in several}) == 5
    assert len(memory._arrays) == 2
    assert memory.take(512).size == 512
    assert [array.size for array in memory._arrays] == [512]


@settings(max_examples=25)
@given(are_kept=st.lists(st.booleans(), min_size=1, max_size=40))
def test_what_a_caller_keeps_stays_as_it_was(blend: Blend, are_kept: list[bool]) -> None:
    """Whole steps, or one of their arrays."""
    with Loader(blend, 2, 1) as loader:
        found = []
        for step, is_kept in enumerate(are_kept):
            labels = loader.next_step().labels
            if is_kept:
                found.append((2 * step, labels))
        for sample, labels in found:
            assert (labels == loader.step_at(sample).labels).all()
