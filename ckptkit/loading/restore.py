"""Restore: fill pieces of any layout from a checkpoint, reading and holding no more than they need.

Everything is compared first and refused in one report, before any destination is touched; every byte that is handed out
was verified. Ranks that restore together read what several of them want only once. Tensors that they fill whole are
compared with the certificate of the save. What a PyTorch program kept beside its tensors is read without torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckptkit.format.address import open_address
from ckptkit.format.root import Root
from ckptkit.format.state_tree import STATE_NAME, Tree
from ckptkit.io.torch_tensors import are_plain, held_by, is_writable, memory_misfit, way_out
from ckptkit.loading.chunk_source import ChunkSource, exchange_of, usual_threads
from ckptkit.loading.exchange import Alone, Exchange, on_all
from ckptkit.loading.load_sums import LoadSums, fetching
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.shared_read import read_together
from ckptkit.loading.targets import Targets
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.tensor import ITEMSIZE, Box, Piece, TensorInfo
from ckptkit.plan.certificate import is_readable
from threefold.errors import CheckFailed, UserError, listed, quoted


def restore(
    url: str, step: int, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo] | None = None,
    exchange: Exchange | None = None, certify: bool = True,
) -> Root:  # fmt: skip
    """Fill pieces from a committed step of the run at `url` and give its root.

    `tensors`, where given, is the table of the model that is restored: the checkpoint must hold these tensors with
    these shapes and dtypes, and no parameter besides. UserError reports every tensor that does not fit; CheckFailed
    names the file, offset and tensor of damage. Ranks that share an `exchange`, and all make this call, read each
    byte that several of them want once; an error of one is then raised on all. `certify` is that of `restore_from`.
    """
    storage, named = on_all(exchange or Alone(), lambda: open_address(url))
    if named not in (None, step):
        raise UserError(f"{url} is not step {step}", hint=f"ckptkit ls {quoted(storage.url)}")
    with CheckpointReader(storage, step, exchange=exchange) as reader:
        restore_from(reader, pieces, tensors=tensors, certify=certify)
        return reader.root


def restore_from(
    source: ChunkSource, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo] | None = None,
    certify: bool = True,
) -> int:  # fmt: skip
    """Restore from an open checkpoint, whose `bytes_read` is then what this rank read.

    With `certify` compare what the ranks of its exchange fill whole with the certificate of the save: return how many
    tensors are equal to what was saved, CheckFailed names those that are not.
    """
    exchange = exchange_of(source)
    sums = fill_from(source, pieces, exchange if certify else None, tensors=tensors)
    return 0 if sums is None else sums.check(exchange, source.url)


def fill_from(
    source: ChunkSource, pieces: Sequence[Piece], holders: Exchange | None, *,
    tensors: Sequence[TensorInfo] | None = None,
) -> LoadSums | None:  # fmt: skip
    """Restore from an open checkpoint, and return the sums of what was filled; None if it cannot be compared.

    `holders` are the ranks that are to compare what they fill together, None for no sums.
    """
    exchange = exchange_of(source)
    wanted, data = on_all(exchange, lambda: _wanted(source, pieces, tensors))
    can_compare = holders is not None and is_readable(source.root.certificate)
    sums = LoadSums(source.root, wanted, is_alone=holders.size == 1) if can_compare and holders else None
    with Targets(data, usual_threads()) as targets:
        plan = source.plan(wanted)  # refuses what is stored never or twice
        if exchange.size > 1:
            read_together(source, plan, targets, exchange, sums)
        else:
            targets.fill(plan, fetching(source, sums))
    return sums


def _wanted(
    source: ChunkSource, pieces: Sequence[Piece], tensors: Sequence[TensorInfo] | None
) -> tuple[ChunkTable, list[Any]]:
    """Return the chunks that pieces want, but those without elements, and their memory."""
    table = source.root.tensors
    chunks = _fitting(table, pieces)
    if chunks is None or tensors is not None:
        faults = [f"{name}: {fault}" for name, fault in misfits(table, pieces, tensors).items()]
        if faults:
            hint = next(filter(None, map(way_out, pieces)), f"ckptkit inspect {quoted(source.url)}")
            raise UserError(f"{source.url} does not fit what is restored from it:{listed(faults)}", hint=hint)
    if chunks is None:
        chunks = ChunkTable.of_pieces([_untied(piece, table) for piece in pieces], table.values())
    rows = np.flatnonzero(chunks.start < chunks.stop)
    return chunks.take(rows), [pieces[row].data for row in rows.tolist()]


def _fitting(table: Mapping[str, TensorInfo], pieces: Sequence[Piece]) -> ChunkTable | None:
    """Return the chunks of pieces, None if one may not fit: all are compared at once."""
    if not _are_sound(table, pieces):
        return None
    return ChunkTable.fitting([_untied(piece, table) for piece in pieces], table)


def misfits(
    table: Mapping[str, TensorInfo], pieces: Sequence[Piece], tensors: Sequence[TensorInfo] | None
) -> dict[str, str]:
    """Return what is wrong with each tensor that a checkpoint lacks, has in another shape or dtype, or has too much."""
    faults: dict[str, str] = {}
    if tensors is not None:
        expected = {info.name: info for info in tensors}
        for info in tensors:
            stored = table.get(info.name)
            if stored is None:
                faults[info.name] = f"missing in the checkpoint, wanted {info.dtype} {list(info.shape)}"
            elif (stored.dtype, stored.shape) != (info.dtype, info.shape):
                faults[info.name] = f"{stored.dtype} {list(stored.shape)}, wanted {info.dtype} {list(info.shape)}"
        for name, stored in table.items():
            if name not in expected and not name.startswith("optim."):
                faults[name] = f"{stored.dtype} {list(stored.shape)}, not wanted"
    are_sound = _are_sound(table, pieces)
    for piece in pieces:
        fault = _misfit(piece, table.get(piece.name), is_sound=are_sound)
        if fault:
            faults.setdefault(piece.name, fault)
    return faults


def _are_sound(table: Mapping[str, TensorInfo], pieces: Sequence[Piece]) -> bool:
    """Return whether the memory of all pieces is what it should be, found out for all at once."""
    infos = [table.get(piece.name) for piece in pieces]
    dtypes = [info.dtype for info in infos if info is not None]
    if len(dtypes) < len(pieces):
        return False
    sizes = [(piece.stop - piece.start) * ITEMSIZE[dtype] for piece, dtype in zip(pieces, dtypes, strict=True)]
    data = [piece.data for piece in pieces]
    return are_plain(data, sizes, dtypes) and all(map(is_writable, data))


def _misfit(piece: Piece, info: TensorInfo | None, *, is_sound: bool) -> str | None:
    if info is None:
        return "missing in the checkpoint"
    if not is_sound and not hasattr(piece.data, "dtype"):
        return f"{info.dtype}, wanted a {type(piece.data).__name__}, which is neither an array nor a tensor"
    if not is_sound and way_out(piece) is None and info.dtype not in held_by(piece.data.dtype):
        return f"{info.dtype}, wanted {piece.data.dtype}"
    ends = [a + n for a, n in zip(piece.box.offset, piece.box.shape, strict=True)]
    if len(ends) != len(info.shape) or any(end > size for end, size in zip(ends, info.shape, strict=True)):
        return f"{list(info.shape)}, wanted its part {list(piece.box.offset)} to {ends}"
    if is_sound:
        return None
    return memory_misfit(piece, info.dtype) or (None if is_writable(piece.data) else "a piece's memory is read-only")


def _untied(piece: Piece, table: Mapping[str, TensorInfo]) -> Piece:
    """Return the piece of the tensor that holds the values."""
    tied_to = table[piece.name].placement.tied_to
    return piece if tied_to is None else replace(piece, name=tied_to)


def read_trees(source: ChunkSource) -> dict[int, Tree]:
    """Return the trees that each rank wrote, by rank; CheckFailed if one is not JSON."""
    tensors = source.root.tensors
    numbers = sorted(int(name.removeprefix(STATE_NAME)) for name in tensors if is_tree(name))
    memory = {number: np.empty(tensors[f"{STATE_NAME}{number}"].shape, np.uint8) for number in numbers}
    restore_from(source, [
        Piece.whole(f"{STATE_NAME}{number}", Box((0,), (len(data),)), data) for number, data in memory.items()
    ])  # fmt: skip
    try:
        return {number: dict(json.loads(data.tobytes())) for number, data in memory.items()}
    except (TypeError, ValueError) as error:
        raise CheckFailed(f"{source.url} holds a tree of values that is not JSON: {error}") from None


def is_tree(name: str) -> bool:
    """Return whether a tensor of this name holds the trees of a rank."""
    return name.startswith(STATE_NAME) and name.removeprefix(STATE_NAME).isdecimal()
