"""save: the easy case. One call writes this rank's part of a step, durable when it returns.

No arena and no writer process: host memory is written from where it is, what is on a device goes through two
page-locked buffers of `block_bytes`. For benchmarks and small programs; training saves through a Checkpointer.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np

from ckptkit.format.address import open_run
from ckptkit.format.keys import Seat
from ckptkit.format.root import Root
from ckptkit.handoff.block_layout import BlockLayout
from ckptkit.io.blocks import Bytes, Columns
from ckptkit.io.double_buffer import double_buffered
from ckptkit.io.torch_tensors import Transfer, check_memory
from ckptkit.model.layout import ParallelLayout, check_rank
from ckptkit.model.tensor import Piece, TensorInfo, tensor_table
from ckptkit.plan.save_plan import plan_save
from ckptkit.saving.staging import BlockCopies, piece_sizes
from ckptkit.writer.step import PartSource, StepTarget, write_step
from threefold.errors import UserError

BOUNCE_BYTES = 64 << 20


def save(
    url: str, step: int, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo], layout: ParallelLayout,
    num_layers: int, metadata: Mapping[str, Any], rank: int = 0, world_size: int = 1, attempt: str | None = None,
    deadline_s: float = 600.0, awaits_commit: bool = True, block_bytes: int = BOUNCE_BYTES,
) -> Root | None:  # fmt: skip
    """Write this rank's pieces as part of a step of the run at `url`; it is committed when any rank's call returns.

    Rank 0 waits for the others, commits, and returns the root; the others wait for that, and return None. With
    awaits_commit=False they return once their own files are durable: one process can then save all ranks one after
    the other, rank 0 last. `attempt` is a name that all ranks of this save share and no other save uses; one process
    alone needs none. deadline_s bounds the wait for the other ranks' files, and half of the wait for rank 0. What is on
    a device goes through two buffers of block_bytes. Raise UserError if pieces do not fit the table, AlreadyExists if
    the step is committed, else StorageError.
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
        target, pieces, tensors, None if rank else draft, deadline_s=deadline_s, awaits_commit=awaits_commit,
        block_bytes=block_bytes,
    )  # fmt: skip


def write_pieces(
    target: StepTarget, pieces: Sequence[Piece], tensors: Sequence[TensorInfo], draft: Root | None, *,
    deadline_s: float = 600.0, awaits_commit: bool = True, block_bytes: int = BOUNCE_BYTES,
) -> Root | None:  # fmt: skip
    """Write a writer's pieces, and commit if it has the root's draft; the rest is as in `save`."""
    table, plan = tensor_table(tensors), plan_save(pieces, tensors)
    check_memory(pieces, piece_sizes(pieces, tensors), [table[piece.name].dtype for piece in pieces])
    layout = BlockLayout.of(plan, len(pieces), block_bytes)
    sources = [piece.data for piece in pieces] + [np.frombuffer(file.header, np.uint8) for file in plan.files]
    copies, transfers = BlockCopies(layout, sources), (Transfer(), Transfer())
    with ExitStack() as stack:
        for transfer in transfers:
            copies.follow(transfer)
            stack.callback(transfer.unlock)
        parts = []
        for number, file in enumerate(plan.files):
            first = layout.first_blocks[number]
            if copies.are_from_host:
                blocks = _in_place(copies, first, layout.first_blocks[number + 1])
            else:
                load = partial(_load, copies, transfers, first)
                blocks = stack.enter_context(closing(double_buffered(load, file.size_bytes, block_bytes)))
            parts.append(PartSource(file.draft_index(), blocks, is_reused=not copies.are_from_host))
        return write_step(target, parts, draft, lambda _: deadline_s, awaits_commit=awaits_commit)


def _in_place(copies: BlockCopies, first: int, stop: int) -> Iterator[Columns]:
    """Yield blocks [first, stop) as rows of (address, bytes) of the sources' own memory."""
    layout = copies.layout
    for block in range(first, stop):
        part = layout.between(block, block + 1)
        address = copies.addresses[layout.source[part]] + layout.offset[part]
        yield np.stack([address, layout.size[part]], axis=1).astype(np.uint64)


def _load(copies: BlockCopies, transfers: Sequence[Transfer], first: int, start: int, memory: Bytes) -> None:
    """Fill one of two buffers with the block at a byte of the file whose first block is given."""
    number = start // copies.layout.block_bytes
    part = copies.layout.between(first + number, first + number + 1)
    copies.copy(part, copies.layout.at[part], memory, transfers[number % 2])
