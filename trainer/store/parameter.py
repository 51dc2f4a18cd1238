"""Parameter: what is true of one parameter of the model whatever the layout."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckptkit import Coords, ParallelLayout, Placement
from trainer.ops.philox import normal_


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter in global terms: its shape, its placement and its initial values.

    `std` is None for ones, 0 for zeros, else the standard deviation of normals. `optimizer` names the one that updates
    it, `rate` and `decay` are factors of the learning rate and of weight decay: without a decay it has 0. The
    gradient of a parameter that tp does not cut is the same on all tp ranks, so one of them contributes it, unless it
    `is_partial`: then each has the part of its own heads, or of its own tokens.
    """

    shape: tuple[int, ...]
    placement: Placement
    std: float | None
    decay: float = 0.0
    is_partial: bool = False
    rate: float = 1.0
    optimizer: str = "adamw"

    def contributes_on(self, layout: ParallelLayout, coords: Coords) -> bool:
        """Return whether the rank at `coords` contributes to the sum of the gradients over the holders.

        Where tp does not cut it, that is the first of the tp ranks that hold the same part.
        """
        if self.is_partial or any(cut.axis == "tp" for cut in self.placement.cuts):
            return True
        parts = [self.placement.parts(layout, replace(coords, tp=tp)) for tp in range(coords.tp + 1)]
        return parts.index(parts[-1]) == coords.tp


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
