"""Loader: a rank's share of the stream, step by step; it starts in O(1) and resumes exactly, under any dp size.

Pickled, it goes on at its cursor in the process that unpickles it; so does each side of a fork.

In a step that begins at sample `first`, row i of micro-batch m on data-parallel rank r is global sample
`first + (m * dp_size + r) * micro_batch_size + i`. One step is made ahead, in a thread, while the caller works: by
itself in memory that nothing else refers to, in the caller's memory (pinned, say) if the caller asks by `prefetch`. Of
remote stores it is three to eight by itself, as requests and checks beside them make single steps late; the first step
is given out once these are made, so that those after it come without a wait.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any
from weakref import finalize

import numpy as np

from datakit.batches.batch import PLAIN, BatchOptions, Bytes, HostBatch
from datakit.batches.step_memory import StepMemory
from datakit.format.shard import Int64s
from datakit.loading.making_thread import MadeAhead, MakingThread
from datakit.loading.read_ahead import ReadAhead
from datakit.order.arguments import require, whole_number
from datakit.order.batch_sizes import BatchSizes
from datakit.order.blend import Blend
from datakit.order.stream_record import Cursor, StreamRecord
from threefold.closing import Closing
from threefold.errors import UserError

# steps of remote stores that are made ahead: the least, which it is with other ranks, as these keep what steps need in
# the cache until all have made them, and the most, of this many bytes
REMOTE_STEPS_AHEAD, MOST_REMOTE_STEPS_AHEAD, MOST_REMOTE_BYTES_AHEAD = 3, 8, 64 << 20


class _NoLength(UserError, TypeError):
    """What `len` of an endless stream raises; as a TypeError it leaves `list` and progress bars at work."""


class _StepsAhead(MadeAhead[HostBatch]):
    """Steps that are made ahead, the next of which begins at sample `first`, in the caller's memory `out` if given."""

    def __init__(self, first: int, out: Bytes | None, most: int) -> None:
        """Let `most` be made ahead."""
        super().__init__()
        self.first, self.out, self.most = first, out, most


class Loader(Closing):
    """An endless iterator over steps; use it in a `with`, or `close` it."""

    def __init__(
        self,
        blend: Blend,
        micro_batch_size: int,
        num_microbatches: int | BatchSizes,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor | None = None,
        options: BatchOptions = PLAIN,
    ) -> None:
        """Begin at `cursor`, by default at the stream's start; UserError if the blend does not continue it.

        `num_microbatches` may be the sizes of steps of all ranks, of a batch that grows. UserError too if they are not
        whole micro-batches of each rank, or if the length of rows changes inside a step.
        """
        require("blend", blend, Blend, "Blend([(TokenStore.open(FOLDER), 1.0)], seq_length=2048, seed=1)")
        require("options", options, BatchOptions, "BatchOptions(reset_positions=True)")
        micro_batch_size = whole_number("micro_batch_size", micro_batch_size, 1)
        dp_size = whole_number("dp_size", dp_size, 1)
        dp_rank = whole_number("dp_rank", dp_rank, most=dp_size - 1)
        if cursor is not None:
            blend = blend.following(require("cursor", cursor, Cursor, 'Cursor.from_json(batch["cursor"])'))
            blend.check(cursor)
        self._blend = blend
        self._micro_batch_size, self._dp_rank, self._dp_size = micro_batch_size, dp_rank, dp_size
        self._sizes = _sizes_of(num_microbatches, micro_batch_size * dp_size)
        self._options = options
        self._num_samples = 0 if cursor is None else cursor.num_samples
        blend.sources.check_steps(self._num_samples, self._sizes)
        self._most_ahead = self._remote_steps_ahead() if blend.caches else 1
        self._memory = StepMemory(self._most_ahead + 2)  # of those ahead, the caller's and the one before
        self._ahead: _StepsAhead | None = None
        self._reading: ReadAhead | None = None
        self._start_thread()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the blend and the place in it; the step that was made ahead is made again."""
        shape = self._micro_batch_size, self._sizes, self._dp_rank, self._dp_size
        return partial(Loader, self._blend, *shape, self.cursor, self._options), ()

    @property
    def blend(self) -> Blend:
        """The stream that it reads; copies share an order in that of a run which began so: see Blend.following."""
        return self._blend

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the next step's arrays on this rank: [num_microbatches, micro_batch_size, seq_length].

        With `pad_to_multiple_of` in the options the step may have shorter rows, as its own shape says. Where the batch
        grows, so does the number of micro-batches.
        """
        return self.shape_at(self._num_samples)

    def shape_at(self, first: int) -> tuple[int, int, int]:
        """Return the shape of the arrays of the step that begins at sample `first`."""
        num_microbatches = self._sizes.at(first) // (self._micro_batch_size * self._dp_size)
        return num_microbatches, self._micro_batch_size, self._blend.sources.seq_length_at(first)

    @property
    def num_bytes(self) -> int:
        """Bytes that hold the next step: without positions and loss masks, if these are the same in all rows."""
        return self._blend.num_bytes(self.shape, self._options)

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in the next step."""
        return self._sizes.at(self._num_samples)

    @property
    def cursor(self) -> Cursor:
        """Return the cursor after the steps that were handed out."""
        return self.cursor_at(self._num_samples)

    def cursor_at(self, num_samples: int) -> Cursor:
        """Return the cursor after the stream's first samples."""
        return Cursor.start(self._blend, num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return cursor and stream record as a JSON object, under the name that torchdata's protocol has for it."""
        return self.state_at(self._num_samples)

    def state_at(self, num_samples: int) -> dict[str, Any]:
        """Return what `state_dict` returns after the stream's first samples."""
        return self.cursor_at(num_samples).to_json() | {"stream": self._record}

    @cached_property
    def _record(self) -> dict[str, Any]:
        return self._blend.record.to_json()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on at the cursor of `state_dict`; UserError if that is of another stream: a stream record shows how."""
        cursor = Cursor.from_json(state)
        recorded = state.get("stream")
        blend = self._blend.following(cursor)
        blend.check(cursor, None if recorded is None else StreamRecord.from_json(recorded))
        blend.sources.check_steps(cursor.num_samples, self._sizes)
        self._drop_ahead()
        if blend is not self._blend:
            self._end_step()
            self._blend = blend
            vars(self).pop("_record", None)
        self._num_samples = cursor.num_samples

    def __len__(self) -> int:
        """Raise UserError, which says what torch's DataLoader takes: it asks for the length of what it is given."""
        micro_batch_size, ranks = self._micro_batch_size, f"dp_rank={self._dp_rank}, dp_size={self._dp_size}"
        raise _NoLength(
            "a Loader has no length, its stream is endless; a DataLoader takes the datasets of datakit.torch",
            hint=f"DataLoader(datakit.torch.StreamDataset(blend, {micro_batch_size}, {ranks}), batch_size=None)",
        )

    def __bool__(self) -> bool:
        return True

    def next_step(self, out: Bytes | None = None) -> HostBatch:
        """Return the next step's rows of this rank, arrays of `shape`, made in the memory `out` if it is given.

        `out` is an array of `num_bytes` or HostBatch.num_bytes(shape) bytes, which differ with the length of rows.
        Without it the step has memory that nothing else refers to, of `num_bytes`, and what comes next is begun at
        once; with it, `prefetch` begins the next one.
        """
        begun = self._begun(out)
        ahead = begun or self._begin(out)
        try:
            if begun is None:  # the first is given out with what follows it at hand
                ahead.wait_for(ahead.most)
            batch = ahead.take()
        except BaseException:  # a step that failed is made again by the next call
            self._drop_ahead()
            raise
        self._num_samples = self._after(self._num_samples)
        if out is None:
            self._thread.want(self._make_step, ahead)
        else:
            self._ahead = None
        return batch

    def prefetch(self, out: Bytes | None = None) -> None:
        """Begin the next step on the thread, in the memory `out` if it is given; the cursor stays.

        `next_step`, called with that very array, returns it; with another one the step is made again. Nothing else may
        use the memory until then, or until the loader is closed.
        """
        if self._begun(out) is None:
            self._begin(out)

    def _begun(self, out: Bytes | None) -> "_StepsAhead | None":
        """Return the steps that are made ahead in some memory by this process, if they are."""
        ahead = self._ahead
        return ahead if ahead is not None and ahead.out is out and self._process == os.getpid() else None

    def _begin(self, out: Bytes | None) -> "_StepsAhead":
        """Begin the steps from the cursor on; one, if it is made in the caller's memory."""
        if out is not None:  # what does not fit is raised here
            HostBatch.over(out, self.shape, tokens_only=self.num_bytes < HostBatch.num_bytes(self.shape))
        if self._process != os.getpid():  # a fork takes neither the thread nor the step it makes along
            self._start_thread()
        if self._thread.is_closed:
            raise UserError("the loader is closed", hint="Loader(..., cursor=loader.cursor) goes on where it was")
        self._drop_ahead()
        self._thread.start()
        self._ahead = ahead = _StepsAhead(self._num_samples, out, 1 if out is not None else self._most_ahead)
        for _ in range(ahead.most):
            self._thread.want(self._make_step, ahead)
        return ahead

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.is_over = True
        self._ahead = None

    def _make_step(self, ahead: "_StepsAhead") -> None:
        """Make the next step, on the thread."""
        first, ahead.first = ahead.first, self._after(ahead.first)
        ahead.make(partial(self._step_ahead, first, ahead.out))

    def _step_ahead(self, first: int, out: Bytes | None) -> HostBatch:
        # here, as it costs the caller of `next_step` more than the rest; other ranks may be some steps behind
        self.read_ahead(first, num_kept=self._most_ahead if self._dp_size > 1 else 0)
        if out is None and not self._options.pad_to_multiple_of:
            out = self._memory.take(self._blend.num_bytes(self.shape_at(first), self._options))
        step = self.step_at(first, out)
        with suppress(UserError):  # who makes the next step finds it out
            self._blend.ask_ahead(self.samples(self._after(first)).ravel())
        return step

    def read_ahead(self, first: int, every: int = 1, num_kept: int = 0) -> None:
        """Let what the step that begins at sample `first` and those after it read of remote stores be fetched.

        With `every` = 3 it is every third step. What steps before it read is let go, but for the last `num_kept`.
        Without remote stores nothing happens.
        """
        if not self._blend.caches:
            return
        if self._process != os.getpid():  # the threads that read ahead stayed with the parent
            self._start_thread()
        ahead = self._reading
        number = ahead.number(first) if ahead and ahead.every == every else None
        if ahead is None or number is None:
            self._end_reading()
            # it may not keep the loader alive
            rows = partial(_rows, self._sizes, self._micro_batch_size, self._dp_rank, self._dp_size)
            ahead, number = ReadAhead(self._blend, rows, first, self._sizes, every), 0
            self._reading = ahead
            finalize(self, ahead.close).atexit = False
        ahead.begin(number, num_kept)

    def __iter__(self) -> Iterator[HostBatch]:
        while True:
            yield self.next_step()

    def sample(self, number: int) -> HostBatch:
        """Global sample `number` by itself, arrays [1, 1, seq_length]."""
        batch = self._blend.batch([number], self._options)
        return batch.reshaped(1, 1, batch.shape[-1], first_sample=number)

    def step_at(self, first: int, out: Bytes | None = None) -> HostBatch:
        """Return this rank's rows of the step that begins at sample `first`, made at once; the cursor stays.

        UserError if the length of rows changes inside it, or inside a later one.
        """
        self._blend.sources.check_steps(first, self._sizes)
        ahead = self._reading
        rows = ahead.rows(first) if ahead else None
        batch = self._blend.batch(self.samples(first).ravel(), self._options, out=out, rows=rows)
        epochs = self._blend.epochs(self._after(first))
        return batch.reshaped(*self.shape_at(first)[:2], batch.shape[-1], first_sample=first, epochs=epochs)

    def close(self) -> None:
        """End the threads; the loader yields no further step."""
        self._drop_ahead()
        self._thread.close()
        self._thread.wait()
        self._end_reading()

    def samples(self, first: int) -> Int64s:
        """Global numbers of this rank's rows in the step that begins at sample `first`, [num_microbatches, rows]."""
        return _rows(self._sizes, self._micro_batch_size, self._dp_rank, self._dp_size, first)

    def _after(self, first: int) -> int:
        """Return the first sample of the step after the one that begins at sample `first`."""
        return first + self._sizes.at(first)

    def _remote_steps_ahead(self) -> int:
        if self._dp_size > 1:
            return REMOTE_STEPS_AHEAD
        largest = self.num_bytes * self._sizes.final // self.global_batch_size  # of a batch that grows
        return max(REMOTE_STEPS_AHEAD, min(MOST_REMOTE_STEPS_AHEAD, MOST_REMOTE_BYTES_AHEAD // largest))

    def _start_thread(self) -> None:
        self._thread, self._process = MakingThread("datakit-loader"), os.getpid()
        self._ahead = self._reading = None

    def _end_step(self) -> None:
        """End the thread with what it makes, which reads of one blend; the next step starts another."""
        if self._process == os.getpid() and not self._thread.is_closed:
            self._thread.close()
            self._thread.wait()
            self._end_reading()
            self._start_thread()

    def _end_reading(self) -> None:
        if self._reading:
            self._reading.close()
        self._reading = None


def _sizes_of(num_microbatches: int | BatchSizes, num_rows: int) -> BatchSizes:
    """Return the sizes of steps, of which all ranks read `num_rows` at a time; UserError if these are not whole."""
    if not isinstance(num_microbatches, BatchSizes):
        return BatchSizes(whole_number("num_microbatches", num_microbatches, 1) * num_rows)
    odd = next((size for size in num_microbatches.sizes if size % num_rows), None)
    if odd is not None:
        raise UserError(
            f"a step of {odd} samples is not a number of micro-batches of {num_rows}, those of all ranks",
            hint=f"sizes that are multiples of {num_rows}, and so are the steps between them",
        )
    return num_microbatches


def _rows(sizes: BatchSizes, micro_batch_size: int, dp_rank: int, dp_size: int, first: int) -> Int64s:
    num_microbatches = sizes.at(first) // (micro_batch_size * dp_size)
    microbatches = np.arange(num_microbatches)[:, None] * dp_size + dp_rank
    return first + microbatches * micro_batch_size + np.arange(micro_batch_size)
