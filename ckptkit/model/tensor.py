"""What a checkpoint knows of a tensor: its row of the table, its placement on the mesh, the boxes it is cut into.

A chunk, what one file holds or one rank wants, is an n-D box of the global tensor with a range [start, stop) of
row-major positions *inside that box*; a whole box is the range [0, numel). Ranges express ZeRO intervals, boxes express
tensor-parallel cuts.

A placement is known without any model code and holds for every layout: it names axes and limits, never sizes of axes,
so that a checkpoint can be cut for other ranks than those that saved it. Padding exists in live tensors only: a rank's
box is clipped to the true shape.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ckptkit.model.layout import Axis, Coords, ParallelLayout, rank_stages, stage_layers, stage_rank
from threefold.errors import UserError, listed

AXES: tuple[Axis, ...] = get_args(Axis)
_FIRST = Coords()
# safetensors' dtype names -> bytes an element
ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
# bounds of a tensor table, checked before anything is allocated by it
MAX_DIMS, MAX_NAME_BYTES, MAX_NUMEL, MAX_LAYERS = 8, 255, 1 << 48, 1 << 20


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned n-D box in a global tensor's index space."""

    offset: tuple[int, ...]  # the first index in each dim
    shape: tuple[int, ...]  # the length in each dim

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Return the elements of the box."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk with its elements in memory: what a rank saves, or the place a restore fills.

    `data` is a contiguous array or tensor of stop - start elements, of one dim or as many as the box has: numpy, or
    torch on CPU or CUDA (bfloat16 included). A save reads it, a restore writes into it.
    """

    name: str
    box: Box
    start: int
    stop: int
    data: Any

    @classmethod
    def whole(cls, name: str, box: Box, data: Any) -> "Piece":
        """Return a piece that covers its whole box."""
        return cls(name, box, 0, box.numel, data)


@dataclass(frozen=True, slots=True)
class Cut:
    """Which dim is cut by which axis.

    `max_parts` says that the dim consists of so many equal parts, key and value heads for instance, that are never
    divided. A larger axis repeats them: with `max_parts=2`, of tp=4 ranks 0 and 1 hold one part, ranks 2 and 3 the
    other. None: an axis of n cuts the dim into n parts.
    """

    dim: int
    axis: Axis = "tp"
    max_parts: int | None = None

    def num_parts(self, size: int) -> int:
        """Return into how many parts an axis of some size cuts the dim; size / parts neighbours hold the same one."""
        return size if self.max_parts is None else min(size, self.max_parts)

    def fits(self, length: int, size: int, *, may_pad: bool) -> bool:
        """Return whether an axis of some size cuts a length into equal parts, none of which divides a smallest one."""
        parts = self.num_parts(size)
        if size % parts or (self.max_parts or parts) % parts:
            return False
        return may_pad or length % parts == 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Which stage holds a tensor and how ranks of a stage cut it.

    `stage` is "first", "last" or a layer number. Without `cuts` all ranks of the stage hold the whole tensor. Cuts of
    several dims make a grid; of one dim, each cut divides what the one before it left. `round_to` says that each
    rank's live part is rounded up to a multiple of it in the cut dims (vocabulary); if None, parts must be equal.
    `tied_to` names the tensor that holds the values: this one has no data of its own.
    """

    stage: int | Literal["first", "last"]
    cuts: tuple[Cut, ...] = ()
    round_to: int | None = None
    tied_to: str | None = None

    def on_stage(self, num_layers: int, layout: ParallelLayout, pp: int) -> bool:
        """Return whether pipeline rank `pp` holds the tensor, on any of its stages."""
        match self.stage:
            case "first":
                return pp == stage_rank(layout, 0)
            case "last":
                return pp == stage_rank(layout, layout.num_stages - 1)
            case layer:
                return any(layer in stage_layers(num_layers, layout.num_stages, s) for s in rank_stages(layout, pp))

    def live_shape(self, name: str, shape: tuple[int, ...], layout: ParallelLayout) -> tuple[int, ...]:
        """Return the shape in which each rank holds its part of the tensor, padding included.

        50257 rows over tp=4 are 12565 rows a rank with `round_to=1`, 12672 with 128. UserError if an axis does not fit.
        """
        lengths = list(shape)
        layout, _ = self._seen(layout)
        for cut in self.cuts:
            length, size = lengths[cut.dim], getattr(layout, cut.axis)
            if not cut.fits(length, size, may_pad=self.round_to is not None):
                text = f"cannot cut {name} {list(shape)} into {cut.axis}={size} along dim {cut.dim}"
                raise UserError(text, hint=f"choose {cut.axis} from {self._choices(cut, length)}")
            lengths[cut.dim] = -(-length // cut.num_parts(size))
        for dim in {cut.dim for cut in self.cuts}:
            lengths[dim] = -(-lengths[dim] // (self.round_to or 1)) * (self.round_to or 1)
        return tuple(lengths)

    def local_box(self, name: str, shape: tuple[int, ...], layout: ParallelLayout, coords: Coords) -> Box:
        """Return the part of the global tensor that the rank at `coords` holds live, clipped to the true shape.

        UserError if an axis does not fit.
        """
        parts, live = self.parts(layout, coords), self.live_shape(name, shape, layout)
        offset = tuple(min(parts.get(dim, 0) * live[dim], length) for dim, length in enumerate(shape))
        return Box(offset, tuple(min(n, length - a) for a, n, length in zip(offset, live, shape, strict=True)))

    def parts(self, layout: ParallelLayout, coords: Coords) -> dict[int, int]:
        """Return which part of each cut dim the rank at `coords` holds: ranks of equal parts hold the same values."""
        layout, coords = self._seen(layout, coords)
        parts = dict.fromkeys((cut.dim for cut in self.cuts), 0)
        for cut in self.cuts:
            index, size = layout.along(cut.axis, coords)
            num_parts = cut.num_parts(size)
            parts[cut.dim] = parts[cut.dim] * num_parts + index * num_parts // size
        return parts

    def is_first_replica(self, layout: ParallelLayout, coords: Coords) -> bool:
        """Return whether this rank is the first of those along tp and the axes of the cuts that hold its box: it saves.

        Of a tensor without cuts that is tp rank 0; of one with `max_parts=2` over tp=4, ranks 0 and 2. Ranks of one
        data group are all first or none: each saves an interval.
        """
        layout, coords = self._seen(layout, coords)
        num_parts = {cut.axis: cut.num_parts(getattr(layout, cut.axis)) for cut in self.cuts}
        num_parts.setdefault("tp", 1)
        places = {axis: layout.along(axis, coords) for axis in num_parts}
        return all(index % (size // num_parts[axis]) == 0 for axis, (index, size) in places.items())

    def data_group(self, layout: ParallelLayout, coords: Coords) -> tuple[int, int]:
        """Return this rank's index in its data group, and the group's size.

        A data group is the ranks that hold one box for other samples: dp*cp of them, or those that differ in no axis of
        the cuts. With dp=4 and ep=2, dp ranks 0 and 2 are the data group of expert part 0: (0, 2) and (1, 2). With
        etp=1 the tp ranks that hold a box are of its data group.
        """
        layout, coords = self._seen(layout, coords)
        index, size = coords.dp * layout.cp + coords.cp, layout.dp * layout.cp
        axis = self.data_axis
        width = 1 if axis is None else getattr(layout, axis)
        return index // width, size // width

    @property
    def data_axis(self) -> Axis | None:
        """The axis among the cuts that is borrowed from the data-parallel ranks; at most one."""
        return next((cut.axis for cut in self.cuts if cut.axis != "tp"), None)

    def _seen(self, layout: ParallelLayout, coords: Coords = _FIRST) -> tuple[ParallelLayout, Coords]:
        """Return a layout and a place in it as the cuts see them: with etp=1 tp ranks are cp ranks to experts."""
        if layout.etp is None or self.data_axis != "ep":
            return layout, coords
        seen = replace(layout, tp=1, cp=layout.cp * layout.tp, etp=None)
        return seen, replace(coords, tp=0, cp=coords.cp * layout.tp + coords.tp)

    def _choices(self, cut: Cut, length: int) -> str:
        largest = min(length if self.round_to is None else 128, cut.max_parts or length, 128)
        sizes = [str(n) for n in range(1, largest + 1) if cut.fits(length, n, may_pad=self.round_to is not None)]
        return ", ".join(sizes) + (f", or multiples of {cut.max_parts}" if cut.max_parts is not None else "")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype (safetensors' names), true global shape and placement of one logical tensor."""

    name: str  # global, such as layers.17.attn.q.weight
    dtype: str  # as in safetensors: F32, BF16, I64
    shape: tuple[int, ...]  # of the whole tensor, without padding
    placement: Placement  # which ranks hold which part

    @property
    def numel(self) -> int:
        """Return the elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return self.numel * ITEMSIZE[self.dtype]


def tensor_table(tensors: Sequence[TensorInfo]) -> dict[str, TensorInfo]:
    """Return a checkpoint's tensors by name; UserError where one is listed twice."""
    table = {info.name: info for info in tensors}
    if len(table) < len(tensors):
        counts = Counter(info.name for info in tensors)
        raise UserError(f"listed twice in a tensor table:{listed([n for n, count in counts.items() if count > 1])}")
    return table


def storage_order(tensor: TensorInfo) -> tuple[object, ...]:
    """Sort key of the order in which every writer stores tensors and every stream over a checkpoint visits them.

    Wide dtypes first (elements stay aligned without gaps), then by stage, then a parameter beside its optimizer state.
    Because all writers agree, a pass over the tensors reads each data file from its begin to its end, once.
    """
    stage = tensor.placement.stage
    layer = {"first": -1, "last": MAX_LAYERS}[stage] if isinstance(stage, str) else stage
    kind, _, parameter = tensor.name.rpartition("/")
    words = tuple([(int(word), "") if word.isdecimal() else (-1, word) for word in parameter.split(".")])
    return -ITEMSIZE[tensor.dtype], layer, words, kind
