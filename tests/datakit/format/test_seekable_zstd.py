"""Seekable zstd: any content comes back, whole and in ranges, by us and by any zstd reader; any damage is told."""

import io
import itertools
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datakit.format.seekable_zstd import MAX_FRAME_BYTES, SeekableReader, pack
from threefold.errors import CheckFailed, UserError

FRAME = 64


def packed(content: bytes, frame_bytes: int = FRAME, level: int = 3) -> bytes:
    return b"".join(pack([content], level, frame_bytes))


def open_reader(file: bytes) -> SeekableReader:
    def read(start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(file)
        return file[start:stop]

    return SeekableReader("x.zst", len(file), read)


def content_of(reader: SeekableReader, memory: memoryview | None = None) -> bytes:
    def unpack(number: int, packed: memoryview) -> bytes:
        return reader.unpack(number, packed) if memory is None else bytes(reader.unpack_into(memory, number, packed))

    return b"".join(unpack(number, frame) for number, frame in reader.packed_frames())


def table(entries: list[tuple[int, int, int]], *, flags: int = 0x80) -> bytes:
    rows = b"".join(struct.pack("<III", *entry) for entry in entries)
    footer = struct.pack("<IBI", len(entries), flags, 0x8F92EAB1)
    return struct.pack("<II", 0x184D2A5E, len(rows) + len(footer)) + rows + footer


around_frames = st.builds(lambda frames, more: max(frames * FRAME + more, 0), st.integers(0, 9), st.integers(-2, 2))
contents = st.one_of(st.binary(max_size=5 * FRAME), around_frames.map(lambda size: bytes(i % 251 for i in range(size))))


@given(content=contents, data=st.data())
def test_content_and_all_its_ranges_come_back(content: bytes, data: st.DataObject) -> None:
    file = packed(content)
    reader = open_reader(file)
    assert reader.size_bytes == len(content)
    assert reader.num_frames == -(-len(content) // FRAME)
    assert content_of(reader) == content_of(reader, memoryview(bytearray(FRAME))) == content
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    assert reader.read(start, stop) == content[start:stop]


@given(content=contents, cuts=st.lists(st.integers(0, 5 * FRAME)))
def test_the_cut_of_the_blocks_changes_nothing(content: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    blocks = [content[start:stop] for start, stop in itertools.pairwise(edges)]
    assert b"".join(pack(blocks, 3, FRAME)) == packed(content)


@given(content=contents, level=st.integers(1, 19))
def test_a_plain_zstd_reader_gives_the_content(content: bytes, level: int) -> None:
    stream = io.BytesIO(packed(content, level=level))
    with zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True) as reader:
        assert reader.read() == content


@pytest.mark.skipif(shutil.which("zstd") is None, reason="the program zstd is not installed")
@pytest.mark.parametrize("size", [0, 1, 3 * FRAME, 1000])
def test_the_zstd_program_gives_the_content(tmp_path: Path, size: int) -> None:
    content = bytes(i % 7 for i in range(size))
    (tmp_path / "x.zst").write_bytes(packed(content))
    assert subprocess.run(["zstd", "-dc", tmp_path / "x.zst"], capture_output=True, check=True).stdout == content


def test_every_field_of_the_table() -> None:
    content = bytes(range(100)) * 3
    file = packed(content, frame_bytes=200)
    frames = [content[:200], content[200:]]
    *_, num_frames = struct.unpack_from("<I", file, len(file) - 9)
    assert num_frames == 2
    at = len(file) - 9 - 2 * 12
    assert struct.unpack_from("<II", file, at - 8) == (0x184D2A5E, 2 * 12 + 9)
    begin = 0
    for number, frame in enumerate(frames):
        packed_bytes, size_bytes, check = struct.unpack_from("<III", file, at + 12 * number)
        assert zstandard.ZstdDecompressor().decompress(file[begin : begin + packed_bytes]) == frame
        assert (size_bytes, check) == (len(frame), xxhash.xxh64_intdigest(frame) & 0xFFFFFFFF)
        assert file[begin + packed_bytes - 4 : begin + packed_bytes] == struct.pack("<I", check)  # zstd's own checksum
        begin += packed_bytes
    assert begin == at - 8
    assert file[-5:] == b"\x80" + struct.pack("<I", 0x8F92EAB1)


def test_a_range_reads_only_its_frames() -> None:
    file = packed(bytes(1000 * FRAME))
    requests: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> bytes:
        requests.append((start, stop))
        return file[start:stop]

    reader = SeekableReader("x", len(file), read, read_bytes=1)
    requests.clear()
    assert reader.read(FRAME - 1, 2 * FRAME + 1) == bytes(FRAME + 2)
    assert len(requests) == 3
    assert requests[0][0] == 0
    assert sum(stop - start for start, stop in requests) < len(file) / 100
    requests.clear()
    assert reader.read(5, 5) == b""
    assert requests == []
    with pytest.raises(IndexError):
        reader.read(0, 1000 * FRAME + 1)


def test_a_table_longer_than_the_first_read_is_read_whole() -> None:
    content = bytes(6000 * FRAME)
    reader = open_reader(packed(content))
    assert len(reader.table) > 1 << 16
    assert content_of(reader) == content


def test_foreign_frames_of_any_size_are_read() -> None:
    frames = [b"a" * 10, b"b" * 1000, b"c"]
    made = [zstandard.ZstdCompressor().compress(frame) for frame in frames]
    rows = [(len(z), len(f), xxhash.xxh64_intdigest(f) & 0xFFFFFFFF) for z, f in zip(made, frames)]
    reader = open_reader(b"".join(made) + table(rows, flags=0x83))  # the two lowest bits mean nothing
    assert content_of(reader) == b"".join(frames)
    assert reader.read(9, 12) == b"abb"


FRAME_OF_2 = zstandard.ZstdCompressor().compress(b"ab")
CHECK = xxhash.xxh64_intdigest(b"ab") & 0xFFFFFFFF
SIZE = len(FRAME_OF_2)
BOMB = zstandard.ZstdCompressor().compress(bytes(MAX_FRAME_BYTES))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(b"ab")
FAULTS = {
    "empty": (b"", "has 0 bytes, too few"),
    "too short": (b"x" * 16, "has 16 bytes, too few"),
    "no table": (FRAME_OF_2 * 3, "no table of frames"),
    "no checksums": (FRAME_OF_2 + table([(SIZE, 2, CHECK)], flags=0), "flags 0x00"),
    "reserved flags": (FRAME_OF_2 + table([(SIZE, 2, CHECK)], flags=0x84), "flags 0x84"),
    "more frames than bytes": (table([])[:8] + struct.pack("<IBI", 9, 0x80, 0x8F92EAB1), "claims 9 frames"),
    "too many frames": (table([])[:8] + struct.pack("<IBI", 2**32 - 1, 0x80, 0x8F92EAB1), "claims 4294967295 frames"),
    "fewer frames": (table([(1, 1, 1)])[:-9] + struct.pack("<IBI", 0, 0x80, 0x8F92EAB1), "does not begin"),
    "empty frame": (FRAME_OF_2 + table([(SIZE, 0, CHECK)]), "has frame 0 of"),
    "huge frame": (FRAME_OF_2 + table([(SIZE, MAX_FRAME_BYTES + 1, CHECK)]), "has frame 0 of"),
    "inflated frame": (FRAME_OF_2 + table([(SIZE, 2, CHECK), (5000, 2, CHECK)]), "has frame 1 of 5000 bytes for 2"),
    "a frame too many": (FRAME_OF_2 + table([(SIZE, 2, CHECK)] * 2), "its frames end at byte"),
    "bytes between": (FRAME_OF_2 + b"x" + table([(SIZE, 2, CHECK)]), "its frames end at byte"),
    "wrong size": (FRAME_OF_2 + table([(SIZE, 3, CHECK)]), "frame 0 is damaged: it says 2 bytes, the table 3"),
    "wrong checksum": (FRAME_OF_2 + table([(SIZE, 2, CHECK ^ 1)]), "frame 0 is damaged: its checksum"),
    "trailing bytes": (FRAME_OF_2 + b"x" + table([(SIZE + 1, 2, CHECK)]), "frame 0 is damaged: .*unused data"),
    "a bomb": (BOMB + table([(len(BOMB), len(BOMB), CHECK)]), "frame 0 is damaged: it says 67108864 bytes"),
    "no content size": (UNSIZED + table([(len(UNSIZED), 2, CHECK)]), "frame 0 is damaged: it says -1 bytes"),
    "no zstd": (b"x" * 20 + table([(20, 2, CHECK)]), "frame 0 is damaged"),
    "a skippable frame": (b"\x5e\x2a\x4d\x18" + bytes(4) + table([(8, 2, CHECK)]), "frame 0 is damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_told(fault: str) -> None:
    file, message = FAULTS[fault]
    with pytest.raises(CheckFailed, match=f"^x.zst: .*{message}"):
        content_of(open_reader(file))
    if fault != "trailing bytes":
        with pytest.raises(CheckFailed, match=f"^x.zst: .*{message}"):
            content_of(open_reader(file), memoryview(bytearray(FRAME)))


SOUND = packed(bytes(i * i % 256 for i in range(10 * FRAME)))


@given(data=st.data())
def test_no_damage_crashes_or_passes_as_other_content(data: st.DataObject) -> None:
    """Bit flips, cuts and insertions give the content or CheckFailed; the seek table is hit as often as the frames."""
    file = bytearray(SOUND)
    near_end = st.integers(len(SOUND) - 200, len(SOUND) - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        at = min(data.draw(st.one_of(st.integers(0, len(SOUND) - 1), near_end)), max(len(file) - 1, 0))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "drop"])):
            case "flip" if file:
                file[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del file[at:]
            case "insert":
                file[at:at] = data.draw(st.binary(max_size=20))
            case "drop":
                del file[at : at + data.draw(st.integers(1, 20))]
    try:
        found = content_of(open_reader(bytes(file)), memoryview(bytearray(FRAME)) if data.draw(st.booleans()) else None)
    except CheckFailed as error:
        said = error.message
    else:
        assert found == content_of(open_reader(SOUND))
        return
    assert said.startswith("x.zst: ")


@given(file=st.binary(max_size=300), num_frames=st.integers(0, 2**32 - 1))
def test_random_bytes_are_no_seekable_file(file: bytes, num_frames: int) -> None:
    with pytest.raises(CheckFailed, match=r"^x\.zst: "):
        content_of(open_reader(file + b"x" + struct.pack("<IBI", num_frames, 0x80, 0x8F92EAB1)))


def test_more_frames_than_a_reader_takes_are_not_written() -> None:
    made = b"".join(pack([bytes(3 * FRAME)], 3, FRAME, max_frames=3))
    assert content_of(open_reader(made)) == bytes(3 * FRAME)
    with pytest.raises(UserError, match="more than 3 frames"):
        list(pack([bytes(3 * FRAME + 1)], 3, FRAME, max_frames=3))
