"""A data file written as a stream arrives whole with the checksums of its granules, or not at all."""

from pathlib import Path

import numpy as np
import pytest

from ckptkit.io.blocks import GRANULE_BYTES, checksums
from ckptkit.io.data_files import open_writer
from threefold.errors import StorageError
from threefold.storage import open_storage
from threefold.storage.stale_uploads import abort_stale_uploads

CONTENT = np.random.default_rng(2).integers(0, 256, 21 * GRANULE_BYTES + 77, dtype=np.uint8)


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_what_is_streamed_arrives_whole(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    storage = open_storage(tmp_path if kind == "local" else request.getfixturevalue("s3_url"))
    writer = open_writer(storage, "folder/f", len(CONTENT))
    granule_sums = []
    for start in range(0, len(CONTENT), 6 * GRANULE_BYTES):
        buffer = CONTENT[start : start + 6 * GRANULE_BYTES].copy()
        granule_sums.append(writer.write([(buffer.ctypes.data, len(buffer))]))
        buffer[:] = 0  # the writer has its own by now
    writer.close()
    assert np.array_equal(np.concatenate(granule_sums), checksums(CONTENT))
    assert storage.read("folder/f") == CONTENT.tobytes()


def test_an_aborted_upload_leaves_nothing(s3_url: str) -> None:
    storage = open_storage(s3_url)
    writer = open_writer(storage, "folder/f", len(CONTENT))
    writer.write([(CONTENT.ctypes.data, 18 * GRANULE_BYTES)])
    writer.abort()
    assert list(storage.list()) == []
    assert abort_stale_uploads(storage, older_than_s=0) == []


def test_a_failure_of_the_upload_is_the_writers(s3_url: str) -> None:
    storage = open_storage("s3://no-such-bucket/run")
    writer = open_writer(storage, "f", len(CONTENT))
    writer.write([(CONTENT.ctypes.data, GRANULE_BYTES)])
    with pytest.raises(StorageError, match="no-such-bucket"):
        writer.close()
