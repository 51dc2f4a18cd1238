"""Restore: fill pieces of any layout from a checkpoint, reading and holding no more than they need.

Everything is compared first and refused in one report, before any destination is touched; every byte that is handed out
was verified. Tensors that ranks fill whole are compared with the certificate of the save. What a PyTorch program kept
beside its tensors is read without torch.

Ranks that restore together read and verify each granule once, and pass it on to all who want it. Every rank sends which
granules it wants. What one rank alone wants it reads straight into place; the rest is read in rounds, in which each
rank reads a window of its share and sends every other rank what that one wants of it, while the next window is read.
Memory: two windows, what is sent of one and what comes in, ROUND_BYTES each of all ranks together (or a granule a rank,
past 64 of them).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ckptkit.format.address import open_address
from ckptkit.format.root import Root
from ckptkit.format.state_tree import STATE_NAME, Tree
from ckptkit.io.blocks import GRANULE_BYTES, Bytes, copy_many, place
from ckptkit.io.double_buffer import ahead
from ckptkit.io.torch_tensors import are_plain, held_by, is_writable, memory_misfit, way_out
from ckptkit.loading.chunk_source import ChunkSource, exchange_of, reading_threads, usual_threads
from ckptkit.loading.exchange import Alone, Exchange, agreed, on_all
from ckptkit.loading.load_sums import LoadSums, fetching
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.sharing import Line, Runs, begins, clipped, common, count, share_reads, window
from ckptkit.loading.targets import Targets
from ckptkit.model.chunk_table import ChunkTable, Ints
from ckptkit.model.tensor import ITEMSIZE, Box, Piece, TensorInfo
from ckptkit.plan.certificate import is_readable
from ckptkit.plan.load_plan import LoadPlan
from threefold.errors import CheckFailed, UserError, listed, quoted

ROUND_BYTES = 64 << 20


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


def read_together(
    source: ChunkSource, plan: LoadPlan, targets: Targets, exchange: Exchange, sums: LoadSums | None = None
) -> None:
    """Fill the targets of this rank's plan; every rank of the exchange calls this with a plan and targets of its own.

    What fills them is added to `sums`, if there are any. An error of any rank is raised on all of them.
    """
    assert source.files is not None, "ranks read the files of a step together"
    line = Line([part.data_bytes for part in source.root.parts])
    sent = agreed(exchange, lambda: line.granules(plan).astype("<i8").tobytes())
    wanted: list[Runs] = [np.frombuffer(runs, "<i8").astype(np.int64).reshape(-1, 2) for runs in sent]
    alone, shared = share_reads(wanted, source.files.places.readable(line))
    reading = _Reading(source, plan, targets, sums, exchange, line, wanted)
    on_all(exchange, lambda: reading.read_alone(alone[exchange.rank]))
    width = max(ROUND_BYTES // exchange.size // GRANULE_BYTES, 1)  # granules
    starts = range(0, max(map(count, shared)), width)
    reading.read_rounds([[window(runs, start, start + width) for runs in shared] for start in starts])


class _Reading:
    """One rank's part in a read; `wanted` is what every rank wants."""

    def __init__(
        self, source: ChunkSource, plan: LoadPlan, targets: Targets, sums: LoadSums | None, exchange: Exchange,
        line: Line, wanted_by_rank: list[Runs],
    ) -> None:  # fmt: skip
        self._source, self._plan, self._targets, self._sums = source, plan, targets, sums
        self._exchange, self._line, self._wanted = exchange, line, wanted_by_rank
        self._spans = line.spans(plan)

    def read_alone(self, runs: Runs) -> None:
        """Read what no other rank wants."""
        row, _, begin, end = clipped(self._spans, self._line.bytes_of(runs))
        passed = begin - self._spans[row, 0]
        cut = self._plan.take(row)
        copies = replace(cut, source=cut.source + passed, target=cut.target + passed, size=end - begin)
        self._targets.fill(copies, fetching(self._source, self._sums))

    def read_rounds(self, rounds: list[list[Runs]]) -> None:
        """Make rounds, each of a window for each rank; the next window is read beside the exchange of this one."""
        own = [windows[self._exchange.rank] for windows in rounds]
        most = max((count(runs) for runs in own), default=0) * GRANULE_BYTES
        buffers = [np.empty(most, np.uint8) for _ in rounds[:2]]  # nobody needs a round's once the next one begins
        with reading_threads(1, self._source) as pool:
            reads = ahead(partial(self._read_window, own, buffers), range(len(rounds)), pool)
            for windows in rounds:
                self._share(windows, on_all(self._exchange, lambda: next(reads)))

    def _share(self, windows: list[Runs], memory: Bytes) -> None:
        """Give the others what they want of one's own window, and take what one wants of theirs."""
        own = self._exchange.rank
        give = [self._packed(memory, windows[own], runs) for runs in self._wanted]
        kept, give[own] = give[own], memory[:0]
        received = self._exchange.all_to_all([each.data for each in give])
        arrived = [np.frombuffer(buffer, np.uint8) for buffer in received]
        arrived[own] = kept
        runs = [self._line.bytes_of(common(window, self._wanted[own])) for window in windows]
        on_all(self._exchange, lambda: self._place(runs, arrived))

    def _read_window(self, windows: Sequence[Runs], buffers: Sequence[Bytes], number: int) -> Bytes:
        """Return the bytes of a window's runs of granules, verified, at the begin of its one of two buffers."""
        memory = buffers[number % 2]
        reads, offset = self._line.reads(windows[number])
        self._source.fetch(reads, memory.ctypes.data + offset)
        return memory[: int(reads.size.sum())]

    def _packed(self, memory: Bytes, present: Runs, asked: Runs) -> Bytes:
        """Return what is wanted of the granules in memory, run after run; not copied if it is there like that."""
        spans = self._line.bytes_of(present)
        run, _, begin, end = clipped(spans, self._line.bytes_of(asked))
        offset, size = begins(spans)[run] + begin - spans[run, 0], end - begin
        if not len(run):
            return memory[:0]
        if (offset[1:] == offset[:-1] + size[:-1]).all():
            return memory[offset[0] : offset[-1] + size[-1]]
        packed = np.empty(int(size.sum()), np.uint8)
        at = np.cumsum(size) - size
        copy_many(np.stack([memory.ctypes.data + offset, packed.ctypes.data + at, size], axis=1))
        return packed

    def _place(self, runs_of_ranks: list[Runs], arrived: list[Bytes]) -> None:
        """Copy what came in to where it is wanted, and add it to the sums."""
        for each, data in zip(runs_of_ranks, arrived, strict=True):
            assert len(data) == (each[:, 1] - each[:, 0]).sum(), "what was sent is what is wanted"
        runs, begun = np.concatenate(runs_of_ranks), np.concatenate([begins(each) for each in runs_of_ranks])
        sender = np.repeat(np.arange(len(arrived)), [len(each) for each in runs_of_ranks])
        row, run, begin, end = clipped(self._spans, runs)
        cut = self._plan.take(row)
        target = cut.target + begin - self._spans[row, 0]
        # the "files" of these copies are what came in from each rank
        copies = LoadPlan(sender[run], begun[run] + begin - runs[run, 0], cut.row, target, end - begin)
        self._targets.fill(copies, partial(self._copy, arrived))

    def _copy(self, arrived: list[Bytes], copies: LoadPlan, addresses: Ints, num_threads: int | None = None) -> None:
        """Make copies of what came in."""
        rows = np.stack([copies.source, copies.size, addresses], axis=1)
        sums = None if self._sums is None else self._sums.places(copies)
        edges = np.searchsorted(copies.part, np.arange(len(arrived) + 1)).tolist()
        for data, own in zip(arrived, map(slice, edges, edges[1:]), strict=True):
            place(data, 0, rows[own], None, sums and sums.take(own))
