"""Bucket: parameters and gradients of one flat buffer, and the interval of it whose optimizer state this rank holds.

Each parameter is a view at a 64-byte aligned offset. With ZeRO-1 the padded bucket is cut into dp equal intervals
(Rajbhandari et al., 2020): gradients are summed into the owner's interval, the owner updates it, all gather the result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ckptkit import bucket_offsets, overlaps, padded_size, shard_interval
from trainer.mesh.group import Group


@dataclass(frozen=True, slots=True)
class Segment:
    """The positions [start, stop) of one parameter that lie in the owned interval, and where they lie in it."""

    name: str
    start: int
    stop: int
    offset: int

    def of(self, interval: Tensor) -> Tensor:
        """Return this segment of a tensor over the owned interval."""
        return interval[self.offset : self.offset + self.stop - self.start]


class Bucket:
    """One flat buffer of parameters.

    `parameters` and `gradients` cover the padded bucket; `master`, `exp_avg` and `exp_avg_sq` cover the owned interval
    in the wide dtype (float64 for float64, else float32). Where the parameters have the wide dtype themselves, `master`
    is a view of them. A bucket that only infers has no gradients and no moments.
    """

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        *,
        cut: bool,
        trains: bool,
    ) -> None:
        self.group, self.is_cut = group, cut
        self.shapes = shapes
        wide = wide_dtype(dtype)
        numels = [shape.numel() for shape in shapes.values()]
        self._offsets, total = bucket_offsets(numels, dtype.itemsize)
        size = padded_size(total, group.size, dtype.itemsize)
        interval = shard_interval(total, group.size, group.index, dtype.itemsize) if cut else (0, size)
        self.interval = slice(*interval)
        self.parameters = torch.zeros(size, dtype=dtype, device=device)
        owned = self.parameters[self.interval]
        self.master = owned if dtype == wide else torch.zeros_like(owned, dtype=wide)
        self.gradients = torch.zeros(size if trains else 0, dtype=wide, device=device)
        self.exp_avg = torch.zeros_like(self.master) if trains else self.master[:0]
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        names = list(shapes)
        self.segments = [
            Segment(names[index], a, b, self._offsets[index] + a - interval[0])
            for index, a, b in overlaps(self._offsets, numels, *interval).tolist()
        ]

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its part of a flat buffer over the whole bucket, in its shape."""
        for (name, shape), offset in zip(self.shapes.items(), self._offsets, strict=True):
            yield name, flat[offset : offset + shape.numel()].view(shape)

    @property
    def owned_gradients(self) -> Tensor:
        return self.gradients[self.interval]

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank: the moments, and the master where it is a copy."""
        master = self.master if self.master.dtype != self.parameters.dtype else self.master[:0]
        return sum(state.numel() * state.itemsize for state in (self.exp_avg, self.exp_avg_sq, master))

    def reduce_gradients(self) -> None:
        """Sum the gradients over the data-parallel group; at least the owned interval is valid afterwards."""
        if self.is_cut:
            self.group.reduce_scatter(self.gradients)
        else:
            self.group.all_reduce(self.gradients)

    def publish(self) -> None:
        """Bring every rank's parameters up to date with the masters of their owners."""
        owned = self.parameters[self.interval]
        if owned.dtype != self.master.dtype:
            owned.copy_(self.master)
        if self.is_cut:
            self.group.all_gather(self.parameters)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gradients, moments and masters."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cut_into_buckets(shapes: dict[str, torch.Size], bytes_each: int, itemsize: int) -> list[dict[str, torch.Size]]:
    """Group parameters, in order, into buckets of at most `bytes_each` (a larger parameter gets one of its own)."""
    buckets: list[dict[str, torch.Size]] = []
    filled = bytes_each
    for name, shape in shapes.items():
        size = shape.numel() * itemsize
        if filled + size > bytes_each:
            buckets.append({})
            filled = 0
        buckets[-1][name] = shape
        filled += size
    return buckets


def attach(stage: nn.Module, name: str, values: Tensor, gradients: Tensor | None) -> None:
    """Give the stage's parameter `name` its memory; with `gradients`, every backward adds to that view."""
    path, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(values, requires_grad=gradients is not None)
    setattr(stage.get_submodule(path), leaf, parameter)
    if gradients is not None:
        parameter.register_post_accumulate_grad_hook(_adder(gradients))


def _adder(gradients: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs after a gradient was accumulated"
        gradients.add_(parameter.grad)
        parameter.grad = None

    return add


def squared_norm(buckets: Sequence[Bucket], counts: Callable[[Segment], bool]) -> Tensor:
    """Sum of squares, a float64 scalar, of the owned gradients of the segments that `counts` admits."""
    total = torch.zeros((), dtype=torch.float64, device=buckets[0].master.device)
    for bucket in buckets:
        for segment in filter(counts, bucket.segments):
            total += torch.linalg.vector_norm(segment.of(bucket.owned_gradients), dtype=torch.float64).square()
    return total
