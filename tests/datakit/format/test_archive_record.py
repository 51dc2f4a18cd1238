"""ArchiveRecord: comes back as it was; whatever else its file holds is a CheckFailed that names it."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.files.durable import FileDigest
from datakit.format.archive_record import ArchiveRecord
from datakit.format.manifest import content_checksum
from threefold.errors import CheckFailed

RECORD = ArchiveRecord(
    3, 1 << 20, FileDigest.of(b"{}"), {"a.bin.zst": FileDigest.of(b"x"), "b.bin.zst": FileDigest.of(b"")}
)
PLACE = "s3://bucket/a/archive.json"
digests = st.builds(FileDigest, st.integers(0, 2**63 - 1), st.text(max_size=16))


@given(
    record=st.builds(
        ArchiveRecord, st.integers(0, 22), st.integers(1, 64 << 20), digests,
        st.dictionaries(st.text(max_size=9), digests, max_size=4),
    )
)  # fmt: skip
def test_a_record_comes_back(record: ArchiveRecord) -> None:
    assert ArchiveRecord.parse(PLACE, record.encode()) == record
    assert record.packed_bytes == sum(digest.size_bytes for digest in record.files.values())


@given(at=st.integers(0, len(RECORD.encode()) - 1), change=st.integers(1, 255))
def test_no_changed_byte_passes_as_another_record(at: int, change: int) -> None:
    data = bytearray(RECORD.encode())
    data[at] ^= change
    try:
        found = ArchiveRecord.parse(PLACE, bytes(data))
    except CheckFailed as error:
        said = error.message
    else:  # white space may differ
        assert found == RECORD
        return
    assert PLACE in said


@given(data=st.binary(max_size=200))
def test_random_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(CheckFailed, match=PLACE):
        ArchiveRecord.parse(PLACE, data)


CHANGES: dict[str, tuple[Any, str]] = {
    "format": ("threefold-token-store", "it is not an archive's record: format"),
    "version": (2, "has version 2, this program reads version 1"),
    "level": (-1, "level is -1"),
    "frame_bytes": (0, "frames of 0 bytes"),
    "manifest": ([], "manifest is not a JSON object"),
    "files": ({}, "files is {}, a list expected"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_faulty_field_is_named(field: str) -> None:
    value, message = CHANGES[field]
    content = orjson.loads(RECORD.encode()) | {field: value}
    content["checksum"] = content_checksum(content)
    with pytest.raises(CheckFailed, match=f"{PLACE}.*{message}"):
        ArchiveRecord.parse(PLACE, orjson.dumps(content))
    content["checksum"] = "0"
    with pytest.raises(CheckFailed, match=PLACE):
        ArchiveRecord.parse(PLACE, orjson.dumps(content))
