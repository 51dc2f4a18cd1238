"""ParallelLayout: the sizes of the mesh axes, and the rank order that every kit agrees on.

world = tp*cp*dp*pp and rank = tp + TP*(cp + CP*(dp + DP*pp)); ep is borrowed from dp*cp, or from dp*cp*tp, and adds no
ranks.
"""

import math
import re
from dataclasses import dataclass, fields
from typing import Literal

from threefold.errors import UserError

Axis = Literal["tp", "cp", "ep"]  # those that cut tensors into boxes; dp cuts buckets, pp moves whole tensors


@dataclass(frozen=True, slots=True)
class Coords:
    """Where one rank is on the mesh."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the axes; `virtual` is the number of stages that a pipeline rank holds.

    `etp` is tp inside experts: of 1 tp cuts no tensor that ep cuts, and ep borrows tp ranks too. None: the size of tp.
    """

    tp: int = 1  # tensor parallel
    cp: int = 1  # context parallel
    ep: int = 1  # expert parallel, borrowed from dp * cp; with etp=1 from dp * cp * tp
    dp: int = 1  # data parallel
    pp: int = 1  # pipeline parallel
    virtual: int = 1  # stages of a pipeline rank
    etp: int | None = None  # tensor parallel of experts

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise UserError(f"{name} of a parallel layout must be a whole number >= 1, got {size!r}")
        if self.etp == self.tp:
            object.__setattr__(self, "etp", None)  # so that equal layouts are equal
        if self.etp is not None and self.etp != 1:
            raise UserError(f"etp={self.etp} is neither 1 nor tp={self.tp}", hint="leave etp out: it is tp")
        if self.etp is not None and self.ep == 1:
            raise UserError("etp=1 lets ep borrow tp ranks, and ep is 1", hint="leave etp out, or give ep")
        axes = ("dp", "cp", "tp") if self.etp else ("dp", "cp")
        lent = math.prod(getattr(self, axis) for axis in axes)
        if lent % self.ep:
            product = " * ".join(f"{axis}={getattr(self, axis)}" for axis in axes)
            choices = ", ".join(str(size) for size in range(1, min(lent, 128) + 1) if lent % size == 0)
            raise UserError(f"ep={self.ep} does not divide {product}", hint=f"choose ep from {choices}")

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes by name, as a checkpoint's root has them: `etp` only if it is not the size of tp."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: size for name, size in found.items() if size is not None}

    @property
    def world_size(self) -> int:
        """Return the number of ranks, tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_stages(self) -> int:
        """Return the stages of all pipeline ranks."""
        return self.pp * self.virtual

    def along(self, axis: Axis, coords: Coords) -> tuple[int, int]:
        """Return the index of the rank at `coords` along an axis, and the axis's size.

        Neighbours among the dp*cp ranks differ along ep: with dp=4 and ep=2, dp ranks 0, 1, 2, 3 have ep 0, 1, 0, 1.
        With etp=1 they are those among the dp*cp*tp ranks.
        """
        if axis != "ep":
            return getattr(coords, axis), getattr(self, axis)
        place = coords.dp * self.cp + coords.cp
        return (place * self.tp + coords.tp if self.etp else place) % self.ep, self.ep

    def coords(self, rank: int) -> Coords:
        """Return the mesh position of a global rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, coords: Coords) -> int:
        """Return the global rank at a mesh position."""
        return coords.tp + self.tp * (coords.cp + self.cp * (coords.dp + self.dp * coords.pp))

    def __str__(self) -> str:
        sizes = self.sizes.items()
        return "-".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "etp") or "tp1"

    @classmethod
    def parse(cls, text: str) -> "ParallelLayout":
        """Return the layout written as `tp8-pp4`; axes left out are 1."""
        return cls(**cls.named_sizes(text))

    @classmethod
    def named_sizes(cls, text: str) -> dict[str, int]:
        """Return the sizes that a layout written as `tp8-pp4` names."""
        names = {f.name for f in fields(cls)}
        sizes: dict[str, int] = {}
        for part in text.split("-"):
            match = re.fullmatch(r"([a-z]+)([0-9]+)", part)
            if match is None or match[1] not in names or match[1] in sizes:
                raise UserError(f"{text!r} is not a parallel layout", hint="write it like tp8-pp4 or tp2-dp4-pp2")
            sizes[match[1]] = int(match[2])
        return sizes


def check_rank(rank: int, world_size: int) -> None:
    """Raise UserError if there is no such rank."""
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} is not one of the {world_size} ranks", hint="ranks count from 0")


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Return the contiguous layers of one pipeline stage; where they do not divide, earlier stages hold one more."""
    base, extra = divmod(num_layers, num_stages)
    start = stage * base + min(stage, extra)
    return range(start, start + base + (stage < extra))


def stage_rank(layout: ParallelLayout, stage: int) -> int:
    """Return the pipeline rank that holds a stage.

    Stages are interleaved: with pp=2 and virtual=2, stages 0 and 2 are on rank 0, stages 1 and 3 on rank 1.
    """
    assert 0 <= stage < layout.num_stages, f"stage {stage} of {layout.num_stages}"
    return stage % layout.pp


def rank_stages(layout: ParallelLayout, pp: int) -> list[int]:
    """Return the stages that a pipeline rank holds, ascending: those of which `stage_rank` returns it."""
    return list(range(pp, layout.num_stages, layout.pp))
