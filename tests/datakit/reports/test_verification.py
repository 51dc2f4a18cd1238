"""Verify: one changed byte anywhere is found, and its file and document are named."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import TokenStore, archive, verify, write_store
from datakit.files.durable import digest_file
from datakit.format.manifest import Manifest
from threefold.errors import CheckFailed

DOCUMENTS = [[i, i + 1, i % 3] * (1 + i % 4) for i in range(50)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("store") / "s"
    return write_store(folder, DOCUMENTS, vocab_size=100, shard_documents=20)


def document_of(store: TokenStore, suffix: str, at: int) -> set[int] | None:
    """The documents that a byte of the second shard's file belongs to; None where it belongs to all."""
    first, size = 20, 20
    if suffix == "bin":
        return {store.document_at(int(store.token_starts[1]) + at // 2)}
    if suffix == "idx":
        for start, width, count in ((34, 4, size), (34 + 4 * size, 8, size), (34 + 12 * size, 8, size + 1)):
            if start <= at < start + width * count:
                number = first + (at - start) // width
                return {number - 1, number, min(number, first + size - 1)}
        return None
    columns = 32 + 8  # the header, and `[""]` padded
    for start, width in ((columns, 8), *((columns + before * size, 4) for before in (8, 12, 16))):
        if start <= at < start + width * size:
            return {first + (at - start) // width}
    return None


@given(data=st.data(), suffix=st.sampled_from(["bin", "idx", "origin"]), change=st.integers(1, 255))
def test_one_changed_byte_is_found_and_its_document_named(
    store: TokenStore, data: st.DataObject, suffix: str, change: int
) -> None:
    file = store.path / f"shard-000001-000.{suffix}"
    sound = file.read_bytes()
    at = data.draw(st.integers(0, len(sound) - 1))
    expected = document_of(store, suffix, at)
    try:
        file.write_bytes(sound[:at] + bytes([sound[at] ^ change]) + sound[at + 1 :])
        [fault] = verify(store.path)
    finally:
        file.write_bytes(sound)
    assert fault.file == str(file)
    assert str(file) in str(fault)
    if expected is not None:
        assert fault.documents
        assert set(fault.documents) <= expected
    assert not verify(store.path)


@pytest.mark.parametrize("suffix", ["bin", "idx", "origin"])
def test_missing_and_shortened_files_are_found(tmp_path: Path, suffix: str) -> None:
    store = write_store(tmp_path / "s", DOCUMENTS, vocab_size=100)
    file = store.path / f"shard-000000-000.{suffix}"
    file.write_bytes(file.read_bytes()[:-1])
    assert "bytes, its manifest says" in str(verify(store.path)[0])
    file.unlink()
    assert [str(fault) for fault in verify(store.path)] == [f"{file}: is missing"]


def test_faults_of_all_files_are_told(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", DOCUMENTS, vocab_size=100, shard_documents=20)
    for number in (0, 2):
        for suffix in ("bin", "idx", "origin"):
            file = store.path / f"shard-{number:06}-000.{suffix}"
            file.write_bytes(b"X" + file.read_bytes()[1:])
    assert len(verify(store.path)) == 6


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "s", DOCUMENTS, vocab_size=100)
    path = tmp_path / "s" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"num_documents": 50', b'"num_documents": 51'))
    with pytest.raises(CheckFailed, match="damaged"):
        verify(tmp_path / "s")


def test_sound_files_that_do_not_fit_are_found(tmp_path: Path) -> None:
    """A vocabulary smaller than the tokens: every checksum holds, the store is wrong."""
    store = write_store(tmp_path / "s", DOCUMENTS, vocab_size=100)
    small = dataclasses.replace(store.manifest.tokenizer, vocab_size=10)
    Manifest(store.dtype, small, store.manifest.shards).write(store.path)
    assert "beyond the vocabulary of 10" in str(verify(store.path)[0])


def test_long_lists_of_documents_are_shortened(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", DOCUMENTS, vocab_size=100)
    file = store.path / "shard-000000-000.bin"
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    [fault] = verify(store.path)
    assert len(fault.documents) == 50
    assert str(fault).endswith("9 and 40 more")


def test_a_negative_token_is_found(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[1, 2], [3]], vocab_size=70000)
    [entry] = store.manifest.shards
    file = store.path / f"{entry.name}.bin"
    tokens = np.fromfile(file, "<i4")
    tokens[1] = -5
    file.write_bytes(tokens.tobytes())
    sound = dataclasses.replace(entry, bin=digest_file(file))
    Manifest(store.dtype, store.manifest.tokenizer, (sound,)).write(store.path)
    assert "holds token -5, beyond the vocabulary of 70000" in str(verify(store.path)[0])


@pytest.mark.parametrize("vocab_size", [100, 70000])
@pytest.mark.parametrize("at", range(5))
def test_a_token_beyond_the_vocabulary_is_found_wherever_it_stands(tmp_path: Path, at: int, vocab_size: int) -> None:
    tokens = [7] * 5  # an odd number: the last one stands alone
    tokens[at] = 99
    store = write_store(tmp_path / "s", [tokens, [3]] if at < 4 else [tokens], vocab_size=vocab_size)
    small = dataclasses.replace(store.manifest.tokenizer, vocab_size=99)
    Manifest(store.dtype, small, store.manifest.shards).write(store.path)
    [fault] = verify(store.path)
    assert "holds token 99, beyond the vocabulary of 99" in str(fault)


def test_files_of_several_blocks_are_checked_to_their_end(tmp_path: Path) -> None:
    tokens = np.full((3 << 20) + 1, 5)
    tokens[-1] = 98
    store = write_store(tmp_path / "s", [tokens], vocab_size=99)
    assert not verify(store.path)
    small = dataclasses.replace(store.manifest.tokenizer, vocab_size=98)
    Manifest(store.dtype, small, store.manifest.shards).write(store.path)
    assert "holds token 98" in str(verify(store.path)[0])


@pytest.mark.parametrize("extra", [b"\n", b" ", b"\0", b"more"])
def test_bytes_after_the_end_of_any_file_are_found(tmp_path: Path, extra: bytes) -> None:
    store = write_store(tmp_path / "s", DOCUMENTS, vocab_size=100)
    archive(store.path, str(tmp_path / "a"))
    for file in sorted([*(tmp_path / "s").iterdir(), *(tmp_path / "a").iterdir()]):
        sound = file.read_bytes()
        file.write_bytes(sound + extra)
        try:
            [fault] = map(str, verify(file.parent))
        except CheckFailed as error:  # without sound records nothing else can be checked
            fault = error.message
        assert file.name in fault
        file.write_bytes(sound)
    assert not verify(tmp_path / "s")
    assert not verify(tmp_path / "a")


def test_an_index_that_goes_on_as_megatrons_may_is_not_a_stores(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", DOCUMENTS, vocab_size=100)
    [entry] = store.manifest.shards
    index = store.path / f"{entry.name}.idx"
    index.write_bytes(index.read_bytes() + bytes(len(DOCUMENTS)))
    shards = (dataclasses.replace(entry, idx=digest_file(index)),)
    dataclasses.replace(store.manifest, shards=shards).write(store.path)
    [fault] = verify(store.path)
    assert fault.file == str(index)
    assert fault.message == f"has {index.stat().st_size} bytes, {index.stat().st_size - len(DOCUMENTS)} expected"
