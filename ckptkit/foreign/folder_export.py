"""Writing an export: files in a folder of another format, large ones in blocks and then the small ones.

A note is put into the folder before any file and goes last. Killed, the same call goes on: large files that are there
in their full size under an equal note are kept, as a file has its name only once it is whole.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from shlex import quote

from ckptkit.check.verify import check_files
from ckptkit.foreign.folder_claim import FolderClaim
from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes
from ckptkit.io.data_files import write_blocks
from ckptkit.io.double_buffer import Load, double_buffered
from ckptkit.io.room import refuse_full
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.model.box import Box
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.tensor import TensorInfo
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


class SourceSums:
    """The sums of tensors that are read from begin to end, one range after the other; several may be under way."""

    def __init__(self, root: Root, url: str) -> None:
        self._saved = root.certificate if is_readable(root.certificate) else None
        self._url = url
        self._read: dict[str, tuple[int, int]] = {}  # how many elements were, and their sum
        self.num_certified = 0  # tensors that were read whole, or are empty, and are equal to what was saved
        for info in root.tensors.values() if self._saved is not None else ():
            if not info.numel and info.placement.tied_to is None:  # nothing of it is read
                self._compare(info, 0)

    def add(self, info: TensorInfo, start: int, stop: int, data: Bytes) -> None:
        """Add elements [start, stop); CheckFailed if they end a tensor that is not equal to what was saved."""
        if self._saved is None:
            return
        at, value = self._read.pop(info.name, (0, 0))
        if start != at:  # it is not read from its begin
            return
        sums = ChunkSums(ChunkTable.of([(info, Box((0,) * len(info.shape), info.shape), start, stop)]), 0)
        sums.add(data, 0)
        value ^= int(sums.values[0])
        if stop < info.numel:
            self._read[info.name] = stop, value
        else:
            self._compare(info, value)

    def _compare(self, info: TensorInfo, value: int) -> None:
        assert self._saved is not None, "a certificate"
        if self._saved["tensors"].get(info.name) != digest(info, value):
            text = f"{info.name} of {self._url} is not equal to what was saved, by the certificate of the save"
            raise CheckFailed(text, hint=f"ckptkit verify {quote(self._url)}")
        self.num_certified += 1


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """What an export writes: large files, by their sizes, and then small ones, whose bytes are known.

    `heads` are the beginnings of the large files. `loads` fill blocks of `block_bytes` of a file by its name, and are
    made as each file's turn comes.
    """

    note: bytes
    large: Mapping[str, int]
    heads: Mapping[str, bytes]
    loads: Callable[[str], Load]
    block_bytes: int
    small: Mapping[str, bytes]


def write_folder(
    source: ChunkSource, target: Storage, plan: FolderPlan, sums: SourceSums, *,
    progress: Progress, dry_run: bool, started_s: float,
) -> ExportReport:  # fmt: skip
    """Write what is not there yet into a folder that holds nothing else; `sums` are those of what the blocks read.

    UserError if the folder is not free or the disk is short: nothing is written then. `started_s` is when the export
    began, by `time.monotonic`.
    """
    sizes = dict(plan.large) | {name: len(data) for name, data in plan.small.items()}
    claim = FolderClaim(target, plan.note, sizes, plan.heads, plan.small)
    kept = claim.check()
    total, done = sum(sizes.values()), sum(kept.values())
    check_files(source)
    hidden_bytes = claim.make_room(dry_run=dry_run)
    refuse_full(target, total - done - (hidden_bytes if dry_run else 0))

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    if not dry_run and len(kept) < len(sizes):
        with claim:
            for name, size_bytes in plan.large.items():
                if name in kept:
                    keep_file(target, name)
                    continue
                blocks = double_buffered(plan.loads(name), size_bytes, plan.block_bytes, advance)
                write_blocks(target, name, size_bytes, blocks, is_reused=True)
            for name, data in plan.small.items():
                target.write(name, data)
    return ExportReport(
        source.url, target.url, source.root.step, len(sizes), total - sum(kept.values()), sum(kept.values()),
        time.monotonic() - started_s, dry_run, sums.num_certified,
    )  # fmt: skip
