"""Loader: a rank's share of the stream, step by step; it starts in O(1) and resumes exactly, under any dp size.

Pickled, it goes on at its cursor in the process that unpickles it; so does each side of a fork.

In a step that begins at sample `first`, row i of micro-batch m on data-parallel rank r is global sample
`first + (m * dp_size + r) * micro_batch_size + i`. One step is made ahead, in a thread, while the caller works.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from datakit.store.shard import Int64s
from datakit.stream.batch import HostBatch
from datakit.stream.blend import Blend
from datakit.stream.cursor import Cursor
from threefold.errors import UserError


class Loader:
    """An endless iterator over steps; use it in a `with`, or `close` it."""

    def __init__(
        self,
        blend: Blend,
        micro_batch_size: int,
        num_microbatches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor | None = None,
        *,
        mask_eod_loss: bool = False,
        reset_positions: bool = False,
    ) -> None:
        """Begin at `cursor`, by default at the stream's start; UserError if the blend does not continue it."""
        if min(micro_batch_size, num_microbatches) < 1 or not 0 <= dp_rank < dp_size:
            raise UserError(
                f"micro-batches of {micro_batch_size}, {num_microbatches} of them, on rank {dp_rank} of {dp_size}"
            )
        if cursor is not None:
            blend.check(cursor)
        self._blend = blend
        self._shape = num_microbatches, micro_batch_size, blend.seq_length
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._options = {"mask_eod_loss": mask_eod_loss, "reset_positions": reset_positions}
        self._num_samples = 0 if cursor is None else cursor.num_samples
        self._ahead: Future[HostBatch] | None = None
        self._start_thread()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the blend and the place in it; the step that was made ahead is made again."""
        num_microbatches, micro_batch_size, _ = self._shape
        shape = micro_batch_size, num_microbatches, self._dp_rank, self._dp_size
        return partial(Loader, self._blend, *shape, self.cursor, **self._options), ()

    @property
    def global_batch_size(self) -> int:
        """Samples a step of all ranks."""
        return self._shape[0] * self._shape[1] * self._dp_size

    @property
    def cursor(self) -> Cursor:
        """Return the cursor after the steps that were handed out."""
        return Cursor.start(self._blend, self._num_samples)

    def next_step(self) -> HostBatch:
        """Return the next step's rows of this rank, arrays [num_microbatches, micro_batch_size, seq_length]."""
        if self._process != os.getpid():  # a fork takes neither the thread nor the step it makes along
            self._start_thread()
        ahead = self._ahead or self._thread.submit(self._step, self._num_samples)
        self._ahead = None  # a step that failed is made again by the next call
        batch = ahead.result()
        self._num_samples += self.global_batch_size
        self._ahead = self._thread.submit(self._step, self._num_samples)
        return batch

    def __iter__(self) -> Iterator[HostBatch]:
        while True:
            yield self.next_step()

    def sample(self, number: int) -> HostBatch:
        """Global sample `number` by itself, arrays [1, 1, seq_length]."""
        batch = self._blend.batch([number], **self._options)
        return batch.reshaped(1, 1, self._blend.seq_length, first_sample=number)

    def close(self) -> None:
        """End the thread; the loader yields no further step."""
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def samples(self, first: int) -> Int64s:
        """Global numbers of this rank's rows in the step that begins at sample `first`, [num_microbatches, rows]."""
        num_microbatches, micro_batch_size, _ = self._shape
        microbatches = np.arange(num_microbatches)[:, None] * self._dp_size + self._dp_rank
        return first + microbatches * micro_batch_size + np.arange(micro_batch_size)

    def _start_thread(self) -> None:
        self._thread, self._process = ThreadPoolExecutor(1, thread_name_prefix="datakit-loader"), os.getpid()
        self._ahead = None

    def _step(self, first: int) -> HostBatch:
        batch = self._blend.batch(self.samples(first).ravel(), **self._options)
        epochs = self._blend.epochs(first + self.global_batch_size)
        return batch.reshaped(*self._shape, first_sample=first, epochs=epochs)
