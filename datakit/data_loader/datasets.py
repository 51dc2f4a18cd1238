"""Datasets for PyTorch's DataLoader, whose items are whole micro-batches: tensors, and the cursor after them.

Micro-batch j of data-parallel rank r is global samples `start + (j * dp_size + r) * micro_batch_size` on, as many as it
has rows: with start 0, two ranks and four rows, micro-batch 3 of rank 1 is samples 28 to 31. A Loader with any number
of micro-batches a step reads the same ones.

Models of transformers shift labels by themselves. Label i of ours is token i + 1. Theirs is token i, which a model
compares with what it makes at i - 1:

    tokens     5   6   7   0   8        our labels     6   7   0   8   9     and the mask    1  1  1  0  1
    input_ids  5   6   7   0   8        their labels -100  6   7   0 -100

Label 0 is compared with nothing. What our last label asks for, 9, is in no label of theirs.
"""

import multiprocessing
import os
import warnings
from collections.abc import Iterator, Mapping
from itertools import count
from multiprocessing.context import get_spawning_popen
from operator import index
from typing import Any

import numpy as np

from datakit.batches.batch import PLAIN, BatchOptions, HostBatch
from datakit.data_loader.loader_state import KEY, WAY_OUT, Geometry, parts_of, place_of
from datakit.data_loader.outer_loader import check_loader
from datakit.data_loader.shared_place import SharedPlace
from datakit.loading.loader import Loader
from datakit.order.arguments import whole_number
from datakit.order.blend import Blend
from datakit.order.stream_record import Cursor
from threefold.errors import UserError
from threefold.packages import needed_for

DATAKIT, TRANSFORMERS = FORMATS = ("datakit", "transformers")
IGNORED = -100  # the label that a loss of transformers leaves out


def check_format(name: object) -> str:
    """Return the name of a format; UserError if it is not one."""
    if name not in FORMATS:
        raise UserError(f"format is one of {', '.join(FORMATS)}, not {name!r}", hint='format="transformers"')
    return str(name)


def for_transformers(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch's tensors under the names of transformers; the memory of labels is used for theirs."""
    tokens, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"]
    labels[:, 1:] = tokens[:, 1:]
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, IGNORED)
    labels[:, 0] = IGNORED
    return {"input_ids": tokens, "labels": labels, "position_ids": batch["positions"]}


with needed_for("datakit.torch"):
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info

Batch = dict[str, Any]


class _MicroBatches:
    """One rank's micro-batches of a stream; it pickles, and goes on at its cursor in the process that unpickles it."""

    def __init__(
        self,
        blend: Blend,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor | None = None,
        options: BatchOptions = PLAIN,
        format: str = DATAKIT,
    ) -> None:
        """Begin at `cursor`, by default at the stream's start; UserError if the blend does not continue it.

        With format "transformers" an item is what a model of that library takes: input_ids, labels that it shifts by
        itself, -100 where no loss counts, and position_ids, without the cursor.
        """
        self._loader, self._options = Loader(blend, micro_batch_size, 1, dp_rank, dp_size, cursor, options), options
        self._format = check_format(format)
        self._geometry = Geometry(index(micro_batch_size), index(dp_size))
        self._begin_here()

    @property
    def global_batch_size(self) -> int:
        """Samples of a micro-batch of all ranks."""
        return self._loader.global_batch_size

    @property
    def dp_size(self) -> int:
        """Ranks along the data-parallel axis."""
        return self._geometry.dp_size

    def cursor_after(self, num_samples: int = 0) -> dict[str, Any]:
        """Return the cursor, as a JSON object, after some samples from where an iteration begins."""
        return self._loader.cursor_at(self._start.num_samples + whole_number("num_samples", num_samples)).to_json()

    def _begin_here(self) -> None:
        self._start = self._loader.cursor
        self._num_samples = self._start.num_samples  # consumed by whoever iterates here

    def _micro_batch(self, first: int) -> Batch:
        """Return the micro-batch of the step that begins at a sample: tensors [rows, seq_length] in one storage.

        Rows that are cut to the longest one have memory of their own, of that size: workers send no more than that.
        """
        loader = self._loader
        is_cut = self._options.pad_to_multiple_of > 0
        out = None if is_cut else np.empty(HostBatch.num_bytes(loader.shape_at(first)), np.uint8)
        host = loader.step_at(first, out)
        columns = HostBatch.split(torch.from_numpy(host.buffer), host.shape[1:], torch.int64, torch.float32)
        batch: Batch = dict(zip(("tokens", "labels", "positions", "loss_mask"), columns))
        if self._format == TRANSFORMERS:
            return for_transformers(batch)
        if host.cu_seqlens is not None:
            bounds, batch["max_seqlen"] = host.documents()
            batch["cu_seqlens"] = torch.from_numpy(bounds)
        batch["cursor"] = loader.cursor_at(first + loader.global_batch_size).to_json()
        return batch


class StreamDataset(_MicroBatches, IterableDataset[Batch]):
    """The endless stream, a micro-batch an item: tokens, labels, positions, loss_mask, and the cursor after it.

    Packed rows of a micro-batch end with the longest one, rounded up, if the options have `pad_to_multiple_of`.
    With packed stores, or bounds of documents in the options, also cu_seqlens, int32 [documents + 1], and max_seqlen.

    Worker w of W makes micro-batches w, w + W, w + 2W, ..., which a DataLoader returns in the stream's order. Each
    `iter` begins at the dataset's cursor, whatever was read before: that of its arguments, or of `load_state_dict`,
    which workers that persist see too.
    """

    def __init__(
        self,
        blend: Blend,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor | None = None,
        options: BatchOptions = PLAIN,
        format: str = DATAKIT,
    ) -> None:
        """Begin at `cursor`, by default at the stream's start, with items for our loss or a model of transformers."""
        super().__init__(blend, micro_batch_size, dp_rank, dp_size, cursor, options, format)
        self._place, self._resumed = SharedPlace(), False

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:  # a worker is being started; one that is forked looks by itself
            check_loader(self, self.dp_size)
        return self.__dict__

    def __iter__(self) -> Iterator[Batch]:
        check_loader(self, self.dp_size)
        reader, owner = self._reader(), _owner()
        if self._resumed:  # as torchdata does once in a worker: its state, then its iteration
            self._resumed = False
        elif self._place.is_resumed_by_workers(owner):
            return _refuse_second_iteration()
        else:
            self._begin(self._place.cursor(owner))
        self._place.note_reader(owner, is_worker=reader.num_workers > 0)
        return self._share(self._num_samples, reader)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after what was read in this process, in the protocol of torchdata's StatefulDataLoader.

        The stream's record is in it too: if the stream was changed, the error of `load_state_dict` shows where. The
        geometry that it was made under is beside it.

        Of a worker it is the cursor of its next round, in which each worker makes one micro-batch. What workers read is
        not known to the process that started them: that is a UserError, unless a cursor was loaded since.
        """
        reader = self._reader()
        if reader.num_workers == 0 and self._place.is_read_by_workers(_owner()):
            raise UserError(
                "workers read this dataset, and this process does not know how much of that was trained on",
                hint='save batch["cursor"] of the last batch, or what KeptCursor(dataset) or a StatefulDataLoader has',
            )
        return self._loader.state_at(self._num_samples) | {KEY: reader.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin at the cursor of `state_dict`, of a batch, or of a whole StatefulDataLoader, under any geometry.

        UserError if that is of another stream. A worker goes on from the state of a worker, of the same geometry alone.
        """
        parts = parts_of(state)
        for part in parts or (state,):
            self._check_share(part, is_whole=bool(parts))
            self._loader.load_state_dict(part)
        if parts:
            self._loader.load_state_dict(self._loader.cursor_at(place_of(state, parts)).to_json())
        if self._goes_on_alone(state):
            self._place.note_resumed(_owner())
            self._resumed, self._num_samples = True, self._loader.cursor.num_samples
        else:
            self._begin_here()
            self._place.begin_at(self._start.to_json(), _owner())

    def _begin(self, loaded: dict[str, Any] | None) -> None:
        """Begin an iteration at the dataset's cursor, which its owner may have loaded after this worker was started."""
        if loaded is not None and loaded != self._start.to_json():
            self._loader.load_state_dict(loaded)
            self._begin_here()
        self._num_samples = self._start.num_samples

    def _goes_on_alone(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state is that of one worker of several: the record marks one without a geometry."""
        saved = Geometry.of(state)
        return saved.is_shared if saved else "stream" in state and self._reader().is_shared

    def _check_share(self, state: Mapping[str, Any], *, is_whole: bool) -> None:
        """Raise UserError if a state of one worker of several does not fit to what reads here."""
        saved, reader = Geometry.of(state), self._reader()
        is_of_workers = saved is not None and saved.num_workers > 0 and saved.num_workers != reader.num_workers > 0
        if is_whole or not (self._goes_on_alone(state) or is_of_workers):
            return
        if saved is None:
            self._check_older(int(state["num_samples"]), reader)
        elif saved != reader:
            raise UserError(
                f"this state was made with {saved}; a worker of {reader} cannot go on from it", hint=WAY_OUT
            )

    def _check_older(self, num_samples: int, reader: Geometry) -> None:
        """Warn that a worker's state of an older version names no geometry; UserError if it was not the reader's."""
        if (num_samples - self._start.num_samples) % (reader.num_workers * reader.global_batch_size):
            raise UserError(
                f"this state of an older version, of sample {num_samples}, was not made with {reader}", hint=WAY_OUT
            )
        warnings.warn(
            f"this state of an older version is exact only if it was made with {reader}; otherwise {WAY_OUT}",
            stacklevel=3,
        )

    def _reader(self) -> Geometry:
        """Return the geometry under which this process reads."""
        info, own = get_worker_info(), self._geometry
        if info is None:
            return own
        return Geometry(own.micro_batch_size, own.dp_size, info.num_workers, info.id)

    def _share(self, start: int, reader: Geometry) -> Iterator[Batch]:
        num_sharers = max(reader.num_workers, 1)
        round_samples = num_sharers * self.global_batch_size
        for number in count():
            first = start + number * round_samples + reader.worker * self.global_batch_size
            self._loader.read_ahead(first, num_sharers)
            batch = self._micro_batch(first)
            self._num_samples = start + (number + 1) * round_samples
            yield batch


def _refuse_second_iteration() -> Iterator[Batch]:
    """Raise UserError for the first item: where workers persist, torchdata loses what is raised before that."""
    raise UserError(
        "the workers of an earlier iteration went on from states of their own, which this one does not have",
        hint="dataset.load_state_dict(loader.state_dict()) before the next iter(loader) goes on where that was",
    )
    yield {}


def _owner() -> int:
    """Return the id of the process that has the dataset: in a worker, that which started it."""
    parent = multiprocessing.parent_process()
    in_worker = get_worker_info() is not None and parent is not None and parent.pid is not None
    return parent.pid if in_worker else os.getpid()  # type: ignore[union-attr,return-value]


class MapDataset(_MicroBatches, Dataset[Batch]):
    """The first micro-batches after the cursor by number, in any order: those that StreamDataset yields."""

    def __init__(
        self,
        blend: Blend,
        micro_batch_size: int,
        num_batches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor | None = None,
        options: BatchOptions = PLAIN,
        format: str = DATAKIT,
    ) -> None:
        """Take what StreamDataset takes, and the number of micro-batches, which is the length."""
        super().__init__(blend, micro_batch_size, dp_rank, dp_size, cursor, options, format)
        self._num_batches = whole_number("num_batches", num_batches)

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= index(number) < self._num_batches:
            raise IndexError(f"micro-batch {number} of {self._num_batches}")
        return self._micro_batch(self._start.num_samples + index(number) * self.global_batch_size)
