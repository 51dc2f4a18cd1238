"""Folders of Zarr arrays that nobody wrote so: one line says what is wrong, before memory is taken."""

import json
from pathlib import Path

import pytest

from ckptkit.foreign.zarr.folder import TensorstoreFolder
from tests.fuzzing.of_zarr import ARRAY_2, folder
from threefold.errors import CheckFailed

pytest.importorskip("tensorstore", reason="needs tensorstore: pip install -e '.[tensorstore]'")


@pytest.fixture(autouse=True)
def fresh() -> None:
    folder.cache_clear()  # a test changes what is in it


def test_a_chunk_larger_than_all_there_is_is_refused_unread() -> None:
    path = Path(folder("zarr2").name)
    (path / "w" / ".zarray").write_text(json.dumps({**ARRAY_2, "chunks": [2, 1 << 31]}))
    with pytest.raises(CheckFailed, match=r"w has chunks of 17,179,869,184 bytes, more than 268,435,456"):
        TensorstoreFolder(f"tensorstore:{path}").root(0)


@pytest.mark.parametrize("data", [b"", b"short", bytes(60)], ids=["empty", "short", "zeros"])
def test_a_shard_whose_index_is_torn_is_refused(data: bytes) -> None:
    path = Path(folder("shards").name)
    (path / "w" / "c" / "0" / "0").write_bytes(data)
    with pytest.raises(CheckFailed, match="chunks cannot be counted"):
        TensorstoreFolder(f"tensorstore:{path}").root(0)
