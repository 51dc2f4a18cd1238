"""Datatrove: `.ds` files as its writer lays them out become stores; what contradicts itself is named."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.foreign.datatrove import absent_numbers, from_datatrove
from datakit.foreign.foreign_store import Choices, Pieces
from tests.datakit.conftest import documents_of, files_of, mutate, named_or_sound
from threefold.errors import CheckFailed, UserError

DOCUMENTS = [[3, 1, 2, 0], [], [5] * 400, [7, 0], [], [9, 8, 0]]


def write_ds(
    path: Path,
    documents: Sequence[Sequence[int]],
    size: int = 2,
    *,
    index: bool = True,
    metadata: str | None = "tok|{}",
) -> Path:
    path.parent.mkdir(exist_ok=True)
    tokens = np.concatenate([np.empty(0, int), *documents]).astype(f"<u{size}")
    path.write_bytes(tokens.tobytes())
    if index:
        path.with_name(f"{path.name}.index").write_bytes(
            struct.pack(f"<{len(documents)}Q", *np.cumsum([len(document) for document in documents], dtype=int))
        )
    if metadata is not None:
        lines = [metadata.format(size), str(len(tokens)), f"{len(tokens)} T"]
        path.with_name(f"{path.name}.metadata").write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("metadata", ["tok|{}", "a|name|{}", "an age without size", None])
@pytest.mark.parametrize("size", [2, 4])
def test_folders_and_files_become_a_store(tmp_path: Path, tokenizer_path: str, size: int, metadata: str | None) -> None:
    write_ds(tmp_path / "in" / "00001_unshuffled.ds", DOCUMENTS, size, metadata=metadata)
    write_ds(tmp_path / "in" / "00000_unshuffled.ds", [[1, 2, 3]], size, metadata=metadata)
    last = write_ds(tmp_path / "last.ds", [[4]], size, metadata=metadata)
    store = from_datatrove([tmp_path / "in", last], tmp_path / "s", Choices(tokenizer_path))
    assert documents_of(store) == [[1, 2, 3], *DOCUMENTS, [4]]
    assert (store.dtype, store.manifest.settings["documents"]) == ("uint16", "items")
    for number in range(8):
        origin = store.origin(number)
        tokens = np.fromfile(origin.path, f"<u{size}", len(store.document(number)), offset=origin.offset_bytes)
        assert np.array_equal(tokens, store.document(number))
    assert [store.origin(number).line for number in range(8)] == [1, 1, 2, 3, 4, 5, 6, 1]


@given(lengths=st.lists(st.integers(0, 9), max_size=40), window=st.integers(1, 9))
def test_windows_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str, lengths: list[int], window: int
) -> None:
    folder = tmp_path_factory.mktemp("d")
    documents = [[(i + j) % 300 for j in range(length)] for i, length in enumerate(lengths)]
    source = write_ds(folder / "a.ds", documents)
    choices = Choices(tokenizer_path, pieces=Pieces(window_documents=window))
    assert documents_of(from_datatrove([source], folder / "s", choices)) == documents


@pytest.mark.parametrize("block_bytes", [2, 6, 1 << 20])
def test_a_file_without_index_is_cut_after_the_end_of_document_token(
    tmp_path: Path, tokenizer_path: str, block_bytes: int
) -> None:
    choices = Choices(tokenizer_path, pieces=Pieces(block_bytes=block_bytes))
    source = write_ds(tmp_path / "a.ds", [[3, 1, 0], [0], [5, 5, 0], [7, 7]], index=False)
    store = from_datatrove([source, write_ds(tmp_path / "b.ds", [[8]], index=False)], tmp_path / "s", choices)
    assert documents_of(store) == [[3, 1, 0], [0], [5, 5, 0], [7, 7], [8]]
    assert store.manifest.settings["documents"] == "eod"
    assert [store.origin(number).offset_bytes for number in range(5)] == [0, 6, 8, 14, 0]
    whole = from_datatrove([source], tmp_path / "w", replace(choices, documents="items"))
    assert documents_of(whole) == [[3, 1, 0, 0, 5, 5, 0, 7, 7]]
    with pytest.raises(UserError, match=r"a\.ds has no borders between documents, other sources have"):
        from_datatrove([source, write_ds(tmp_path / "c.ds", [[1]])], tmp_path / "m", Choices(tokenizer_path))


def test_the_size_of_tokens_must_be_told_by_something(tmp_path: Path, tokenizer_path: str) -> None:
    bare = write_ds(tmp_path / "a.ds", [[1, 2, 0, *[3] * 20]], 4, index=False, metadata=None)
    with pytest.raises(UserError, match="neither metadata nor an index"):
        from_datatrove([bare], tmp_path / "s", Choices(tokenizer_path))
    with pytest.raises(UserError, match="every second token is 0"):
        from_datatrove([bare], tmp_path / "s", Choices(tokenizer_path, dtype="uint16"))
    store = from_datatrove([bare], tmp_path / "s", Choices(tokenizer_path, dtype="uint32"))
    assert documents_of(store) == [[1, 2, 0], [3] * 20]
    few = write_ds(tmp_path / "few.ds", [[7, 0]] * 15, index=False, metadata=None)
    short = from_datatrove([few], tmp_path / "f", Choices(tokenizer_path, dtype="uint16"))
    assert documents_of(short) == [[7, 0]] * 15  # too few zeros to tell
    told = write_ds(tmp_path / "b.ds", [[1]], 2)
    with pytest.raises(UserError, match="has uint16 tokens, not uint32"):
        from_datatrove([told], tmp_path / "t", Choices(tokenizer_path, dtype="uint32"))


def test_masks_are_refused_where_they_hide_anything(tmp_path: Path, tokenizer_path: str) -> None:
    source = write_ds(tmp_path / "a.ds", [[1, 2]])
    (tmp_path / "a.ds.loss").write_bytes(b"\1\0")
    with pytest.raises(UserError, match=r"a\.ds\.loss masks tokens"):
        from_datatrove([source], tmp_path / "s", Choices(tokenizer_path))
    (tmp_path / "a.ds.loss").write_bytes(b"\1\1")
    assert documents_of(from_datatrove([source], tmp_path / "s", Choices(tokenizer_path))) == [[1, 2]]


@pytest.mark.parametrize(
    ("ends", "fault"),
    [
        ([2, 1, 4], "document 1 ends at token 1"),
        ([2, 5, 5], "document 1 ends at token 5"),
        ([2, 2**63 + 1, 4], "document 1 ends at token 9223372036854775809"),
        ([2, 3], "4 tokens, its index ends at token 3"),
        ([], "4 tokens, its index ends at token 0"),
    ],
)
def test_an_index_of_nonsense_is_named(tmp_path: Path, tokenizer_path: str, ends: list[int], fault: str) -> None:
    source = write_ds(tmp_path / "a.ds", [[1, 2, 3, 4]])
    (tmp_path / "a.ds.index").write_bytes(np.array(ends, "<u8").tobytes())
    with pytest.raises(CheckFailed, match=fault):
        from_datatrove([source], tmp_path / "s", Choices(tokenizer_path))
    assert not files_of(tmp_path / "s")


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path, tokenizer_path: str) -> None:
    source = write_ds(tmp_path / "a.ds", [*DOCUMENTS, [1, 65535]])
    with pytest.raises(CheckFailed, match=r"a\.ds: document 6 holds token 65535, beyond the vocabulary of"):
        from_datatrove([source], tmp_path / "s", Choices(tokenizer_path))
    with pytest.raises(UserError, match="nor a folder with any"):
        from_datatrove([tmp_path / "none"], tmp_path / "s", Choices(tokenizer_path))


@given(data=st.data())
def test_damage_is_named_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("d")
    source = write_ds(folder / "a.ds", DOCUMENTS)
    mutate(data, folder, ["a.ds", "a.ds.index", "a.ds.metadata"])
    named_or_sound(folder, lambda: from_datatrove([source], folder / "s", Choices(tokenizer_path)))


def test_a_file_that_lost_tokens_or_its_index_is_refused(tmp_path: Path, tokenizer_path: str) -> None:
    """Without an index a file is one stream: among others that have one it is taken for one that lost it."""
    short = write_ds(tmp_path / "in" / "00000_a.ds", [[1, 2, 3], [4, 5]], index=False)
    short.write_bytes(short.read_bytes()[:-2])
    with pytest.raises(CheckFailed, match="has 4 tokens, its metadata says 5"):
        from_datatrove([short], tmp_path / "s", Choices(tokenizer_path))
    write_ds(tmp_path / "in" / "00000_a.ds", [[1, 2, 3]])
    lost = write_ds(tmp_path / "in" / "00001_a.ds", [[4, 0], [5, 0]])
    lost.with_name(f"{lost.name}.index").unlink()
    for documents in ("auto", "items"):
        with pytest.raises(UserError, match="has no borders between documents, other sources have"):
            from_datatrove([tmp_path / "in"], tmp_path / "s", Choices(tokenizer_path, documents=documents))
    assert not (tmp_path / "s").exists()


def test_numbers_that_are_left_out_are_refused_unless_the_files_are_named(tmp_path: Path, tokenizer_path: str) -> None:
    files = [write_ds(tmp_path / "in" / f"{number:05d}_a.ds", [[number]]) for number in (0, 1, 3)]
    with pytest.raises(UserError, match="file of number 2: lost, or of tasks that had no document"):
        from_datatrove([tmp_path / "in"], tmp_path / "s", Choices(tokenizer_path))
    assert not (tmp_path / "s").exists()
    assert from_datatrove(files, tmp_path / "s", Choices(tokenizer_path)).num_documents == 3
    write_ds(tmp_path / "in" / "00002_a.ds", [[2]])
    assert from_datatrove([tmp_path / "in"], tmp_path / "t", Choices(tokenizer_path)).num_documents == 4


def test_numbers_that_are_large_are_not_counted_through() -> None:
    """As dates are; a list of all that are absent would take 36 GB."""
    files = [Path("in") / f"{number}_a.ds" for number in (999999998, 999999999)]
    assert absent_numbers(files) == "in has no .ds file of number 0, 1, 2, 3, 4 and more"
