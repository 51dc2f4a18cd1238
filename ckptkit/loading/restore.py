"""Restore: fill pieces of any layout from a checkpoint, reading and holding no more than they need.

Everything is compared first and refused in one report, before any destination is touched; every byte that is handed out
was verified. Pieces in host memory are read straight into place, those on a device through a page-locked buffer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckptkit.chunk import Piece
from ckptkit.chunk_table import ChunkTable
from ckptkit.format.root import Root
from ckptkit.loading.reader import CheckpointReader
from ckptkit.plan import storage_rows
from ckptkit.saving.staging import memory_misfit
from ckptkit.tensor import ITEMSIZE, TensorInfo
from ckptkit.torch_tensors import Transfer, dtypes, host_address
from threefold.errors import UserError
from threefold.storage import open_storage

BOUNCE_BYTES = 64 << 20
MAX_REPORTED = 30


def restore(url: str, step: int, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo] | None = None) -> Root:
    """Fill pieces from a committed step of the run at `url` and give its root.

    `tensors`, where given, is the table of the model that is restored: the checkpoint must hold these tensors with
    these shapes and dtypes, and no parameter besides. UserError reports every tensor that does not fit; CheckFailed
    names the file, offset and tensor of damage.
    """
    with CheckpointReader(open_storage(url), step) as reader:
        restore_from(reader, pieces, tensors=tensors)
        return reader.root


def restore_from(
    reader: CheckpointReader, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo] | None = None
) -> None:
    """The same from an open checkpoint, whose `bytes_read` then tells what was read."""
    table = reader.root.tensors
    faults = [f"{name}: {fault}" for name, fault in misfits(table, pieces, tensors).items()]
    if faults:
        more = f"\n  and {len(faults) - MAX_REPORTED} more" if faults[MAX_REPORTED:] else ""
        listed = "\n  ".join(faults[:MAX_REPORTED])
        raise UserError(
            f"{reader.url} does not fit what is restored from it:\n  {listed}{more}",
            hint=f"ckptkit inspect {reader.url}",
        )
    stored = [_untied(piece, table) for piece in pieces]
    wanted = ChunkTable.of_pieces(stored, table.values())
    order = storage_rows(wanted, list(table.values()))  # so that each file is read from its begin to its end
    wanted, ordered = wanted.take(order), [stored[row] for row in order.tolist()]
    plan = reader.plan(wanted)  # refuses what is stored never or twice
    addresses = [host_address(piece.data) for piece in ordered]
    on_host = np.array([address is not None for address in addresses], bool)[plan.wanted]
    reader.execute(plan.take(np.flatnonzero(on_host)), [address or 0 for address in addresses])
    _restore_to_device(reader, [piece for piece, address in zip(ordered, addresses, strict=True) if address is None])


def misfits(
    table: Mapping[str, TensorInfo], pieces: Iterable[Piece], tensors: Sequence[TensorInfo] | None
) -> dict[str, str]:
    """What is wrong with each tensor that a checkpoint lacks, has in another shape or dtype, or has too much."""
    faults: dict[str, str] = {}
    if tensors is not None:
        expected = {info.name: info for info in tensors}
        for info in tensors:
            found = table.get(info.name)
            if found is None:
                faults[info.name] = f"missing in the checkpoint, wanted {info.dtype} {list(info.shape)}"
            elif (found.dtype, found.shape) != (info.dtype, info.shape):
                faults[info.name] = f"{found.dtype} {list(found.shape)}, wanted {info.dtype} {list(info.shape)}"
        for name, found in table.items():
            if name not in expected and not name.startswith("optim."):
                faults[name] = f"{found.dtype} {list(found.shape)}, not wanted"
    for piece in pieces:
        fault = _misfit(piece, table.get(piece.name))
        if fault:
            faults.setdefault(piece.name, fault)
    return faults


def _misfit(piece: Piece, info: TensorInfo | None) -> str | None:
    if info is None:
        return "missing in the checkpoint"
    if info.dtype not in dtypes(piece.data):
        return f"{info.dtype}, wanted {piece.data.dtype}"
    ends = [a + n for a, n in zip(piece.box.offset, piece.box.shape, strict=True)]
    if len(ends) != len(info.shape) or any(end > size for end, size in zip(ends, info.shape, strict=True)):
        return f"{list(info.shape)}, wanted its part {list(piece.box.offset)} to {ends}"
    return memory_misfit(piece, ITEMSIZE[info.dtype])


def _untied(piece: Piece, table: Mapping[str, TensorInfo]) -> Piece:
    """The piece of the tensor that holds the values."""
    return replace(piece, name=table[piece.name].placement.tied_to or piece.name)


def _restore_to_device(reader: CheckpointReader, pieces: Sequence[Piece]) -> None:
    """Read in storage order into a host buffer of bounded size, and copy each bufferful to the device."""
    if not pieces:
        return
    table = reader.root.tensors
    memory, transfer = np.empty(BOUNCE_BYTES, np.uint8), Transfer()
    try:
        for batch in _batches(pieces, table):
            sizes = [(piece.stop - piece.start) * ITEMSIZE[table[piece.name].dtype] for piece in batch]
            offsets = (np.cumsum(sizes) - sizes).tolist()
            wanted = ChunkTable.of_pieces(batch, table.values())
            reader.read(wanted, [memory.ctypes.data + offset for offset in offsets])
            copies = list(zip([piece.data for piece in batch], offsets, sizes, strict=True))
            transfer.start(memory, copies, to_device=True)
            transfer.wait()
    finally:
        transfer.unlock()


def _batches(pieces: Sequence[Piece], table: Mapping[str, TensorInfo]) -> Iterator[list[Piece]]:
    """The pieces in their order, divided so that each batch fits the buffer."""
    batch: list[Piece] = []
    room = BOUNCE_BYTES
    for piece in pieces:
        itemsize, start = ITEMSIZE[table[piece.name].dtype], piece.start
        while start < piece.stop:
            stop = min(piece.stop, start + room // itemsize)
            part = piece.data[start - piece.start : stop - piece.start]
            batch.append(Piece(piece.name, piece.box, start, stop, part))
            room -= (stop - start) * itemsize
            start = stop
            if room < itemsize or start < piece.stop:
                yield batch
                batch, room = [], BOUNCE_BYTES
    if batch:
        yield batch
