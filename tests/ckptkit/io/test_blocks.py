"""Block I/O: every checksum agrees with the xxhash package, every byte returns, every fault is reported."""

import ctypes
import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.io.blocks import (
    GRANULE_BYTES,
    BlockReader,
    BlockWriter,
    DamagedGranule,
    checksums,
    copy_many,
    num_granules,
    place,
    xxh3_64,
)
from tests.ckptkit.support.saves import ROOT, strace
from threefold.errors import StorageError
from threefold.native import load_library
from threefold.storage.new_file import NewFile

RANDOM = np.random.default_rng(0).integers(0, 256, 30 << 20, dtype=np.uint8)


def expected_checksums(data: bytes) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[i : i + GRANULE_BYTES]) for i in range(0, len(data), GRANULE_BYTES)]


def write_file(path: Path, segments: list[tuple[int, int]], *, direct: bool = True, num_threads: int = 2) -> np.ndarray:
    """Write one durable file; the checksum of each granule."""
    file = NewFile(path.parent, path.name)
    with BlockWriter(file, sum(size for _, size in segments), direct=direct) as writer:
        return writer.write(0, segments, num_threads=num_threads)


def segments_of(*arrays: np.ndarray) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.nbytes) for array in arrays]


@pytest.fixture(params=["direct", "buffered", "tmpfs"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """A folder, and whether to ask for O_DIRECT; tmpfs refuses it on older kernels, so both ways are exercised."""
    if request.param != "tmpfs":
        yield tmp_path, request.param == "direct"
        return
    folder = Path("/dev/shm") / f"blocks-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder, True
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.parametrize("simd", range(load_library("ckptkit").ck_best_simd() + 1))
def test_checksum_of_every_length_in_every_instruction_set(simd: int) -> None:
    function = load_library("ckptkit").ck_xxh3_64
    pointer = ctypes.c_void_p
    function.restype, function.argtypes = ctypes.c_uint64, [pointer, ctypes.c_uint64, ctypes.c_int, pointer]
    memory = np.empty((1 << 20) + 64, np.uint8)
    copy = memory[-memory.ctypes.data % 64 :]
    for length in [*range(600), *range(1000, 1100), 2047, 2048, 2049, 4096, 65_537, 1 << 20]:
        for start in (0, 3):
            data = RANDOM[start : start + length]
            expected = xxhash.xxh3_64_intdigest(data)
            assert function(data.ctypes.data, length, simd, None) == expected, (simd, length, start)
            copy[:length] = ~data
            assert function(data.ctypes.data, length, simd, copy.ctypes.data) == expected, (simd, length, start)
            assert (copy[:length] == data).all()


@given(st.binary(max_size=3000))
def test_checksum_of_any_bytes(data: bytes) -> None:
    assert xxh3_64(data) == xxhash.xxh3_64_intdigest(data)
    assert xxh3_64(memoryview(data)) == xxh3_64(np.frombuffer(data, np.uint8)) == xxh3_64(data)


def test_checksums_of_a_buffer() -> None:
    data = RANDOM[: 3 * GRANULE_BYTES + 17]
    assert checksums(data).tolist() == expected_checksums(data.tobytes())
    assert len(checksums(b"")) == 0


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, GRANULE_BYTES, GRANULE_BYTES + 1, (8 << 20) + 4096, (17 << 20) + 5])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_file_is_its_segments(where: tuple[Path, bool], size: int, num_threads: int) -> None:
    folder, direct = where
    whole = RANDOM[1 : 1 + size]
    cuts = sorted({0, size // 7, size // 2, size})
    arrays = [whole[a:b] for a, b in pairwise(cuts)]
    found = write_file(folder / "f", segments_of(*arrays), direct=direct, num_threads=num_threads)
    assert (folder / "f").read_bytes() == whole.tobytes()
    assert found.tolist() == expected_checksums(whole.tobytes())


def test_page_aligned_memory_is_written_whole(where: tuple[Path, bool]) -> None:
    folder, direct = where
    memory = np.frombuffer(ctypes.create_string_buffer((9 << 20) + 8192), np.uint8)
    skip = -memory.ctypes.data % 4096
    for size in (9 << 20, (9 << 20) + 100):
        aligned = memory[skip : skip + size]
        aligned[:] = RANDOM[:size]
        found = write_file(folder / "f", segments_of(aligned), direct=direct)
        assert (folder / "f").read_bytes() == aligned.tobytes()
        assert found.tolist() == expected_checksums(aligned.tobytes())


def test_a_file_written_in_windows_in_any_order(where: tuple[Path, bool]) -> None:
    folder, direct = where
    size = 5 * GRANULE_BYTES + 123
    data = RANDOM[:size]
    windows = [(3 * GRANULE_BYTES, size), (0, GRANULE_BYTES), (GRANULE_BYTES, 3 * GRANULE_BYTES)]
    sums = np.zeros(num_granules(size), np.uint64)
    with BlockWriter(NewFile(folder, "f"), size, direct=direct) as writer:
        for start, stop in windows:
            first = start // GRANULE_BYTES
            values = writer.write(start, segments_of(data[start:stop]))
            sums[first : first + len(values)] = values
    assert (folder / "f").read_bytes() == data.tobytes()
    assert sums.tolist() == expected_checksums(data.tobytes())


def test_a_file_that_is_there_is_replaced(where: tuple[Path, bool]) -> None:
    folder, direct = where
    for old in (0, 100, 5000, GRANULE_BYTES, 2 * GRANULE_BYTES + 1):
        (folder / "f").write_bytes(RANDOM[-old:].tobytes() if old else b"")
        for size in (0, 5000, GRANULE_BYTES + 3):
            write_file(folder / "f", segments_of(RANDOM[:size]), direct=direct)
            assert (folder / "f").read_bytes() == RANDOM[:size].tobytes()


def test_writers_of_the_same_file_take_nothing_from_each_other(where: tuple[Path, bool]) -> None:
    folder, direct = where
    data, other = RANDOM[: GRANULE_BYTES + 77], RANDOM[GRANULE_BYTES + 76 :: -1].copy()
    with BlockWriter(NewFile(folder, "f"), len(data), direct=direct) as writer:
        writer.write(0, segments_of(data[:GRANULE_BYTES]))
        BlockWriter(NewFile(folder, "f"), len(data), direct=direct).abort()
        assert not (folder / "f").exists(), "it has its name once it is whole"
        writer.write(GRANULE_BYTES, segments_of(data[GRANULE_BYTES:]))
    late = BlockWriter(NewFile(folder, "f"), len(data), direct=direct)
    late.write(0, segments_of(other))
    assert (folder / "f").read_bytes() == data.tobytes()
    late.abort()
    assert (folder / "f").read_bytes() == data.tobytes()
    assert [path.name for path in folder.iterdir()] == ["f"], "what was aborted is gone"


def test_windows_must_be_whole_granules(tmp_path: Path) -> None:
    with BlockWriter(NewFile(tmp_path, "f"), 2 * GRANULE_BYTES) as writer:
        for offset, size in [(1, 10), (0, 10), (GRANULE_BYTES, GRANULE_BYTES + 1)]:
            with pytest.raises(OSError, match="Invalid argument"):
                writer.write(offset, segments_of(RANDOM[:size]))


@given(data=st.data(), direct=st.booleans(), from_cache=st.booleans(), num_threads=st.integers(1, 3))
def test_any_ranges_return_their_bytes(
    data: st.DataObject, direct: bool, from_cache: bool, num_threads: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "ranges"
    size = data.draw(st.sampled_from([1, 5000, GRANULE_BYTES, 3 * GRANULE_BYTES + 77, 11 * GRANULE_BYTES + 4096]))
    content = RANDOM[:size]
    found = write_file(path, segments_of(content))
    if from_cache:  # a part of it is in the page cache then
        with path.open("rb") as file:
            file.seek(data.draw(st.integers(0, size)))
            file.read(data.draw(st.integers(0, size)))
    with BlockReader(path, size, found, direct=direct, from_cache=from_cache) as reader:
        for _ in range(2):
            starts = sorted(data.draw(st.lists(st.integers(0, size), max_size=12)))
            lengths = [data.draw(st.integers(0, min(size - start, 2 << 20))) for start in starts]
            targets = [np.zeros(length, np.uint8) for length in lengths]
            reader.read(
                [(a, n, t.ctypes.data) for a, n, t in zip(starts, lengths, targets, strict=True)],
                num_threads=num_threads,
            )
            for start, length, target in zip(starts, lengths, targets, strict=True):
                assert np.array_equal(target, content[start : start + length])


def test_ascending_reads_read_each_granule_once(tmp_path: Path) -> None:
    size = 4 * GRANULE_BYTES + 999
    found = write_file(tmp_path / "f", segments_of(RANDOM[:size]))
    target = np.zeros(size, np.uint8)
    with BlockReader(tmp_path / "f", size, found) as reader:
        for start in range(0, size, 300_000):
            length = min(300_000, size - start)
            reader.read([(start, length, target.ctypes.data + start)])
        assert reader.bytes_read == size
    assert np.array_equal(target, RANDOM[:size])


def disk_bytes() -> int:
    """The bytes that this process had the system read from disks so far."""
    return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])


def test_what_the_page_cache_has_is_not_read_from_the_disk(tmp_path: Path) -> None:
    size = 20 * GRANULE_BYTES + 999
    found, target = write_file(tmp_path / "f", segments_of(RANDOM[:size])), np.zeros(size, np.uint8)

    def disk_bytes_of_a_read(*, from_cache: bool) -> int:
        assert (tmp_path / "f").read_bytes() == RANDOM[:size].tobytes()  # so that the cache has it
        with BlockReader(tmp_path / "f", size, found, from_cache=from_cache) as reader:
            before = disk_bytes()
            reader.read([(0, size, target.ctypes.data)])
        return disk_bytes() - before if np.array_equal(target, RANDOM[:size]) else -1

    assert disk_bytes_of_a_read(from_cache=False) in (0, size // 4096 * 4096 + 4096), "0 if the file system has no disk"
    # a system that takes memory back may drop pages at any moment, but not at each of ten
    assert any(disk_bytes_of_a_read(from_cache=True) == 0 for _ in range(10))


@pytest.mark.parametrize("from_cache", [True, False])
def test_one_flipped_bit_is_found_and_its_granule_named(where: tuple[Path, bool], from_cache: bool) -> None:
    folder, direct = where
    size = 3 * GRANULE_BYTES + 10
    path = folder / "f"
    found = write_file(path, segments_of(RANDOM[:size]))
    with path.open("r+b") as file:
        file.seek(2 * GRANULE_BYTES + 5)
        file.write(bytes([int(RANDOM[2 * GRANULE_BYTES + 5]) ^ 1]))
    target = np.zeros(size, np.uint8)
    with BlockReader(path, size, found, direct=direct, from_cache=from_cache) as reader:
        reader.read([(0, 2 * GRANULE_BYTES, target.ctypes.data)])
        with pytest.raises(DamagedGranule) as caught:
            reader.read([(2 * GRANULE_BYTES + 100, 1, target.ctypes.data)])
        assert caught.value.granule == 2
        assert target[0] == RANDOM[0], "nothing of a damaged granule is handed out"


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    found = write_file(tmp_path / "f", segments_of(RANDOM[:5000]))
    with (tmp_path / "f").open("ab") as file:
        file.write(b"x")
    with pytest.raises(StorageError, match="has 5001 bytes, its checkpoint says 5000"):
        BlockReader(tmp_path / "f", 5000, found)


def test_a_file_truncated_while_open_is_an_error(tmp_path: Path) -> None:
    size = 2 * GRANULE_BYTES
    found = write_file(tmp_path / "f", segments_of(RANDOM[:size]))
    with BlockReader(tmp_path / "f", size, found) as reader:
        os.truncate(tmp_path / "f", GRANULE_BYTES)
        target = np.zeros(10, np.uint8)
        with pytest.raises(OSError) as caught:
            reader.read([(GRANULE_BYTES, 10, target.ctypes.data)])
    assert caught.value.errno == errno.ENODATA


def test_unsorted_or_outside_ranges_are_refused(tmp_path: Path) -> None:
    found = write_file(tmp_path / "f", segments_of(RANDOM[:5000]))
    target = np.zeros(10, np.uint8).ctypes.data
    with BlockReader(tmp_path / "f", 5000, found) as reader:
        for ranges in ([(10, 1, target), (0, 1, target)], [(4999, 2, target)], [(2**64 - 1, 2, target)]):
            with pytest.raises(OSError, match="Invalid argument"):
                reader.read(ranges)


def test_missing_places_are_reported_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        BlockReader(tmp_path / "nowhere", 1, None)


def test_a_full_disk_is_reported_at_open(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small tmpfs")
    try:
        with pytest.raises(OSError) as caught:
            write_file(tmp_path / "f", segments_of(RANDOM[: 8 << 20]))
        assert caught.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_calls_that_a_signal_interrupts_are_made_again(tmp_path: Path) -> None:
    program = (
        "import sys; import numpy as np; from ckptkit.io.blocks import *; from pathlib import Path;"
        "from threefold.storage import new_file;"
        "new_file.temporary_name = lambda name: '.f.tmp';"
        "path, data, back = sys.argv[1], np.arange(9_000_001).astype(np.uint8), np.zeros(9_000_001, np.uint8);"
        "writer = BlockWriter(new_file.NewFile(Path(path).parent, 'f'), len(data));"
        "found = writer.write(0, [(data.ctypes.data, len(data))]); writer.close();"
        "reader = BlockReader(path, len(data), found);"
        "reader.read([(0, len(back), back.ctypes.data)]); assert (data == back).all(); print('same')"
    )
    path, log = tmp_path / "f", tmp_path / "log"
    calls = ("openat", "fallocate", "pwrite64", "fsync", "close", "pread64")
    command = strace(*(f"{call}:error=EINTR:when=1" for call in calls))
    command[command.index(os.devnull)] = str(log)
    command += ["-P", str(path), "-P", str(tmp_path / ".f.tmp"), sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "same\n", done.stderr
    # a call has two lines where another thread made one meanwhile, `pread64(... <unfinished` and `... pread64 resumed>`
    interrupted = set(re.findall(r"(\w+)(?:\(| resumed>).*\(INJECTED\)", log.read_text()))
    assert set(calls) <= interrupted


def test_copies() -> None:
    target = np.zeros(10, np.uint8)
    base = RANDOM.ctypes.data
    copy_many([(base + 5, target.ctypes.data, 3), (base, target.ctypes.data + 7, 3)])
    assert target.tolist() == [*RANDOM[5:8].tolist(), 0, 0, 0, 0, *RANDOM[:3].tolist()]


@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 3 * GRANULE_BYTES), st.integers(0, 2 * GRANULE_BYTES)), max_size=6),
    st.integers(0, 200),
)
def test_what_ranges_want_of_a_buffer_goes_there(first: int, byte_ranges: list[tuple[int, int]], shift: int) -> None:
    """Ranges of any place and size, into memory of any alignment; those outside the buffer get nothing."""
    content = np.resize(RANDOM, 3 * GRANULE_BYTES + 77)
    start = first * GRANULE_BYTES
    data = content[start:]
    ranges = sorted((offset, min(size, len(content) - offset)) for offset, size in byte_ranges)
    targets = [np.zeros(size + shift, np.uint8)[shift:] for _, size in ranges]
    rows = [(offset, size, target.ctypes.data) for (offset, size), target in zip(ranges, targets, strict=True)]
    assert place(data, start, np.array(rows, np.uint64).reshape(-1, 3), checksums(data)) is None
    for (offset, size), target in zip(ranges, targets, strict=True):
        expected = content[offset : offset + size].copy()
        expected[: max(min(start - offset, size), 0)] = 0
        assert np.array_equal(target, expected)


def test_nothing_of_a_damaged_granule_is_copied() -> None:
    content = np.resize(RANDOM, 3 * GRANULE_BYTES).copy()
    expected = checksums(content)
    content[GRANULE_BYTES + 5] ^= 16
    target = np.zeros_like(content)
    rows = [(0, len(content), target.ctypes.data)]
    assert place(content, 4 * GRANULE_BYTES, [(4 * GRANULE_BYTES, *rows[0][1:])], expected) == 5
    assert np.array_equal(target[:GRANULE_BYTES], content[:GRANULE_BYTES])
    assert not target[GRANULE_BYTES:].any()
    assert place(content, 0, rows, None) is None
    assert np.array_equal(target, content)
