"""save: the easy case. One call writes this rank's part of a step, durable when it returns.

No arena and no writer process: host memory is written from where it is, what is on a device goes through two
page-locked buffers of BOUNCE_BYTES. For benchmarks and small programs; training saves through a Checkpointer.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckptkit.format.address import open_run
from ckptkit.format.root import Root
from ckptkit.format.seat import Seat
from ckptkit.handoff.block_layout import BlockLayout
from ckptkit.io.blocks import Bytes, Columns, copy_many
from ckptkit.io.torch_tensors import Transfer, byte_range, check_memory, host_addresses
from ckptkit.model.box import Piece
from ckptkit.model.layout import ParallelLayout, check_rank
from ckptkit.model.tensor import TensorInfo, tensor_table
from ckptkit.plan.save_plan import plan_save
from ckptkit.saving.template import piece_sizes
from ckptkit.writer.step import PartSource, StepTarget, write_step
from threefold.errors import UserError

BOUNCE_BYTES = 64 << 20


def save(
    url: str, step: int, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo], layout: ParallelLayout,
    num_layers: int, metadata: Mapping[str, Any], rank: int = 0, world_size: int = 1, attempt: str | None = None,
    deadline_s: float = 600.0, awaits_commit: bool = True,
) -> Root | None:  # fmt: skip
    """Write this rank's pieces as part of a step of the run at `url`; it is committed when any rank's call returns.

    Rank 0 waits for the others, commits, and returns the root; the others wait for that, and return None. With
    awaits_commit=False they return once their own files are durable: one process can then save all ranks one after
    the other, rank 0 last. `attempt` is a name that all ranks of this save share and no other save uses; one process
    alone needs none. deadline_s bounds the wait for the other ranks' files, and half of the wait for rank 0. Raise
    UserError if pieces do not fit the table, AlreadyExists if the step is committed, else StorageError.
    """
    check_rank(rank, world_size)
    if attempt is None and world_size > 1:
        raise UserError(
            f"a save of {world_size} ranks needs an attempt that they share",
            hint="give all ranks one new name, such as attempt=f'{job}-{step}'",
        )
    attempt = secrets.token_hex(8) if attempt is None else attempt
    storage = open_run(url)
    target = StepTarget(storage, Seat(storage.address, step, attempt, rank, world_size))
    table = tensor_table(tensors)
    draft = Root(step, attempt, layout, num_layers, table, (), metadata)
    draft.check()
    return write_pieces(
        target, pieces, tensors, None if rank else draft, deadline_s=deadline_s, awaits_commit=awaits_commit
    )


def write_pieces(
    target: StepTarget, pieces: Sequence[Piece], tensors: Sequence[TensorInfo], draft: Root | None, *,
    deadline_s: float = 600.0, awaits_commit: bool = True,
) -> Root | None:  # fmt: skip
    """Write a writer's pieces, and commit if it has the root's draft; the rest is as in `save`."""
    table, plan = tensor_table(tensors), plan_save(pieces, tensors)
    check_memory(pieces, piece_sizes(pieces, tensors), [table[piece.name].dtype for piece in pieces])
    block_layout = BlockLayout.of(plan, len(pieces), BOUNCE_BYTES)
    source = _Source(
        block_layout, [piece.data for piece in pieces] + [np.frombuffer(f.header, np.uint8) for f in plan.files]
    )
    parts = [
        PartSource(
            file.draft_index(),
            source.blocks(*block_layout.first_blocks[number : number + 2]),
            is_reused=not source.is_on_host,
        )
        for number, file in enumerate(plan.files)
    ]
    try:
        return write_step(target, parts, draft, lambda _: deadline_s, awaits_commit=awaits_commit)
    finally:
        source.close()


class _Source:
    """The blocks of a layout straight from the sources' memory; those with bytes on a device through a buffer."""

    def __init__(self, block_layout: BlockLayout, sources: Sequence[Any]) -> None:
        self._layout, self._sources = block_layout, sources
        self._addresses = host_addresses(sources)
        self.is_on_host = bool(self._addresses[block_layout.source].all())
        self._buffers: list[tuple[Bytes, Transfer]] = []
        if not self.is_on_host:
            self._buffers = [(np.empty(block_layout.block_bytes, np.uint8), Transfer()) for _ in range(2)]

    def blocks(self, first: int, stop: int) -> Iterator[Columns]:
        """Yield blocks [first, stop) as rows of (address, bytes); while one is written the next is fetched."""
        if self.is_on_host:
            for block in range(first, stop):
                part = self._layout.between(block, block + 1)
                address = self._addresses[self._layout.source[part]] + self._layout.offset[part]
                yield np.stack([address, self._layout.size[part]], axis=1).astype(np.uint64)
            return
        self._fetch(first)
        for block in range(first, stop):
            memory, transfer = self._buffers[block % 2]
            transfer.wait()
            if block + 1 < stop:
                self._fetch(block + 1)
            size = int(self._layout.size[self._layout.between(block, block + 1)].sum())
            yield np.array([(memory.ctypes.data, size)], np.uint64)

    def close(self) -> None:
        """Wait for what is under way, and let go of the buffers."""
        for _, transfer in self._buffers:
            transfer.wait()
            transfer.unlock()

    def _fetch(self, block: int) -> None:
        """Copy what is on the host into the block's buffer and start to copy the rest."""
        memory, transfer = self._buffers[block % 2]
        part = self._layout.between(block, block + 1)
        source, offset = self._layout.source[part], self._layout.offset[part]
        at, size = self._layout.at[part], self._layout.size[part]
        address = self._addresses[source]
        here = address > 0
        transfer.start(memory, [
            (byte_range(self._sources[s], o, n), a, n)
            for s, o, a, n in zip(*(c[~here].tolist() for c in (source, offset, at, size)), strict=True)
        ])  # fmt: skip
        copy_many(np.stack([(address + offset)[here], memory.ctypes.data + at[here], size[here]], axis=1))
