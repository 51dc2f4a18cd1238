"""Writing an export: files in a folder of another format, large ones in blocks and then the small ones.

A note is put into the folder before any file and goes last. Killed, the same call goes on: large files that are there
in their full size under an equal note are kept, as a file has its name only once it is whole.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ckptkit.check.verify import check_files
from ckptkit.io.data_files import write_blocks
from ckptkit.io.room import refuse_full
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.rewrite.file_blocks import FileBlocks
from ckptkit.rewrite.folder_claim import FolderClaim
from ckptkit.rewrite.source_sums import SourceSums
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


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """What an export writes: large files, by their sizes, and then small ones, whose bytes are known.

    `heads` are the beginnings of the large files, `blocks` are theirs by name, made as each file's turn comes.
    """

    note: bytes
    large: Mapping[str, int]
    heads: Mapping[str, bytes]
    blocks: Callable[[str], FileBlocks]
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
    if not dry_run and len(kept) < len(sizes):
        with claim:
            for name, size_bytes in plan.large.items():
                if name in kept:
                    keep_file(target, name)
                    continue
                blocks = plan.blocks(name).blocks(partial(_advance, progress, done, total))
                write_blocks(target, name, size_bytes, blocks, is_reused=True)
                done += size_bytes
            for name, data in plan.small.items():
                target.write(name, data)
    return ExportReport(
        source.url, target.url, source.root.step, len(sizes), total - sum(kept.values()), sum(kept.values()),
        time.monotonic() - started_s, dry_run, sums.num_certified,
    )  # fmt: skip


def _advance(progress: Progress, before: int, total: int, num_bytes: int) -> None:
    progress(before + num_bytes, total)
