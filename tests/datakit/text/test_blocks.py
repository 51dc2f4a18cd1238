"""Blocks: every compression, in several frames, whole or damaged, with bounded memory and the digest of the file."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
import zstandard

from datakit.text.blocks import digest_of, read_blocks
from datakit.text.inputs import FileSlice, find_inputs
from threefold.errors import UserError

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress, ".xz": lzma.compress,
    ".bz2": bz2.compress,
}  # fmt: skip


def slice_of(path: Path) -> FileSlice:
    [file] = find_inputs([str(path)])
    return FileSlice(file, 0, file.size_bytes)


@pytest.mark.parametrize("suffix", PACKERS)
def test_frames_follow_each_other_and_the_digest_is_the_files(tmp_path: Path, suffix: str) -> None:
    frames = [b"first\n", b"", b"x" * 700_000, b"last\n"]
    path = tmp_path / f"a.TXT{suffix.upper()}"
    padding = b"\0" * 8 if suffix in (".xz", ".gz") else b""
    path.write_bytes(b"".join(PACKERS[suffix](frame) for frame in frames) + padding)
    part, digest = slice_of(path), xxhash.xxh3_64()
    assert b"".join(read_blocks(part, digest)) == b"".join(frames)
    assert digest.hexdigest() == digest_of(part.file, 0, part.stop) == xxhash.xxh3_64_hexdigest(path.read_bytes())


@pytest.mark.parametrize("suffix", [suffix for suffix in PACKERS if suffix])
def test_a_second_frame_cut_short_or_damaged_is_not_passed_over(tmp_path: Path, suffix: str) -> None:
    frame = PACKERS[suffix](bytes(range(256)) * 40)
    path = tmp_path / f"a.txt{suffix}"
    for rest, fault in [(frame[:-9], "truncated|damaged"), (b"junk" + frame, "damaged"), (frame[:3], "truncated")]:
        path.write_bytes(frame + rest)
        with pytest.raises(UserError, match=rf"a\.txt{suffix} is ({fault})"):
            list(read_blocks(slice_of(path)))


@pytest.mark.parametrize("suffix", [".xz", ".bz2"])
def test_what_is_repeated_a_lot_comes_in_small_blocks(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](bytes(6 << 20)))
    assert max(len(block) for block in read_blocks(slice_of(path))) <= 256 << 10
