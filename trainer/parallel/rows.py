"""How many rows of experts a rank of ep has memory for, and what becomes of a step that needs more.

The number is known before the router has spoken, as a share of the mean: no host waits for a count. A step in which any
layer, micro-batch or rank needs more is void, and so is one that was started behind it. Both are repeated, with as many
rows as were asked for, in eighths of the mean; that bound stays for 100 steps. So no token is dropped, and what a run
trains does not depend on the bound. For example at 1.5 a step that needs 1.6 times the mean is repeated with 1.625.
With more rows than a device has memory for, the layers of experts are made again in the backward, which changes no bit.
"""

import math

import torch
from torch import Tensor

from trainer.mesh.group import Group

STAYS = 100  # steps that a raised bound stays


class RowLimit:
    """The bound of a rank, the same on all; owned by the training thread.

    `most` is what the step under way needed on this rank, over the mean; behind its end on any. Outside of steps there
    is memory for all rows. `fits` is how many times the mean a rank can keep until the backward.
    """

    fits = math.inf

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor = self._least = factor
        self._until = self._step = 0
        self.is_step = False
        self.most = torch.zeros((), dtype=torch.float64, device=device)

    def begin_step(self, step: int) -> None:
        """Begin to note what is needed; go back to the first bound where a raised one has stayed long enough."""
        self.is_step, self._step = True, step
        if step >= self._until:
            self.factor = self._least
        self.most = torch.zeros_like(self.most)

    @property
    def is_crowded(self) -> bool:
        """Return whether what layers of experts keep would not fit, in the step under way."""
        return self.is_step and self.factor > self.fits

    def num_rows(self, num_rows: int, num_ranks: int) -> int:
        """Return for how many of all rows each of so many ranks has memory: for 64 of 128 on 3 at 1.5, in a step."""
        return min(math.ceil(self.factor * num_rows / num_ranks), num_rows) if self.is_step else num_rows

    def note(self, needed: Tensor, mean: float) -> None:
        """Note how many rows a layer of a micro-batch needs."""
        if self.is_step:
            self.most = torch.maximum(self.most, needed.to(self.most.dtype) / mean)

    def is_exceeded(self, world: Group) -> Tensor:
        """End a step: return whether any rank needed more than the bound, 0 or 1 on the device."""
        self.is_step = False
        self.most = world.all_reduce(self.most, "max")
        return (self.most > self.factor).to(self.most.dtype)

    def make_room(self, most: float) -> None:
        """Raise the bound to what a step needed, for it and steps to come."""
        self.factor = max(math.ceil(most * 8) / 8, self._least)
        self._until = self._step + STAYS
