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
    device: torch.device,
) -> Tensor:
    """Return a rank's part of a parameter in its live shape; vocabulary padding is zero."""
    if row.std is None:
        return torch.ones(shape, dtype=dtype, device=device)
    whole = torch.zeros(shape, dtype=dtype, device=device)
    if row.std:
        box = row.placement.local_box(name, row.shape, layout, coords)
        normal_(whole[tuple(slice(0, size) for size in box.shape)], seed, name, row.shape, box.offset, row.std)
    return whole
