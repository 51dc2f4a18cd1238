"""Block I/O without the GIL: data files are written and read in whole granules, each checksummed in the same pass.

A granule is 1 MiB of a file, counted from the file's first byte (the header included); the last one may be shorter. Its
checksum is XXH3-64 with seed 0. O_DIRECT is used where the file system takes it, the page cache elsewhere; a read may
also take from that the granules that it has whole. Memory is one reused 8 MiB block a thread and, in a reader, the last
granule read. Failures of the system are OSErrors with errno and path.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from threefold.closing import Closing, Making
from threefold.errors import CheckFailed, StorageError
from threefold.mapped import unreadable
from threefold.native import INT, POINTER, TEXT, UINT64, Prototypes, bind, load_library
from threefold.storage.new_file import NewFile

GRANULE_BYTES = 1 << 20
NO_GRANULE, NO_MEMORY = 2**64 - 1, 2**64 - 2
NOWHERE = 2**62  # past all chunks, and so far from the end of 64 bits that offsets may be added
PROTOTYPES: Prototypes = {  # csrc/ckptkit/ckptkit.h explains them
    "ck_xxh3_64": (UINT64, POINTER, UINT64, INT, POINTER),
    "ck_best_simd": (INT,),
    "ck_checksums": (INT, POINTER, UINT64, POINTER),
    "ck_copy_many": (INT, POINTER, UINT64),
    "ck_unread": (UINT64,),
    "ck_add_sums": (None, POINTER, POINTER, UINT64, UINT64, INT),
    "ck_place": (UINT64, POINTER, UINT64, UINT64, POINTER, UINT64, POINTER, POINTER, POINTER),
    "ck_writer_open": (INT, INT, UINT64, INT, POINTER),
    "ck_writer_sum": (None, POINTER, POINTER),
    "ck_writer_write": (INT, POINTER, UINT64, POINTER, UINT64, POINTER, INT),
    "ck_writer_end": (INT, POINTER, INT),
    "ck_reader_open": (INT, TEXT, INT, INT, INT, POINTER, POINTER),
    "ck_reader_num_differed": (UINT64, POINTER),
    "ck_reader_read": (INT, POINTER, UINT64, POINTER, UINT64, POINTER, POINTER, POINTER, INT, POINTER, POINTER),
    "ck_reader_close": (None, POINTER),
}
Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Columns = npt.NDArray[np.uint64]


class DamagedGranule(CheckFailed):
    """A granule's bytes do not have the checksum that was recorded for them; `tensors` are those it holds parts of."""

    def __init__(self, file: str, granule: int, tensors: tuple[str, ...] = ()) -> None:
        place = f"between bytes {granule * GRANULE_BYTES} and {(granule + 1) * GRANULE_BYTES}"
        held = f", where {shown_names(tensors)} is stored" if tensors else ""
        super().__init__(f"{file} is damaged {place}{held} (granule {granule})")
        self.file = file
        self.granule = granule
        self.tensors = tensors

    def __reduce__(self) -> tuple[object, ...]:
        return (DamagedGranule, (self.file, self.granule, self.tensors))


def shown_names(tensors: Sequence[str], most: int = 8) -> str:
    """Tensor names for a message, the first few and the number of the others."""
    more = f" and {len(tensors) - most} more" if len(tensors) > most else ""
    return ", ".join(tensors[:most]) + more


def num_granules(size_bytes: int) -> int:
    """How many granules a file of this size has."""
    return -(-size_bytes // GRANULE_BYTES)


def xxh3_64(data: Buffer) -> int:
    """XXH3-64 with seed 0 of a contiguous buffer."""
    address, size = span(data)
    return int(library().ck_xxh3_64(address, size, -1, None))


def checksums(data: Buffer) -> Columns:
    """Return the checksum of each granule of a contiguous buffer that begins at a granule."""
    address, size = span(data)
    found = np.empty(num_granules(size), np.uint64)
    _check_read(library().ck_checksums(address, size, found.ctypes.data))
    return found


def copy_many(copies: npt.ArrayLike) -> None:
    """Copy memory: each row is source address, target address, number of bytes.

    StorageError if a source is a mapped file that can no longer be read.
    """
    rows = _rows(copies, 3)
    _check_read(library().ck_copy_many(rows.ctypes.data, len(rows)))


class SumPlaces(NamedTuple):
    """Where ranges that are read begin among chunks, whose sums they are added to.

    `chunks` is the address of the `ck_chunks`, and `places` has an offset for each range; NOWHERE adds nothing.
    """

    chunks: int
    places: Columns

    def take(self, rows: npt.NDArray[np.integer | np.bool_] | slice) -> "SumPlaces":
        """Return those of some ranges."""
        return SumPlaces(self.chunks, self.places[rows])


def place(
    data: Buffer, offset_bytes: int, ranges: npt.ArrayLike, expected: Columns | None, sums: SumPlaces | None = None
) -> int | None:
    """Verify the bytes of a file from a granule's begin, and copy out what ranges want of them.

    `ranges` are rows of file offset, bytes, target address, sorted by offset; `expected` are the checksums of these
    granules, None copies unverified. Return the first damaged granule of the file, of which nothing was copied. What
    was copied is added to `sums`, if there are any.
    """
    address, size = span(data)
    rows = _rows(ranges, 3)
    assert expected is None or len(expected) == num_granules(size), "one checksum a granule"
    checks = None if expected is None else np.ascontiguousarray(expected, np.uint64)
    damaged = library().ck_place(
        address, offset_bytes, size, rows.ctypes.data, len(rows), _address(checks), *_addresses(sums, len(rows))
    )
    if damaged == NO_MEMORY:
        raise MemoryError(f"no memory to place {len(rows)} ranges")
    return None if damaged == NO_GRANULE else int(damaged)


def return_large_frees() -> None:
    """Give freed buffers of 1 MiB and more back to the system at once, for the whole process; glibc only.

    Object storage clients take and free many; kept in the heaps of many threads they can double a program's memory.
    """
    _mallopt(-3, GRANULE_BYTES)  # M_MMAP_THRESHOLD


def keep_small_frees() -> None:
    """Keep up to 8 MiB at the end of each thread's heap for what is allocated next, for the whole process; glibc only.

    After `return_large_frees` a heap shrinks by whatever is freed at its end: small arrays of a long calculation then
    come and go page by page, which takes three times as long.
    """
    _mallopt(-1, 8 * GRANULE_BYTES)  # M_TRIM_THRESHOLD


def _mallopt(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


class BlockWriter(Making):
    """One new file of known size, written in any order of whole granules; use it in a `with`.

    Opening reserves the disk space, so a full disk is an OSError at once. Leaving the `with` normally makes the file
    durable and puts it in place; leaving it by an exception removes it.
    """

    def __init__(self, file: NewFile, size_bytes: int, *, direct: bool = True) -> None:
        self.path, self._file = file.path, file
        self._handle = ctypes.c_void_p()
        try:
            code = library().ck_writer_open(file.descriptor, size_bytes, direct, ctypes.byref(self._handle))
            _check(code, self.path)
        except BaseException:
            file.close()
            raise

    def sum_into(self, chunks: int) -> None:
        """Have each later write add its bytes to sums, those of the `ck_chunks` at an address; they are kept there."""
        library().ck_writer_sum(self._handle, chunks)

    def write(self, offset_bytes: int, segments: npt.ArrayLike, *, num_threads: int = 2) -> Columns:
        """Write segments (rows of address, bytes) one after the other from a granule's begin; give their checksums.

        They must end at a granule's end or at the file's.
        """
        rows = _rows(segments, 2)
        found = np.empty(num_granules(int(rows[:, 1].sum())), np.uint64)
        code = library().ck_writer_write(
            self._handle, offset_bytes, rows.ctypes.data, len(rows), found.ctypes.data, num_threads
        )
        _check(code, self.path)
        return found

    def close(self) -> None:
        """Put the file in place once its content reached the disk, and make its name durable too."""
        with self._file:
            self._end(complete=True)
            self._file.publish()

    def abort(self) -> None:
        """Remove the file."""
        with self._file:
            self._end(complete=False)

    def _end(self, *, complete: bool) -> None:
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _check(library().ck_writer_end(handle, complete), self.path)


class BlockReader(Closing):
    """One file open for verified reads; ranges read in ascending order over several calls read each granule once.

    Several threads may read. `expected` are the recorded checksums (None reads unverified). With `from_cache` the disk
    is not read for what the page cache has whole granules of. Raises StorageError where the file's size is not the
    recorded one.
    """

    def __init__(
        self, path: str | os.PathLike[str], size_bytes: int, expected: Columns | None, *, direct: bool = True,
        from_cache: bool = False, again: bool = False,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self.size_bytes = size_bytes
        self.bytes_read = 0
        self._guard = threading.Lock()  # of what follows, and of bytes_read
        self._num_reading, self._is_closed = 0, False
        self._expected = None if expected is None else np.ascontiguousarray(expected, np.uint64)
        assert self._expected is None or len(self._expected) == num_granules(size_bytes), "one checksum a granule"
        self._handle = ctypes.c_void_p()
        num_stored = ctypes.c_uint64()
        modes, handle = (int(direct), int(from_cache), int(again)), ctypes.byref(self._handle)
        code = library().ck_reader_open(os.fsencode(path), *modes, ctypes.byref(num_stored), handle)
        _check(code, self.path)
        if num_stored.value != size_bytes:
            self.close()
            raise StorageError(f"{path} has {num_stored.value} bytes, its checkpoint says {size_bytes}")

    def read(self, ranges: npt.ArrayLike, *, num_threads: int = 2, sums: SumPlaces | None = None) -> None:
        """Fill memory from ranges (rows of file offset, bytes, target address) that are sorted by offset.

        What is read is added to `sums` in the same pass, if there are any. Raises DamagedGranule before anything of a
        damaged granule is handed out.
        """
        rows = _rows(ranges, 3)
        bad, read = ctypes.c_uint64(), ctypes.c_uint64()
        with self._guard:
            if self._is_closed:
                raise StorageError(f"{self.path} is closed, and was to be read")
            self._num_reading += 1
        try:
            code = library().ck_reader_read(
                self._handle, self.size_bytes, rows.ctypes.data, len(rows),
                _address(self._expected), *_addresses(sums, len(rows)), num_threads, ctypes.byref(bad),
                ctypes.byref(read),
            )  # fmt: skip
        finally:
            with self._guard:
                self._num_reading -= 1
                self.bytes_read += read.value
                self._close_unused()
        if code == -errno.EBADMSG:
            raise DamagedGranule(str(self.path), bad.value)
        _check(code, self.path)

    @property
    def num_differed(self) -> int:
        """How many granules were right at a second look only, so far; 0 once the file is closed."""
        with self._guard:
            return int(library().ck_reader_num_differed(self._handle)) if self._handle else 0

    def close(self) -> None:
        """Close the file, when the reads of other threads that run are done; there are no later ones."""
        with self._guard:
            self._is_closed = True
            self._close_unused()

    def _close_unused(self) -> None:
        if self._is_closed and not self._num_reading and self._handle:
            handle, self._handle = self._handle, ctypes.c_void_p()
            library().ck_reader_close(handle)


def _check_read(code: int) -> None:
    """Raise that memory which native code read is a mapped file which was cut short, or is on a disk that failed."""
    if code == -errno.EFAULT:
        raise unreadable(int(library().ck_unread()))


def _check(code: int, path: Path) -> None:
    _check_read(code)
    if code < 0:
        raise OSError(-code, os.strerror(-code), str(path))


def _address(columns: Columns | None) -> int | None:
    return None if columns is None else columns.ctypes.data


def _addresses(sums: SumPlaces | None, num_ranges: int) -> tuple[int | None, int | None]:
    if sums is None:
        return None, None
    assert sums.places.dtype == np.uint64, "places are as wide as offsets"
    assert sums.places.flags.c_contiguous, "places one after the other"
    assert len(sums.places) == num_ranges, "a place a range"
    return sums.chunks, sums.places.ctypes.data


def _rows(values: npt.ArrayLike, width: int) -> Columns:
    rows = np.ascontiguousarray(values, np.uint64)
    return rows.reshape(-1, width)


def span(data: Buffer) -> tuple[int, int]:
    """Address and size of a buffer; the caller keeps it alive."""
    view = memoryview(data)  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers
    assert view.c_contiguous, "a contiguous buffer"
    array = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    return array.ctypes.data, view.nbytes


@cache
def library() -> ctypes.CDLL:
    """Return the native library, its functions typed."""
    return bind(load_library("ckptkit"), PROTOTYPES)
