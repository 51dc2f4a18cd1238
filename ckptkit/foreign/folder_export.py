"""Writing an export: files in a folder of another format, large ones in blocks and then the small ones.

A note is put into the folder before any file and goes last. Killed, the same call goes on: large files that are there
in their full size under an equal note are kept, as a file has its name only once it is whole.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from shlex import quote

import numpy as np

from ckptkit.check.slabs import fill
from ckptkit.check.verify import check_files
from ckptkit.foreign.folder_claim import FolderClaim
from ckptkit.io.blocks import Bytes
from ckptkit.io.data_files import refuse_full, write_blocks
from ckptkit.io.double_buffer import double_buffered
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.tensor import ITEMSIZE, Box, TensorInfo
from ckptkit.plan.certificate import digest, is_readable
from threefold.errors import CheckFailed
from threefold.storage import Storage
from threefold.storage.local import keep_file

Progress = Callable[[int, int], None]  # of the bytes that are done, and of all


@dataclass(frozen=True)
class ExportReport:
    """What an export did, or would do; bytes_kept are those of files that an earlier try left.

    `num_certified` tensors of the source were read whole and are equal to what was saved, by its certificate.
    """

    source: str
    url: str
    step: int
    num_files: int
    bytes_written: int
    bytes_kept: int
    seconds: float
    dry_run: bool = False
    num_certified: int = 0


class SourceReader:
    """Reads tensors of a source, and compares those that are read from begin to end with what was saved.

    One range of a tensor is read after the other; several tensors may be under way.
    """

    def __init__(self, source: ChunkSource) -> None:
        root = source.root
        self._source, self._saved = source, root.certificate if is_readable(root.certificate) else None
        self._read: dict[str, tuple[int, int]] = {}  # how many elements were, and their sum
        self.num_certified = 0  # tensors that were read whole, or are empty, and are equal to what was saved
        for info in root.tensors.values() if self._saved is not None else ():
            if not info.numel and info.placement.tied_to is None:  # nothing of it is read
                self._compare(info, 0)

    def read(self, info: TensorInfo, start: int, stop: int, memory: Bytes) -> None:
        """Fill memory with elements [start, stop); CheckFailed if a tensor ends there that differs from the saved."""
        fill(self._source, [(info, start, stop)], memory)
        if self._saved is None:
            return
        at, value = self._read.pop(info.name, (0, 0))
        if start != at:  # it is not read from its begin
            return
        sums = ChunkSums(ChunkTable.of([(info, Box.whole(info.shape), start, stop)]), 0)
        sums.add(memory, 0)
        value ^= int(sums.values[0])
        if stop < info.numel:
            self._read[info.name] = stop, value
        else:
            self._compare(info, value)

    def read_bytes(self, info: TensorInfo, start: int, first: int, last: int, memory: Bytes) -> None:
        """Fill memory with bytes [first, last) of a tensor's elements from `start` on."""
        size = ITEMSIZE[info.dtype]
        self.read(info, start + first // size, start + last // size, memory)

    def _compare(self, info: TensorInfo, value: int) -> None:
        assert self._saved is not None, "a certificate"
        if self._saved["tensors"].get(info.name) != digest(info, value):
            url = self._source.url
            text = f"{info.name} of {url} is not equal to what was saved, by the certificate of the save"
            raise CheckFailed(text, hint=f"ckptkit verify {quote(url)}")
        self.num_certified += 1


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes [begin, end) of a file; `fill` fills memory with a range of them, counted from `begin`."""

    begin: int
    end: int
    fill: Callable[[int, int, Bytes], None]

    @classmethod
    def of_bytes(cls, begin: int, num_bytes: int, make: Callable[[], bytes]) -> "FilePiece":
        """Return a piece whose bytes are made when it is filled."""

        def fill_made(first: int, last: int, memory: Bytes) -> None:
            memory[:] = np.frombuffer(make(), np.uint8)[first:last]

        return cls(begin, begin + num_bytes, fill_made)


def load_pieces(pieces: Sequence[FilePiece], start: int, block: Bytes) -> None:
    """Fill a block, which begins at byte `start` of a file, with what it has of pieces, and with zeros between them.

    Pieces are in their order, and none is empty.
    """
    at, stop = start, start + len(block)
    for piece in pieces[bisect_right(pieces, start, key=lambda piece: piece.end) :]:
        first, last = max(piece.begin, start), min(piece.end, stop)
        if piece.begin >= stop:
            break
        block[at - start : first - start] = 0
        piece.fill(first - piece.begin, last - piece.begin, block[first - start : last - start])
        at = last
    block[at - start :] = 0


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file that is written in blocks: how it begins, and what its pieces are once its turn comes."""

    size_bytes: int
    head: bytes
    pieces: Callable[[SourceReader], Iterable[FilePiece]]


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """What an export writes: large files in blocks of `block_bytes`, and then small ones, whose bytes are known."""

    note: bytes
    large: Mapping[str, LargeFile]
    block_bytes: int
    small: Mapping[str, bytes]


def write_folder(
    source: ChunkSource, target: Storage, plan: FolderPlan, *, progress: Progress, dry_run: bool, started_s: float
) -> ExportReport:
    """Write what is not there yet into a folder that holds nothing else.

    UserError if the folder is not free or the disk is short: nothing is written then. `started_s` is when the export
    began, by `time.monotonic`.
    """
    sizes = {name: file.size_bytes for name, file in plan.large.items()}
    sizes |= {name: len(data) for name, data in plan.small.items()}
    claim = FolderClaim(target, plan.note, sizes, {name: file.head for name, file in plan.large.items()}, plan.small)
    whole, reader = claim.check(), SourceReader(source)
    total, num_kept = sum(sizes.values()), sum(whole.values())
    done = num_kept
    check_files(source)
    hidden_bytes = claim.make_room(dry_run=dry_run)
    refuse_full(target, total - done - (hidden_bytes if dry_run else 0))

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    if not dry_run and len(whole) == len(sizes):  # of another call, or moved here: it may not have been durable
        for name in sizes:
            keep_file(target, name)
    elif not dry_run:
        with claim:
            for name, file in plan.large.items():
                if name in whole:
                    keep_file(target, name)
                    continue
                load = partial(load_pieces, [piece for piece in file.pieces(reader) if piece.begin < piece.end])
                blocks = double_buffered(load, file.size_bytes, plan.block_bytes, advance)
                write_blocks(target, name, file.size_bytes, blocks, is_reused=True)
            for name, data in plan.small.items():
                target.write(name, data)
    return ExportReport(
        source.url, target.url, source.root.step, len(sizes), total - num_kept, num_kept,
        time.monotonic() - started_s, dry_run, reader.num_certified,
    )  # fmt: skip
