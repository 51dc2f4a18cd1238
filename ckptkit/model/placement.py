"""Placement: how one global tensor is cut over the mesh, known without any model code.

Vocabulary padding exists only in the live tensor: a rank's box is clipped to the true shape, padding is never stored.
"""

from dataclasses import dataclass
from typing import Literal

from ckptkit.model.box import Box
from ckptkit.model.layout import Coords, ParallelLayout, stage_layers
from threefold.errors import UserError


@dataclass(frozen=True, slots=True)
class Placement:
    """Which stage owns a tensor and which dim is cut by which axis.

    `stage` is "first", "last" or a layer number. `dim` None means replicated over `axis`. `padded` says that the live
    tensor rounds `dim` up until the axis divides it (vocabulary); otherwise the axis must divide it. `tied_to` names
    the tensor that holds the values: this one has no data of its own.
    """

    stage: int | Literal["first", "last"]
    dim: int | None = None
    axis: Literal["tp", "ep"] = "tp"
    padded: bool = False
    tied_to: str | None = None

    def on_stage(self, num_layers: int, layout: ParallelLayout, pp: int) -> bool:
        """Return whether pipeline rank `pp` owns the tensor."""
        if self.stage == "first":
            return pp == 0
        if self.stage == "last":
            return pp == layout.pp - 1
        return self.stage in stage_layers(num_layers, layout.pp, pp)

    def local_box(self, name: str, shape: tuple[int, ...], layout: ParallelLayout, coords: Coords) -> Box:
        """Return the part of the global tensor that the rank at `coords` holds live, clipped to the true shape.

        Raises UserError where the axis does not divide an unpadded dim.
        """
        if self.dim is None:
            return Box((0,) * len(shape), shape)
        size = layout.tp if self.axis == "tp" else layout.ep
        index = coords.tp if self.axis == "tp" else (coords.dp * layout.cp + coords.cp) % layout.ep
        length = shape[self.dim]
        if length % size and not self.padded:
            choices = ", ".join(str(n) for n in range(1, min(length, 128) + 1) if length % n == 0)
            raise UserError(
                f"cannot cut {name} {list(shape)} into {self.axis}={size} along dim {self.dim}",
                hint=f"choose {self.axis} from {choices}",
            )
        step = -(-length // size)
        start, stop = min(index * step, length), min((index + 1) * step, length)
        offset = tuple(start if d == self.dim else 0 for d in range(len(shape)))
        return Box(offset, tuple(stop - start if d == self.dim else n for d, n in enumerate(shape)))
