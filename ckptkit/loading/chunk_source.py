"""ChunkSource: what restore, reshard, diff, hash and mapping need of an open checkpoint, whatever it is made of.

CheckpointReader opens a step of a run, FolderSource another program's folder, and MappedSource is either of them under
the rules of a mapping. Each has these members of its own, and none inherits another.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from ckptkit.format.root import Root
from ckptkit.io.blocks import Columns, SumPlaces
from ckptkit.loading.exchange import Alone, Exchange
from ckptkit.loading.step_files import StepFiles
from ckptkit.model.chunk_table import ChunkTable, Ints
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.load_plan import LoadPlan, plan_load
from ckptkit.plan.stored import StoredChunks
from threefold.errors import CheckFailed


class ChunkSource(Protocol):
    """Tensors as stored chunks, open for planned reads."""

    @property
    def root(self) -> Root:
        """The tensors by name, and what is known beside them."""

    @property
    def url(self) -> str:
        """Its name for messages and commands."""

    @property
    def files(self) -> StepFiles | None:
        """The files of the step of a run that is read; None of another program's folder."""

    @property
    def stored(self) -> StoredChunks:
        """All chunks, sorted by tensor: for each its part and offset there."""

    @property
    def bytes_read(self) -> int:
        """Bytes of files read so far."""

    def plan(self, chunks: ChunkTable) -> LoadPlan:
        """Return the copies that fill wanted chunks; all ranks that opened it together call this."""

    def fetch(
        self, plan: LoadPlan, addresses: Ints, sums: SumPlaces | None = None, num_threads: int | None = None
    ) -> None:
        """Make the copies of a plan, each to an address of its own, and add them to `sums`, if there are any.

        Several threads may fetch at once, by default each with the source's number of threads.
        """

    def close(self) -> object:
        """Close what it opened."""


class RewriteSource(ChunkSource, Protocol):
    """A source that reshard makes a step of, under a name that follows from the source."""

    def attempt_for(self, layout: ParallelLayout) -> str:
        """Return the attempt that writes it for a layout: equal in every try, on every machine."""

    def read(self, chunks: ChunkTable, targets: Sequence[int] | Columns) -> None:
        """Fill memory with wanted chunks, each at its target address; CheckFailed where data is missing or damaged."""

    def check_read(self) -> int:
        """Return how many tensors it compared itself with the certificate of their save; else CheckFailed."""


def planned(source: ChunkSource, chunks: ChunkTable, stored: StoredChunks) -> LoadPlan:
    """Return the copies out of stored chunks of a source that fill wanted ones; CheckFailed if some are not there."""
    try:
        return plan_load(chunks, stored)
    except CheckFailed as error:
        raise CheckFailed(f"{source.url} is not whole: {error.message}") from None


def read_chunks(source: ChunkSource, chunks: ChunkTable, targets: Sequence[int] | Columns) -> None:
    """Fill memory with wanted chunks, each at its target address; CheckFailed where data is missing or damaged."""
    plan = planned(source, chunks, source.stored)
    source.fetch(plan, np.asarray(targets, np.uint64).astype(np.int64)[plan.row] + plan.target)


def attempt_made_of(identity: bytes, layout: ParallelLayout) -> str:
    """Return the attempt that writes for a layout what follows from an identity."""
    return f"reshard-{hashlib.sha256(identity + str(layout).encode()).hexdigest()[:16]}"


def exchange_of(source: ChunkSource) -> Exchange:
    """Return the ranks that read a source together."""
    return Alone() if source.files is None else source.files.exchange


def usual_threads() -> int:
    """Return how many threads a rank reads with: its share of the host's cores, at least 4 and at most 16."""
    num_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(int(num_ranks) if num_ranks.isdecimal() else 1, 1)
    return min(max(share, 4), 16)


@contextmanager
def reading_threads(num_threads: int, *sources: ChunkSource) -> Iterator[ThreadPoolExecutor]:
    """Threads that are not waited for, but for their read under way, where an error or a Ctrl-C ends the block."""
    pool = ThreadPoolExecutor(num_threads)
    files = [source.files for source in sources if source.files is not None]
    try:
        yield pool
    except BaseException:
        for step_files in files:
            step_files.is_given_up = True
        raise
    finally:
        pool.shutdown()
        for step_files in files:
            step_files.is_given_up = False
