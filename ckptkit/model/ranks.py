"""Partition: which chunks of a checkpoint each rank of a layout stores, known from placements alone.

Every rank stores the tensors of its stages: its box of each, if it is the first to hold that box, cut to the interval
that it owns of the ZeRO bucket of its data group. Parameters and each kind of optimizer state are buckets of their own,
in storage order, and so are tensors that ep or cp cuts. The table is sorted once; the buckets of a pipeline rank are
laid out once for each part of the tensors, in O(tensors), and a rank then costs no more than the chunks it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.model.layout import Axis, Coords, ParallelLayout
from ckptkit.model.tensor import ITEMSIZE, Box, Placement, TensorInfo, storage_order
from ckptkit.model.zero import bucket_offsets, overlaps, shard_interval

RankChunk = tuple[TensorInfo, Box, int, int]


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Tensors by number, the box of each, where it is in the bucket, the bucket's size, and which ones are stored here.

    `like` is the placement of one of them: all have its data group.
    """

    tensors: Ints
    like: Placement
    is_stored: npt.NDArray[np.bool_]
    offset: Ints
    shape: Ints
    numels: Ints
    offsets: Ints
    total: int
    itemsize: int


class Partition:
    """The chunks of all ranks of a layout; UserError where the layout does not divide a tensor.

    `tensors` are those that hold data, in storage order.
    """

    def __init__(self, tensors: Sequence[TensorInfo], num_layers: int, layout: ParallelLayout) -> None:
        self.tensors = [info for info in sorted(tensors, key=storage_order) if info.placement.tied_to is None]
        self._num_layers, self._layout = num_layers, layout
        self._num_dims = max((len(info.shape) for info in self.tensors), default=0)
        self._models: list[TensorInfo] = []  # the first tensor of each shape and cut: those alike are many
        self._model_of = self._by_cut()
        self._pp = -1
        self._members: dict[tuple[str, int, Axis | None], list[int]] = {}  # of the pipeline rank, by bucket
        self._buckets: dict[tuple[object, ...], _Bucket] = {}  # of the pipeline rank, by bucket and part
        self._columns = TensorColumns.of([]), np.empty(0, np.int64)  # the last rank's, and the numbers of its tensors

    def chunks(self, coords: Coords) -> list[RankChunk]:
        """Return the (tensor, box, start, stop) that the rank at `coords` stores, in storage order."""
        table, infos = self.table(coords), {info.name: info for info in self.tensors}
        ranges = zip(table.names, table.start.tolist(), table.stop.tolist(), strict=True)
        return [(infos[name], table.box(row), start, stop) for row, (name, start, stop) in enumerate(ranges)]

    def table(self, coords: Coords) -> ChunkTable:
        """Return the chunks that the rank at `coords` stores, in storage order; one of each of its tensors."""
        none = np.empty(0, np.int64)
        boxes = none.reshape(0, self._num_dims)
        columns: list[tuple[Ints, ...]] = [(none, boxes, boxes, none, none)]
        for bucket in self._of_rank(coords):
            index, size = bucket.like.data_group(self._layout, coords)
            interval = shard_interval(bucket.total, size, index, bucket.itemsize)
            covered = overlaps(bucket.offsets, bucket.numels, *interval)
            covered = covered[bucket.is_stored[covered[:, 0]]]
            rows, start, stop = covered.T
            columns.append((bucket.tensors[rows], bucket.offset[rows], bucket.shape[rows], start, stop))
        numbers, *rest = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(numbers)
        tensors = self._columns_of(numbers[order])
        table = ChunkTable(tensors, np.arange(len(order)), *(column[order] for column in rest))
        return table.with_dims(max(tensors.ndims, default=0))

    def _columns_of(self, numbers: Ints) -> TensorColumns:
        """Return the columns of some tensors; ranks that store parts of the same ones share an object."""
        if not np.array_equal(numbers, self._columns[1]):
            self._columns = TensorColumns.of([self.tensors[number] for number in numbers.tolist()]), numbers
        return self._columns[0]

    def _by_cut(self) -> Ints:
        """Return the number of each tensor's model, and fill in the models."""
        numbers: dict[object, int] = {}
        model_of = []
        for info in self.tensors:
            key = (info.shape, info.placement.cuts, info.placement.round_to)
            model_of.append(numbers.setdefault(key, len(numbers)))
            if len(numbers) > len(self._models):
                self._models.append(info)
        return np.array(model_of, np.int64)

    def _of_rank(self, coords: Coords) -> list[_Bucket]:
        """Return the buckets that a rank has an interval of."""
        if coords.pp != self._pp:
            self._pp, self._members, self._buckets = coords.pp, {}, {}
            for number, info in enumerate(self.tensors):
                if info.placement.on_stage(self._num_layers, self._layout, coords.pp):
                    axis = info.placement.data_axis
                    group = axis if axis is not None and getattr(self._layout, axis) > 1 else None
                    key = (info.name.rpartition("/")[0], ITEMSIZE[info.dtype], group)
                    self._members.setdefault(key, []).append(number)
        buckets = []
        for key, members in self._members.items():
            _, itemsize, group = key
            part = (key, coords.tp, None if group is None else self._layout.along(group, coords))
            if part not in self._buckets:
                self._buckets[part] = self._bucket(np.array(members, np.int64), itemsize, coords)
            buckets.append(self._buckets[part])
        return buckets

    def _bucket(self, members: Ints, itemsize: int, coords: Coords) -> _Bucket:
        models, place = np.unique(self._model_of[members], return_inverse=True)
        offset = np.zeros((len(models), self._num_dims), np.int64)
        shape, is_stored = np.ones_like(offset), np.zeros(len(models), bool)
        for row, info in enumerate(self._models[model] for model in models.tolist()):
            box = info.placement.local_box(info.name, info.shape, self._layout, coords)
            padding = self._num_dims - len(info.shape)
            offset[row, padding:], shape[row, padding:] = box.offset, box.shape
            is_stored[row] = info.placement.is_first_replica(self._layout, coords)
        numels = shape.prod(axis=1)[place]
        offsets, total = bucket_offsets(numels.tolist(), itemsize)
        return _Bucket(
            members, info.placement, is_stored[place], offset[place], shape[place], numels,
            np.array(offsets, np.int64), total, itemsize,
        )  # fmt: skip
