"""Datasets for PyTorch's DataLoader, whose items are whole micro-batches: tensors, and the cursor after them.

    DataLoader(StreamDataset(blend, micro_batch_size=4), batch_size=None, num_workers=2)

This file alone of datakit names torch; `import datakit` leaves it out. Micro-batch j of data-parallel rank r is global
samples `start + (j * dp_size + r) * micro_batch_size` on, as many as it has rows: with start 0, two ranks and four
rows, micro-batch 3 of rank 1 is samples 28 to 31. A Loader with any number of micro-batches a step reads the same ones.
"""

from collections.abc import Iterator, Mapping
from itertools import count
from operator import index
from typing import Any

import numpy as np

from datakit.stream.arguments import whole_number
from datakit.stream.batch import PLAIN, BatchOptions, HostBatch
from datakit.stream.blend import Blend
from datakit.stream.cursor import Cursor
from datakit.stream.loader import Loader
from threefold.packages import needed_for

with needed_for("datakit.torch"):
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info

__all__ = ["MapDataset", "StreamDataset"]

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
    ) -> None:
        """Begin at `cursor`, by default at the stream's start; UserError if the blend does not continue it."""
        self._loader, self._options = Loader(blend, micro_batch_size, 1, dp_rank, dp_size, cursor, options), options
        self._begin_here()

    def _begin_here(self) -> None:
        self._start = self._loader.cursor
        self._num_samples = self._start.num_samples  # consumed by whoever iterates here

    def _micro_batch(self, number: int) -> Batch:
        """Return a micro-batch, counted from the start: tensors [rows, seq_length] in one storage, and a cursor.

        Rows that are cut to the longest one have memory of their own, of that size: workers send no more than that.
        """
        loader = self._loader
        first = self._start.num_samples + number * loader.global_batch_size
        is_cut = self._options.pad_to_multiple_of > 0
        out = None if is_cut else np.empty(HostBatch.num_bytes(loader.shape_at(first)), np.uint8)
        host = loader.step_at(first, out)
        buffer = torch.from_numpy(host.buffer)
        columns = HostBatch.split(buffer, host.shape[1:], torch.int64, torch.float32)
        batch: Batch = dict(zip(("tokens", "labels", "positions", "loss_mask"), columns))
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
    `iter` begins at the dataset's cursor, whatever was read before: that of its arguments, or of `load_state_dict`.
    """

    def __iter__(self) -> Iterator[Batch]:
        self._num_samples = self._start.num_samples
        info = get_worker_info()
        return self._share(0, 1) if info is None else self._share(info.id, info.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after what was read in this process, in the protocol of torchdata's StatefulDataLoader.

        The stream's record is in it too: if the stream was changed, the error of `load_state_dict` shows where.

        Of a worker it is the cursor of its next round, in which each worker makes one micro-batch. What the workers of
        a plain DataLoader read is in their batches' "cursor" alone.
        """
        return self._loader.state_at(self._num_samples)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Begin at the cursor of `state_dict` or of a batch; UserError if that is of another stream."""
        self._loader.load_state_dict(state)
        self._begin_here()

    def _share(self, worker: int, num_workers: int) -> Iterator[Batch]:
        round_samples = num_workers * self._loader.global_batch_size
        start = self._start.num_samples
        for number in count():
            self._loader.read_ahead(
                start + number * round_samples + worker * self._loader.global_batch_size, num_workers
            )
            batch = self._micro_batch(number * num_workers + worker)
            self._num_samples = start + (number + 1) * round_samples
            yield batch


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
    ) -> None:
        """Take what StreamDataset takes, and the number of micro-batches, which is the length."""
        super().__init__(blend, micro_batch_size, dp_rank, dp_size, cursor, options)
        self._num_batches = whole_number("num_batches", num_batches)

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= index(number) < self._num_batches:
            raise IndexError(f"micro-batch {number} of {self._num_batches}")
        return self._micro_batch(index(number))
