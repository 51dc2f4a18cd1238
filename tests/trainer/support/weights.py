"""Weights and groups without a store or processes, for tests of layers alone."""

import torch
from torch import Tensor

from trainer.linear.weight import Weight
from trainer.mesh.clock import Clock
from trainer.mesh.group import Group
from trainer.ops.dtypes import wide_dtype

CPU = torch.device("cpu")


def handle(values: Tensor, *, contributes: bool = True) -> tuple[Weight, Tensor]:
    """A weight and its gradient, which holds NaN until something is written there."""
    gradient = torch.full_like(values, torch.nan, dtype=wide_dtype(values.dtype))
    return Weight("w", values.clone(), gradient, contributes=contributes), gradient


def group(size: int = 1, index: int = 0) -> Group:
    """A group as one of its ranks has it, without anybody to talk to."""
    return Group("test", tuple(range(size)), index, Clock(CPU))
