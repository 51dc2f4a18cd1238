"""Pack: make the index of a store's rows, without a look at any token; the same bytes on any number of threads.

`best_fit` is best-fit-decreasing (arXiv 2404.10830) over windows of 262,144 documents that follow each other: each
piece goes into the fullest row that has room, the longest pieces first. Documents longer than a row are cut into
row-long pieces before, and no other is cut. `pad` puts each piece into a row of its own. Memory is some 8 MB a thread,
more where documents are far longer than rows.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from datakit.files.durable import FileDigest, checked_blocks, durable_file
from datakit.files.remote_file import is_url
from datakit.format.manifest import FILE_NAME
from datakit.format.native import library
from datakit.format.output import ASSEMBLY_NOTE, Output
from datakit.format.shard import Int64s
from datakit.rows.packed_rows import (
    COLUMNS,
    PACKINGS,
    RECORD_NAME,
    PackingRecord,
    column_path,
    default_name,
    read_record,
)
from datakit.store.claim import claim
from datakit.store.token_store import TokenStore
from threefold.errors import UserError, quoted
from threefold.storage.local import LocalStorage, sync_name

WINDOW_DOCUMENTS = 1 << 18
MAX_SEQ_LENGTH = 1 << 24
Int32s = npt.NDArray[np.int32]
Rows = tuple[Int64s, Int64s, Int32s]


def pack(
    store: str | os.PathLike[str],
    *,
    seq_length: int,
    packing: str = "best_fit",
    output: str | os.PathLike[str] | None = None,
    num_workers: int = 1,
    window_documents: int = WINDOW_DOCUMENTS,
    dry_run: bool = False,
) -> tuple[Path, PackingRecord]:
    """Make the index of a store in the folder `output`, by default in the store; return the folder and its record.

    The same call returns a complete one, and makes one that was killed again. A dry run writes nothing. UserError if
    the store holds no token or the output something else, CheckFailed if the store's documents are damaged. Rows are
    filled within `window_documents`, which are in memory.
    """
    if window_documents < 1:
        raise UserError(f"windows of {window_documents} documents", hint=f"window_documents={WINDOW_DOCUMENTS}")
    if packing not in PACKINGS or not 1 <= seq_length <= MAX_SEQ_LENGTH:
        raise UserError(
            f"packing {packing!r} into rows of {seq_length} tokens: they have from 1 to {MAX_SEQ_LENGTH}",
            hint=f"--packing {' or '.join(PACKINGS)}, --seq-length 4096",
        )
    opened = TokenStore.open(store)
    folder = opened.path / default_name(packing, seq_length) if output is None else Path(output)
    if output is not None and is_url(os.fspath(output)):
        raise UserError(f"{output} is not a local folder: an index is mapped", hint="--output FOLDER")
    if not opened.num_tokens:
        raise UserError(
            f"{opened.path} holds no token: there is nothing to pack", hint=f"datakit inspect {quoted(opened.path)}"
        )
    fingerprint, documents = opened.manifest.fingerprint, opened.manifest.documents_fingerprint
    made_of = {
        "store": fingerprint, "documents": documents, "packing": packing, "seq_length": seq_length,
        "window_documents": window_documents, "num_documents": opened.num_documents, "num_tokens": opened.num_tokens,
    }  # fmt: skip
    record = read_record(folder)
    if record is not None and all(getattr(record, name) == value for name, value in made_of.items()):
        Output(str(folder), ASSEMBLY_NOTE).settle()
        return folder, record
    windows = _windows(_documents(opened, window_documents), seq_length, packing == "best_fit", num_workers)
    if dry_run:
        return folder, _written(windows, made_of, None)
    place = Output(str(folder), ASSEMBLY_NOTE)
    sync_name(LocalStorage(opened.path), FILE_NAME)  # the index names the store
    with claim(place, made_of):
        record = _written(windows, made_of, place.scratch)
        place.adopt("", [column_path(place.scratch, name) for name in COLUMNS])
        place.commit({RECORD_NAME: record.encode()})
    return folder, record


def _written(windows: Iterator[Rows], made_of: dict[str, Any], scratch: Path | None) -> PackingRecord:
    """Write the columns of all windows to a folder, if there is one, and return their record."""
    counts: list[int] = []
    num_pieces = 0
    with ExitStack() as files:
        columns = [_Column(files, scratch, name) for name in COLUMNS]
        for ends, starts, sizes in windows:
            counts.append(len(ends))
            values: tuple[npt.NDArray[np.integer[Any]], ...] = (ends + num_pieces, starts, sizes)
            for column, part in zip(columns, values):
                column.extend(part)
            num_pieces += len(starts)
    return PackingRecord(
        **made_of,
        num_pieces=num_pieces,
        window_rows=tuple(counts),
        files={name: column.digest for name, column in zip(COLUMNS, columns)},
    )


class _Column:
    """One file of an index as it is written, or only counted and hashed without a folder."""

    def __init__(self, files: ExitStack, folder: Path | None, name: str) -> None:
        path = None if folder is None else column_path(folder, name)
        self._file: BinaryIO | None = None if path is None else files.enter_context(durable_file(path))
        self._dtype, self._hash, self._size_bytes = COLUMNS[name], xxhash.xxh3_64(), 0

    @property
    def digest(self) -> FileDigest:
        return FileDigest(self._size_bytes, self._hash.hexdigest())

    def extend(self, values: npt.NDArray[np.integer[Any]]) -> None:
        data = np.ascontiguousarray(values, self._dtype).data.cast("B") if len(values) else b""
        self._hash.update(data)
        self._size_bytes += len(data)
        if self._file is not None:
            self._file.write(data)


def _windows(
    documents: Iterator[tuple[int, Int32s]], seq_length: int, best_fit: bool, num_workers: int
) -> Iterator[Rows]:
    """Yield the rows of each window of documents in order, made on threads a few windows ahead."""
    ahead: deque[Future[Rows]] = deque()
    with ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="datakit-pack") as threads:
        while True:
            for first_token, lengths in islice(documents, max(1, num_workers) + 1 - len(ahead)):
                ahead.append(threads.submit(pack_documents, lengths, first_token, seq_length, best_fit=best_fit))
            if not ahead:
                return
            yield ahead.popleft().result()


def _documents(store: TokenStore, window_documents: int) -> Iterator[tuple[int, Int32s]]:
    """Yield the first token and the documents' lengths of each window; each shard's index is checked before."""
    first_token, parts, missing = 0, list[Int32s](), window_documents
    for number, entry in enumerate(store.manifest.shards):
        for _ in checked_blocks(store.path / f"{entry.name}.idx", entry.idx):
            pass
        lengths = store.shard(number).index.lengths
        at = 0
        while at < len(lengths):
            part = lengths[at : at + missing].astype(np.int32)
            parts.append(part)
            at, missing = at + len(part), missing - len(part)
            if not missing:
                window = np.concatenate(parts)
                yield first_token, window
                first_token, parts, missing = first_token + int(window.sum(dtype=np.int64)), [], window_documents
    if parts:
        yield first_token, np.concatenate(parts)


def pack_documents(
    lengths: Int32s, first_token: int, seq_length: int, *, best_fit: bool
) -> tuple[Int64s, Int64s, Int32s]:
    """Return the rows of documents of these lengths that follow each other from a token on: ends, starts and sizes.

    The pieces of row r are ends[r - 1] up to ends[r] of the other two, which docs/formats/packing-index.md explains.
    MemoryError if the pieces do not fit into memory.
    """
    num_pieces = library().dk_count_pieces(lengths.ctypes.data, len(lengths), seq_length)
    assert num_pieces >= 0, "lengths are from 0 on, and rows from 1 to MAX_SEQ_LENGTH tokens"
    ends, starts, sizes = (np.empty(num_pieces, dtype) for dtype in (np.int64, np.int64, np.int32))
    num_rows = library().dk_pack(
        lengths.ctypes.data, len(lengths), first_token, seq_length, best_fit, ends.ctypes.data, starts.ctypes.data,
        sizes.ctypes.data,
    )  # fmt: skip
    if num_rows < 0:
        raise MemoryError(f"no memory for rows of {num_pieces} pieces")
    return ends[:num_rows], starts, sizes
