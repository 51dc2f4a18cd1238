"""StepMemory: memory is used again once nothing refers to it, and never before."""

import numpy as np
import torch

from datakit.stream.step_memory import StepMemory


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
