"""TokenShard: the exact layout, round trips, and refusal of every damaged header."""

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.files.durable import replace_durably, temporary_folder, writing
from datakit.format.shard import DTYPE_CODES, ShardWriter, TokenShard, encode_index
from datakit.store.writer import StoreShardWriter
from threefold.errors import CheckFailed, StorageError


def write(stem: Path, documents: list[list[int]], dtype: str = "uint16") -> TokenShard:
    writer = ShardWriter(stem, dtype)
    for document in documents:
        writer.extend(np.array(document, writer.dtype).tobytes(), [len(document)])
    writer.finish()
    return TokenShard(stem)


@given(
    documents=st.lists(st.lists(st.integers(0, 65000), max_size=20), max_size=20),
    dtype=st.sampled_from(["uint16", "int32"]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str) -> None:
    shard = write(tmp_path_factory.mktemp("s") / "a", documents, dtype)
    assert shard.num_documents == len(documents)
    assert shard.tokens.tolist() == [token for document in documents for token in document]
    assert [shard.document(i).tolist() for i in range(len(documents))] == documents


def test_the_bytes_are_megatrons(tmp_path: Path) -> None:
    write(tmp_path / "a", [[7, 8, 9], [], [1]])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4H", 7, 8, 9, 1)
    assert (tmp_path / "a.idx").read_bytes() == b"".join([
        b"MMIDIDX\x00\x00", struct.pack("<Q", 1), struct.pack("<B", 8), struct.pack("<QQ", 3, 4),
        struct.pack("<3i", 3, 0, 1), struct.pack("<3q", 0, 6, 6), struct.pack("<4q", 0, 1, 2, 3),
    ])  # fmt: skip


def test_documents_of_several_sequences_as_megatron_writes_them(tmp_path: Path) -> None:
    shard = write(tmp_path / "a", [[1, 2], [3], [4, 5, 6]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    boundaries = struct.pack("<3q", 0, 2, 3)  # two documents of two and one sequences
    index[26:34] = struct.pack("<Q", 3)
    (tmp_path / "a.idx").write_bytes(bytes(index[: 34 + 12 * 3]) + boundaries)
    shard = TokenShard(tmp_path / "a")
    assert [shard.document(i).tolist() for i in range(2)] == [[1, 2, 3], [4, 5, 6]]


def test_an_index_with_sequence_modes_opens(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2], [3]])
    with (tmp_path / "a.idx").open("ab") as file:
        file.write(b"\0\0")
    assert TokenShard(tmp_path / "a").document(1).tolist() == [3]


@pytest.mark.parametrize(
    ("at", "value", "fault"),
    [
        (0, b"XXIDIDX\0\0", "is not a Megatron index"),
        (9, struct.pack("<Q", 2), "index version 2"),
        (17, b"\x06", "dtype code 6"),
        (18, struct.pack("<Q", 2**63), "expected for 9223372036854775808 sequences"),
        (18, struct.pack("<Q", 3), "expected for 3 sequences"),
        (26, struct.pack("<Q", 2**64 - 1), "documents"),
        (26, struct.pack("<Q", 0), "documents"),
    ],
)
def test_a_damaged_header_is_refused_before_anything_is_allocated(
    tmp_path: Path, at: int, value: bytes, fault: str
) -> None:
    write(tmp_path / "a", [[1, 2], [3]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[at : at + len(value)] = value
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(CheckFailed, match=fault) as caught:
        TokenShard(tmp_path / "a")
    assert "a.idx" in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 33, 34, 60])
def test_a_truncated_index_is_refused(tmp_path: Path, size: int) -> None:
    write(tmp_path / "a", [[1, 2], [3]])
    (tmp_path / "a.idx").write_bytes((tmp_path / "a.idx").read_bytes()[:size])
    with pytest.raises(CheckFailed, match=r"a\.idx"):
        TokenShard(tmp_path / "a")


@pytest.mark.parametrize("change", [b"", b"\0" * 4, b"\0" * 7, b"\0" * 8])
def test_a_token_file_of_another_size_is_refused(tmp_path: Path, change: bytes) -> None:
    write(tmp_path / "a", [[1, 2], [3]])
    (tmp_path / "a.bin").write_bytes(change)
    with pytest.raises(CheckFailed, match=r"a\.bin has \d bytes"):
        TokenShard(tmp_path / "a")


def test_a_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot read .*a\.idx"):
        TokenShard(tmp_path / "a")


@pytest.mark.parametrize(("column", "value"), [(0, -1), (0, 2**31 - 1), (1, 2**62), (1, -2), (1, 1), (2, 9), (2, -1)])
def test_a_damaged_entry_is_refused_when_its_document_is_read(tmp_path: Path, column: int, value: int) -> None:
    write(tmp_path / "a", [[1, 2], [3], [4]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    at = [34 + 4, 34 + 12 + 8, 34 + 36 + 8][column]  # the second document's entries
    index[at : at + (4 if column == 0 else 8)] = struct.pack("<i" if column == 0 else "<q", value)
    (tmp_path / "a.idx").write_bytes(index)
    shard = TokenShard(tmp_path / "a")
    with pytest.raises(CheckFailed, match=r"a\.idx"):
        shard.document(1)


def test_documents_outside_are_an_index_error(tmp_path: Path) -> None:
    shard = write(tmp_path / "a", [[1]])
    for number in (-1, 1):
        with pytest.raises(IndexError):
            shard.document(number)


@pytest.mark.parametrize("dtype", sorted(DTYPE_CODES))
def test_all_integer_dtypes_of_megatron_open(tmp_path: Path, dtype: str) -> None:
    tokens = np.array([3, 1, 2], dtype)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    (tmp_path / "a.idx").write_bytes(encode_index(np.array([3], np.int32), tokens.dtype))
    assert TokenShard(tmp_path / "a").document(0).tolist() == [3, 1, 2]


def test_a_full_scratch_disk_is_told_from_a_full_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for path, hint in ((tmp_path / "datakit-0" / "a", "TMPDIR"), (tmp_path / "out" / "a", "another --output")):
        with pytest.raises(StorageError, match="No space left") as caught, writing(path):
            raise OSError(28, "No space left on device")
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_file_whose_fsync_failed_is_gone_and_written_anew(
    tmp_path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a shard, and a note; the second try makes others, whose fsync means something."""
    usual, failed, calls = os.fsync, set[int](), list[int]()

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == fails_at:
            failed.add(os.fstat(descriptor).st_ino)
            os.dup(descriptor)  # so that no other file gets its number
            raise OSError(errno.EIO, "Input/output error")
        usual(descriptor)

    def make() -> None:
        writer = StoreShardWriter(tmp_path / "a", "uint16")
        writer.add(b"\1\0", "file", 0, 0)
        writer.finish()
        replace_durably(tmp_path / "note", b"done")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="Input/output error"):
        make()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ([] if fails_at < 4 else ["a.bin", "a.idx", "a.origin"])
    make()
    assert not failed & {path.stat().st_ino for path in tmp_path.iterdir()}


def test_a_full_temporary_folder_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none_usable)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(StorageError, match=rf"no temporary folder takes a file, {tmp_path} neither") as caught:
        temporary_folder()
    assert "export TMPDIR=" in (caught.value.hint or "")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for path, hint in [("store/a.bin", "choose another --output"), ("datakit-0-0123456789abcdef/a.bin", "TMPDIR")]:
        with pytest.raises(StorageError, match=f"{path}: No space left") as caught, writing(tmp_path / path):
            raise full
        assert hint in (caught.value.hint or "")
