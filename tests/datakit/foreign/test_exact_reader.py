"""ExactReader: pieces of promised sizes out of plain and packed files; what does not give them is named."""

import gzip
import hashlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datakit.foreign.exact_reader import ExactReader, open_exactly
from threefold.errors import CheckFailed, UserError

PACK = {"": bytes, "gz": gzip.compress, "zstd": zstandard.compress}


@pytest.mark.parametrize("compression", PACK)
@given(pieces=st.lists(st.binary(max_size=20), max_size=9), block_bytes=st.integers(1, 30))
def test_pieces_come_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, compression: str, pieces: list[bytes], block_bytes: int
) -> None:
    path, content = tmp_path_factory.mktemp("e") / "a", b"".join(pieces)
    path.write_bytes(PACK[compression](content))
    with open_exactly(path, compression, {"sha256": hashlib.sha256(content).hexdigest()}, block_bytes) as reader:
        for number, piece in enumerate(pieces):
            at = reader.at
            if number % 2:
                reader.skip(len(piece))
            else:
                assert reader.read(len(piece)) == piece
            assert reader.at == at + len(piece)
        reader.finish()


def read_all(reader: ExactReader, size_bytes: int) -> None:
    reader.read(size_bytes)
    reader.finish()


@pytest.mark.parametrize("compression", PACK)
def test_every_cut_and_every_surplus_is_named(tmp_path: Path, compression: str) -> None:
    path, content = tmp_path / "a", bytes(range(100)) * 3
    packed = PACK[compression](content)
    for size_bytes in range(len(packed)):
        path.write_bytes(packed[:size_bytes])
        with open_exactly(path, compression) as reader, pytest.raises(CheckFailed, match=str(path)):
            read_all(reader, len(content))
    path.write_bytes(PACK[compression](content + b"1"))
    with open_exactly(path, compression) as reader:
        reader.read(len(content))
        with pytest.raises(CheckFailed, match="goes on after byte 300"):
            reader.finish()


def test_a_promise_beyond_all_measure_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with open_exactly(tmp_path / "a") as reader, pytest.raises(CheckFailed, match="more than 1073741824"):
        reader.read(1 << 31)
    with pytest.raises(UserError, match="is missing"), open_exactly(tmp_path / "b"):
        pass


def test_hashes_that_cannot_be_computed_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    for name, good in (("unheard_of", True), ("shake_128", True), ("sha1", False), ("xxh3_128", False)):
        with open_exactly(tmp_path / "a", hashes={name: "00"}) as reader:
            reader.skip(3)
            if good:
                reader.finish()
            else:
                with pytest.raises(CheckFailed, match=f"its {name} does not hold"):
                    reader.finish()


def test_zstd_inside_a_file(tmp_path: Path) -> None:
    packed = [zstandard.compress(text) for text in (b"one", b"two two")]
    (tmp_path / "a").write_bytes(b"head" + b"".join(packed))
    with open_exactly(tmp_path / "a") as reader:
        reader.skip(4)
        assert reader.unpacking(len(packed[0])).read(3) == b"one"
        inner, size_bytes = reader.unpack(len(packed[1]))
        assert inner.read(size_bytes) == b"two two"
        reader.finish()
