"""The initial values of parameters: a function of seed, name and place, whatever the layout."""

import torch
from torch import Tensor

from ckptkit import Coords, ParallelLayout
from trainer.ops.philox import normal_
from trainer.store.parameter import Parameter


def initial_values(
    name: str,
    row: Parameter,
    shape: tuple[int, ...],
    layout: ParallelLayout,
    coords: Coords,
    seed: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return a rank's part of a parameter in its live shape; vocabulary padding is zero."""
    if row.std is None:
        return torch.ones(shape, dtype=dtype)
    whole = torch.zeros(shape, dtype=dtype)
    if row.std:
        box = row.placement.local_box(name, row.shape, layout, coords)
        values = torch.empty(box.shape, dtype=dtype)
        normal_(values, seed, name, row.shape, box.offset, row.std)
        whole[tuple(slice(0, size) for size in box.shape)] = values
    return whole
