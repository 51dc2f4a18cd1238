"""TokenShard: one `.bin` + `.idx` pair, byte-compatible with Megatron's indexed dataset v1.

Opening costs O(1): the header and the file sizes are checked, nothing else is read; both files are memory-mapped, and
no file descriptor stays open. The layout is in docs/formats/token-store.md. A damaged pair is a CheckFailed that
names the file and the fault. A RemoteShard has the index alone, and fetches the tokens of single documents.
"""

import ctypes
import mmap
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt
import xxhash

from datakit.files.durable import FileDigest, flush_to_disk, reading, write_durably, writing
from threefold.errors import CheckFailed, UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
DTYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}
MAX_DOCUMENT_TOKENS = 2**31 - 1
RESTORE_HINT = "restore the file from a copy, or make it again with `datakit preprocess`"
_WRITE_BUFFER_BYTES = 1 << 20

Tokens = npt.NDArray[np.integer[Any]]
Int64s = npt.NDArray[np.int64]


class ShardIndex:
    """An open `.idx` file: for each sequence its length and byte offset, for each document its first sequence."""

    def __init__(self, path: Path | str, data: memoryview | None = None) -> None:
        """Map the file, or take `data` that was mapped of it; only its header and size are checked."""
        self._path = path
        data = map_file(path) if data is None else data
        self.dtype, self.num_sequences, boundaries = _parse_header(path, data)
        self.num_documents = boundaries - 1
        at = HEADER.size
        self.lengths = np.frombuffer(data, "<i4", self.num_sequences, at)
        self.pointers = np.frombuffer(data, "<i8", self.num_sequences, at + 4 * self.num_sequences)
        self.document_index = np.frombuffer(data, "<i8", boundaries, at + 12 * self.num_sequences)

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self._path)

    def sequence_at(self, offset_bytes: int) -> int:
        """Return the last sequence that begins at or before a byte, -1 if none does; it reads O(log) of the index."""
        return bisect_right(self.pointers, offset_bytes) - 1  # searchsorted would copy all, as they are not aligned


class TokenShard:
    """One open pair of files; `tokens` is all its tokens, `document(i)` those of one document (both are views).

    `address` is where the tokens are in memory, as long as the shard lives.
    """

    def __init__(self, stem: str | os.PathLike[str]) -> None:
        """Open `<stem>.bin` and `<stem>.idx`."""
        self._bin: Path | str = f"{os.fspath(stem)}.bin"  # thousands are opened, and a Path costs as much as a mapping
        self.index = index = ShardIndex(f"{os.fspath(stem)}.idx")
        self.dtype, self.num_documents = index.dtype, index.num_documents
        data = map_file(self._bin)
        if len(data) % self.dtype.itemsize:
            raise damaged(f"{self.bin_path} has {len(data)} bytes, no whole number of {self.dtype} tokens")
        self.tokens: Tokens = np.frombuffer(data, self.dtype)
        self.address = self.tokens.ctypes.data
        end = int(index.pointers[-1]) + int(index.lengths[-1]) * self.dtype.itemsize if index.num_sequences else 0
        if end != len(data):
            raise damaged(f"{self.bin_path} has {len(data)} bytes, its index ends at byte {end}")

    @property
    def bin_path(self) -> Path:
        """The file of its tokens."""
        return Path(self._bin)

    @property
    def idx_path(self) -> Path:
        """The file of its index."""
        return self.index.path

    @property
    def num_tokens(self) -> int:
        """How many tokens the shard holds."""
        return len(self.tokens)

    def document(self, number: int) -> Tokens:
        """Return the tokens of one document, 0 <= number < num_documents."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents} in {self.idx_path}")
        first, last = (int(boundary) for boundary in self.index.document_index[number : number + 2])
        if not 0 <= first <= last <= self.index.num_sequences:
            raise damaged(f"{self.idx_path} is damaged: document {number} spans sequences {first} to {last}")
        parts = [self._sequence(sequence) for sequence in range(first, last)]
        return parts[0] if len(parts) == 1 else np.concatenate([self.tokens[:0], *parts])

    def _sequence(self, number: int) -> Tokens:
        pointer, length = int(self.index.pointers[number]), int(self.index.lengths[number])
        start, odd = divmod(pointer, self.dtype.itemsize)
        if odd or length < 0 or not 0 <= start <= start + length <= len(self.tokens):
            raise damaged(f"{self.idx_path} is damaged: sequence {number} is {length} tokens at byte {pointer}")
        return self.tokens[start : start + length]


class RemoteShard(TokenShard):
    """A shard whose tokens are not mapped."""

    def __init__(self, index: ShardIndex, bin_path: Path, num_tokens: int, read: Callable[[int, int], Tokens]) -> None:
        """Take what messages name its tokens by, how many they are, and what returns those in bytes [start, stop)."""
        self._bin, self.index, self._num_tokens, self._read = bin_path, index, num_tokens, read
        self.dtype, self.num_documents = index.dtype, index.num_documents

    @property
    def num_tokens(self) -> int:
        """How many tokens the shard holds."""
        return self._num_tokens

    def _sequence(self, number: int) -> Tokens:
        start = int(self.index.pointers[number])
        return self._read(start, start + int(self.index.lengths[number]) * self.dtype.itemsize)


class ShardWriter:
    """Writes one pair of files front to back, one sequence a document; memory is 4 bytes a document."""

    def __init__(self, stem: str | os.PathLike[str], dtype: str) -> None:
        """Create `<stem>.bin`; `<stem>.idx` is written by `finish`."""
        self.bin_path, self.idx_path = Path(f"{os.fspath(stem)}.bin"), Path(f"{os.fspath(stem)}.idx")
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = 0
        self._lengths = array("i")
        self._hash = xxhash.xxh3_64()
        with writing(self.bin_path):
            self.bin_path.unlink(missing_ok=True)  # of an earlier try: each writes a file of its own
            self._file = self.bin_path.open("xb", buffering=_WRITE_BUFFER_BYTES)

    @property
    def num_documents(self) -> int:
        """How many documents were added."""
        return len(self._lengths)

    def extend(self, tokens: bytes, lengths: Sequence[int]) -> None:
        """Append documents of these many tokens each, given as the little-endian bytes of them all."""
        if (longest := max(lengths, default=0)) > MAX_DOCUMENT_TOKENS:
            raise UserError(f"a document of {longest} tokens; the index holds up to {MAX_DOCUMENT_TOKENS} each")
        with writing(self.bin_path):
            self._file.write(tokens)
        self._hash.update(tokens)
        self._lengths.extend(lengths)
        self.num_tokens += sum(lengths)

    def finish(self) -> tuple[FileDigest, FileDigest]:
        """Write the index, make both files durable, and return the digests of both; a failure removes them."""
        index = encode_index(np.frombuffer(self._lengths, np.int32), self.dtype)
        try:
            with writing(self.bin_path):
                flush_to_disk(self._file)
                self._file.close()
            write_durably(self.idx_path, index)
        except BaseException:
            self.abandon()
            raise
        size_bytes = self.num_tokens * self.dtype.itemsize
        return FileDigest(size_bytes, self._hash.hexdigest()), FileDigest.of(index)

    def abandon(self) -> None:
        """Close and remove what was written."""
        with suppress(OSError):  # the file may not take its last bytes; it is removed all the same
            self._file.close()
        self.bin_path.unlink(missing_ok=True)
        self.idx_path.unlink(missing_ok=True)


def encode_index(lengths: npt.NDArray[np.int32], dtype: "np.dtype[Any]") -> bytes:
    """Return the `.idx` file of documents of these lengths, one sequence each."""
    boundaries = np.arange(len(lengths) + 1, dtype="<i8")
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    pointers = np.concatenate([np.zeros(1, "<i8"), ends])[: len(lengths)]
    header = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype.name], len(lengths), len(boundaries))
    return b"".join([header, lengths.astype("<i4").tobytes(), pointers.tobytes(), boundaries.tobytes()])


def map_file(path: Path | str) -> memoryview:
    """Map a whole file for reading; it is unmapped with the last view of it.

    StorageError if the file cannot be opened or mapped; its cause's errno is ENOMEM if the address space is full.
    """
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return map_open(descriptor)
        finally:
            os.close(descriptor)


def map_open(descriptor: int) -> memoryview:
    """Map a whole open file, which may be closed then; OSError if that is refused."""
    size_bytes = os.fstat(descriptor).st_size
    if not size_bytes:
        return memoryview(b"")
    address = _libc().mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return mapped_at(address, size_bytes).data


def mapped_at(address: int, size_bytes: int, release: Callable[[], object] | None = None) -> npt.NDArray[np.uint8]:
    """Return the bytes of a mapped file; with the last reference they are unmapped, and `release` is called."""
    mapping = _Mapping(address, size_bytes)
    if release:
        finalize(mapping, release).atexit = False
    return np.asarray(mapping)


class _Mapping:
    """A file's bytes in memory. An `mmap.mmap` would keep a descriptor, and a store has more shards than a process
    may open files.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        finalize(self, _libc().munmap, address, size_bytes).atexit = False  # threads may read until the very end
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size_bytes,), "data": (address, True)}


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, number, number, number, ctypes.c_int64]
    libc.munmap.restype, libc.munmap.argtypes = number, [pointer, size]
    return libc


def damaged(what: str) -> CheckFailed:
    """Return the error of a store's file that is not as it was written."""
    return CheckFailed(what, hint=RESTORE_HINT)


def _parse_header(path: Path | str, index: memoryview) -> tuple["np.dtype[Any]", int, int]:
    """Dtype, number of sequences and number of document boundaries; all sizes are checked against the file's."""
    if len(index) < HEADER.size:
        raise damaged(f"{path} has {len(index)} bytes, too few for an index")
    magic, version, code, num_sequences, boundaries = HEADER.unpack_from(index)
    if magic != MAGIC:
        raise damaged(f"{path} is not a Megatron index: it begins with {magic!r}")
    if version != VERSION:
        raise damaged(f"{path} has index version {version}, this program reads version {VERSION}")
    if code not in DTYPE_NAMES:
        raise damaged(f"{path}: dtype code {code} is none of the integer codes {sorted(DTYPE_NAMES)}")
    text_bytes = HEADER.size + 12 * num_sequences + 8 * boundaries
    if boundaries < 1 or len(index) not in (text_bytes, text_bytes + num_sequences):  # a multimodal index adds modes
        raise damaged(
            f"{path} has {len(index)} bytes, {text_bytes} expected for {num_sequences} sequences "
            f"and {boundaries - 1} documents"
        )
    return np.dtype(DTYPE_NAMES[code]).newbyteorder("<"), num_sequences, boundaries
