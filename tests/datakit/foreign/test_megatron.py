"""Megatron: datasets become stores and stores datasets without a changed byte; what a store cannot hold is refused."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import TokenShard, TokenStore, verify, write_store
from datakit.foreign.foreign_store import Choices, Pieces
from datakit.foreign.megatron import from_megatron, to_megatron
from datakit.format.output import Output
from datakit.format.shard import DTYPE_CODES, HEADER, MAGIC, VERSION, ShardWriter
from tests.datakit.conftest import Cli, files_of
from tests.support.interrupted import Ends, end_after
from threefold.errors import CheckFailed, UserError
from threefold.storage import open_storage

DOCUMENTS = [[3, 1, 2], [], [5] * 400, [7], [], [9, 8]]


def write_dataset(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> Path:
    writer = ShardWriter(prefix, dtype)
    for document in documents:
        writer.extend(np.array(document, writer.dtype).tobytes(), [len(document)])
    writer.finish()
    return prefix


def write_raw(prefix: Path, lengths: list[int], boundaries: list[int], modes: bytes = b"", first_byte: int = 0) -> Path:
    """A dataset with documents of any number of sequences."""
    np.zeros(sum(lengths) + first_byte // 2, "<u2").tofile(f"{prefix}.bin")
    columns = np.array(lengths, "<i4"), first_byte + (np.cumsum(lengths) - lengths).astype("<i8") * 2
    header = HEADER.pack(MAGIC, VERSION, DTYPE_CODES["uint16"], len(lengths), len(boundaries))
    parts = [header, *(column.tobytes() for column in (*columns, np.array(boundaries, "<i8"))), modes]
    Path(f"{prefix}.idx").write_bytes(b"".join(parts))
    return prefix


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_datasets_become_a_store_and_datasets_again(
    tmp_path: Path, tokenizer_path: str, dtype: str, copy: bool
) -> None:
    prefixes = [
        write_dataset(tmp_path / name, documents, dtype)
        for name, documents in (("b_text_document", DOCUMENTS), ("a", [[1, 2, 3]]), ("empty", []))
    ]
    spelled = [f"{prefixes[0]}.bin", f"{prefixes[1]}.idx", prefixes[2]]
    store = from_megatron(spelled, tmp_path / "s", Choices(tokenizer_path), copy=copy)
    assert not verify(store.path)
    assert (store.dtype, store.num_documents, len(store.manifest.shards)) == (dtype, 7, 3)
    assert [store.document(number).tolist() for number in range(7)] == [*DOCUMENTS, [1, 2, 3]]
    assert store.eod_id == 0
    for number in range(7):
        origin, inside = store.origin(number), number % 6
        assert origin.path == f"{prefixes[number // 6]}.bin"
        assert origin.line == inside + 1
        tokens = np.fromfile(origin.path, dtype, len(store.document(number)), offset=origin.offset_bytes)
        assert np.array_equal(tokens, store.document(number))
    assert os.path.samefile(store.path / "shard-000000-000.bin", f"{prefixes[0]}.bin") != copy
    found = to_megatron(store.path, tmp_path / "back", copy=copy)
    assert len(list((tmp_path / "back").iterdir())) == 6
    for prefix, back in zip(prefixes, found, strict=True):
        for kind in ("bin", "idx"):
            assert Path(f"{prefix}.{kind}").read_bytes() == Path(f"{back}.{kind}").read_bytes()
    again = from_megatron(found, tmp_path / "again", Choices(tokenizer_path))
    assert again.fingerprint == store.fingerprint


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int64"])
@pytest.mark.parametrize("copy", [False, True])
def test_tokens_of_a_dtype_that_a_store_has_not_are_written_again(
    tmp_path: Path, tokenizer_path: str, dtype: str, copy: bool
) -> None:
    documents = [[3, 1, 2], [], [5] * 400, [0], [9, 0]]
    same = [[1, 0]] * 20  # which looks packed, and is not to be joined
    prefixes = [
        write_dataset(tmp_path / name, content, kind)
        for name, content, kind in (("b", documents, dtype), ("a", same, "uint16"), ("empty", [], dtype))
    ]
    store = from_megatron(prefixes, tmp_path / "s", Choices(tokenizer_path), copy=copy)
    assert not verify(store.path)
    assert (store.dtype, store.num_documents) == ("uint16", 25)
    assert [store.document(number).tolist() for number in range(25)] == [*documents, *same]
    for number in range(25):
        origin, kind = store.origin(number), dtype if number < 5 else "uint16"
        assert (origin.path, origin.line) == (
            f"{prefixes[number >= 5]}.bin",
            number % 5 + 1 if number < 5 else number - 4,
        )
        tokens = np.fromfile(origin.path, kind, len(store.document(number)), offset=origin.offset_bytes)
        assert np.array_equal(tokens, store.document(number))
    assert from_megatron(prefixes, tmp_path / "s", Choices(tokenizer_path)).fingerprint == store.fingerprint
    for token in (-1, 127):
        bad = write_dataset(tmp_path / f"bad{token}", [[1], [2, token]], "int8")
        vocabulary = token < 0 or store.manifest.tokenizer.vocab_size <= token
        if vocabulary:
            with pytest.raises(CheckFailed, match=f"document 1 holds token {token}, beyond"):
                from_megatron([bad], tmp_path / f"o{token}", Choices(tokenizer_path))


@given(lengths=st.lists(st.integers(0, 9), max_size=40), window=st.integers(1, 9), block_bytes=st.integers(1, 40))
def test_blocks_and_windows_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str, lengths: list[int], window: int, block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("m")
    documents = [[(i + j) % 300 for j in range(length)] for i, length in enumerate(lengths)]
    prefix = write_dataset(folder / "d", documents)
    whole = from_megatron([prefix], folder / "whole", Choices(tokenizer_path))
    pieces = Pieces(window_documents=window, block_bytes=block_bytes)
    cut = from_megatron([prefix], folder / "cut", Choices(tokenizer_path, pieces=pieces))
    assert files_of(whole.path) == files_of(cut.path)
    assert not verify(cut.path)
    origins = cut.origins(0)
    assert all(origins.holds(number, cut.document(number).tobytes()) for number in range(len(documents)))


@pytest.mark.parametrize("copy", [False, True])
def test_a_killed_conversion_is_continued(
    tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch, copy: bool
) -> None:
    prefixes = [write_dataset(tmp_path / name, DOCUMENTS) for name in "ab"]
    whole = files_of(from_megatron(prefixes, tmp_path / "whole", Choices(tokenizer_path), copy=copy).path)
    for steps in range(4):
        output = tmp_path / str(steps)
        with monkeypatch.context() as patch:
            end_after(patch, steps, Output, "place_file", "adopt")
            with pytest.raises(Ends):
                from_megatron(prefixes, output, Choices(tokenizer_path), copy=copy)
        if any(output.glob("*.bin")):  # before, nothing was made that another could spoil
            with pytest.raises(UserError, match="was begun from other sources"):
                from_megatron(prefixes[:1], output, Choices(tokenizer_path), copy=copy)
        from_megatron(prefixes, output, Choices(tokenizer_path), copy=copy)
        assert files_of(output) == whole


@pytest.mark.parametrize("token", [300, 65535])
def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path, tokenizer_path: str, token: int) -> None:
    store = write_store(tmp_path / "s", [[1]], vocab_size=400)
    vocab_size = from_megatron([store.path / "shard-000000-000"], tmp_path / "m", Choices(tokenizer_path)).vocab_size
    prefix = write_dataset(tmp_path / "d", [*DOCUMENTS, [], [0, max(token, vocab_size)]])
    with pytest.raises(UserError, match=f"document 7 holds token {max(token, vocab_size)}, beyond the vocabulary"):
        from_megatron([prefix], tmp_path / "o", Choices(tokenizer_path))
    from_megatron(
        [write_dataset(tmp_path / "good", DOCUMENTS)], tmp_path / "o", Choices(tokenizer_path)
    )  # it was left free
    negative = write_dataset(tmp_path / "n", [[1], [-1]], "int32")
    with pytest.raises(UserError, match="document 1 holds token -1"):
        from_megatron([negative], tmp_path / "p", Choices(tokenizer_path))


def test_what_a_store_cannot_hold_is_refused(tmp_path: Path, tokenizer_path: str) -> None:
    several = write_raw(tmp_path / "several", [2, 2, 2, 2], [0, 1, 3, 4])
    with pytest.raises(UserError, match="4 sequences in 3 documents: document 1 has 2; a store's document is one"):
        from_megatron([several], tmp_path / "o1", Choices(tokenizer_path))
    assert TokenShard(several).num_documents == 3
    swapped = write_raw(tmp_path / "swapped", [2, 2, 2, 2], [0, 1, 1, 3, 4])
    with pytest.raises(UserError, match="document 1 has 0"):
        from_megatron([swapped], tmp_path / "o2", Choices(tokenizer_path))
    outside = write_raw(tmp_path / "outside", [2, 2], [0, 1])
    with pytest.raises(UserError, match="2 sequences in 1 documents; a store's"):
        from_megatron([outside], tmp_path / "o3", Choices(tokenizer_path))
    modes = write_raw(tmp_path / "modes", [2, 2], [0, 1, 2], modes=b"\0\1")
    with pytest.raises(UserError, match="has modes"):
        from_megatron([modes], tmp_path / "o4", Choices(tokenizer_path))
    gap = write_raw(tmp_path / "gap", [2, 2], [0, 1, 2], first_byte=2)
    with pytest.raises(CheckFailed, match="document 0 does not begin"):
        from_megatron([gap], tmp_path / "o5", Choices(tokenizer_path))
    wide = write_dataset(tmp_path / "w", [[1]], "int32")
    with pytest.raises(UserError) as caught:
        from_megatron([wide, write_dataset(tmp_path / "d", [[1]])], tmp_path / "o7", Choices(tokenizer_path))
    assert caught.value.message.splitlines()[1:] == [f"  {wide}: int32", f"  {tmp_path / 'd'}: uint16"]


def test_an_output_that_holds_something_is_refused(tmp_path: Path, tokenizer_path: str) -> None:
    store = write_store(tmp_path / "s", [[1]], vocab_size=9)
    for _ in range(2):
        with pytest.raises(UserError, match="is not empty"):
            to_megatron(store.path, store.path)
        with pytest.raises(UserError, match="is not empty"):
            from_megatron([store.path / "shard-000000-000"], store.path, Choices(tokenizer_path))
    assert not verify(store.path)


def test_the_verb(tmp_path: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_dataset(tmp_path / "d", DOCUMENTS)
    words = ["convert", prefix, "--output", tmp_path / "s", "--tokenizer", tokenizer_path]
    assert cli(*words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == len(DOCUMENTS)
    assert cli("verify", tmp_path / "s") == 0
    assert cli("inspect", tmp_path / "s", "--document", 2, "--tokenizer", tokenizer_path) == 0
    assert f"{prefix}.bin, line 3, byte 6" in capsys.readouterr().out
    assert cli("convert", tmp_path / "s", "--to", "megatron", "--output", tmp_path / "m") == 0
    found = capsys.readouterr().out.splitlines()
    assert found == [str(tmp_path / "m" / "shard-000000-000")]
    assert TokenShard(found[0]).num_documents == len(DOCUMENTS)
    assert TokenStore.open(tmp_path / "s").manifest.settings["converted_from"] == "megatron"
    before = files_of(tmp_path)
    for output in ("s", "m"):  # as a kill after the last file may leave it
        (tmp_path / output / ".work").mkdir()
    assert cli(*words) == 0
    assert cli("convert", tmp_path / "s", "--to", "megatron", "--output", tmp_path / "m") == 0
    assert files_of(tmp_path) == before
    write_dataset(prefix, DOCUMENTS[:2])
    assert cli(*words) == 2


@pytest.mark.parametrize(
    "words",
    [["none", "--tokenizer", "TOKENIZER"], ["d"], ["d", "--tokenizer", "none.json"], ["d", "--to", "megatron"],
     ["d", "--tokenizer", "TOKENIZER", "--eod-token", "<none>"], ["s", "s", "--to", "megatron"],
     ["s", "--to", "megatron", "--tokenizer", "TOKENIZER"], ["s", "--tokenizer", "TOKENIZER"]],
)  # fmt: skip
def test_bad_input_is_one_error_and_one_hint(
    tmp_path: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    write_dataset(tmp_path / "d", DOCUMENTS)
    write_store(tmp_path / "s", [[1]], vocab_size=9)
    sources = {"d": tmp_path / "d", "s": tmp_path / "s", "none": tmp_path / "none", "TOKENIZER": tokenizer_path}
    assert cli("convert", *(sources.get(word, word) for word in words), "--output", tmp_path / "o") == 2
    errors = capsys.readouterr().err
    assert errors.count("error: ") == errors.count("hint: ") == 1
    assert not (tmp_path / "o").exists()


def test_the_verb_makes_a_store_and_datasets_on_s3(
    tmp_path: Path, tokenizer_path: str, s3_url: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_dataset(tmp_path / "d", DOCUMENTS)
    for _ in range(2):  # the second finds it complete
        assert cli("convert", prefix, "--output", f"{s3_url}/s", "--tokenizer", tokenizer_path) == 0
        assert f"{s3_url}/s: {len(DOCUMENTS)} documents" in capsys.readouterr().out
    assert cli("verify", f"{s3_url}/s") == 0
    assert cli("unarchive", f"{s3_url}/s", "--output", tmp_path / "s") == 0
    assert files_of(tmp_path / "s") == files_of(from_megatron([prefix], tmp_path / "l", Choices(tokenizer_path)).path)
    for _ in range(2):
        assert cli("convert", tmp_path / "s", "--to", "megatron", "--output", f"{s3_url}/m") == 0
        assert capsys.readouterr().out == f"{s3_url}/m/shard-000000-000\n"
    storage = open_storage(f"{s3_url}/m")
    found = {info.key: storage.read(info.key) for info in storage.list()}
    assert found == {f"shard-000000-000.{kind}": Path(f"{prefix}.{kind}").read_bytes() for kind in ("bin", "idx")}
    assert cli("merge", tmp_path / "s", tmp_path / "s", "--output", f"{s3_url}/both", "--json") == 0
    assert json.loads(capsys.readouterr().out)["path"] == f"{s3_url}/both"
