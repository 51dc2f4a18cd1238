"""ForeignStore: samples become documents alone or joined, in groups that a killed run keeps, every token checked."""

import json
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import TokenStore, verify
from datakit.foreign.conversion import convert_to_store
from datakit.foreign.foreign_store import Choices, Pieces
from datakit.foreign.mosaic import from_mds
from datakit.format.output import Output
from datakit.store.writer import StoreShardWriter
from tests.datakit.conftest import documents_of, files_of
from tests.datakit.foreign.test_mosaic import write_mds
from tests.support.interrupted import Ends, end_after
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import open_storage


def write_rows(folder: Path, rows: Sequence[Sequence[int]], shard_samples: int = 3) -> Path:
    return write_mds(
        folder, {"tokens": "ndarray:int32"}, [{"tokens": row} for row in rows], shard_samples=shard_samples
    )


def cut(tokens: Sequence[int]) -> list[list[int]]:
    """The documents of a stream, after each of which stands token 0."""
    found: list[list[int]] = [[]]
    for token in tokens:
        found[-1].append(int(token))
        if token == 0:
            found.append([])
    return [document for document in found if document]


@settings(max_examples=25)
@given(
    stream=st.lists(st.integers(0, 5), min_size=64, max_size=150),
    row_tokens=st.integers(1, 4),
    shard_samples=st.integers(1, 30),
)
def test_packed_rows_are_cut_into_the_documents_they_hold(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_path: str,
    stream: list[int],
    row_tokens: int,
    shard_samples: int,
) -> None:
    folder = tmp_path_factory.mktemp("f")
    rows = [stream[at : at + row_tokens] for at in range(0, len(stream) - row_tokens + 1, row_tokens)]
    flat = [token for row in rows for token in row]
    source = write_rows(folder / "in", rows, shard_samples)
    joined = from_mds([source], folder / "eod", Choices(tokenizer_path, documents="eod"))
    assert documents_of(joined) == cut(flat)
    for number, document in enumerate(cut(flat)):
        origin = joined.origin(number)
        assert np.fromfile(origin.path, "<i4", 1, offset=origin.offset_bytes) == document[0]
    assert documents_of(from_mds([source], folder / "items", Choices(tokenizer_path, documents="items"))) == rows


def test_rows_of_one_length_are_joined_where_the_end_of_document_token_is_among_them(
    tmp_path: Path, tokenizer_path: str
) -> None:
    def how(name: str, rows: Sequence[Sequence[int]], eod_token: str = "<|endoftext|>") -> str:
        source = write_rows(tmp_path / name, rows, 50)
        store = from_mds([source], tmp_path / f"{name}-store", Choices(tokenizer_path, eod_token))
        return str(store.manifest.settings["documents"])

    packed = [[1, 2, 0, 4]] * 20
    assert how("packed", packed) == "eod"
    assert how("few", packed[:5]) == "items"
    assert how("no-eod", [[1, 2, 3, 4]] * 20) == "items"
    assert how("lengths", [*packed[:19], [1, 0]]) == "items"
    with pytest.raises(UserError, match="has no token '</s>'"):
        how("other", packed, "</s>")


def test_streams_of_several_sources_are_apart(tmp_path: Path, tokenizer_path: str) -> None:
    sources = [write_rows(tmp_path / name, [[1, 2], [0, 3]], 1) for name in "ab"]
    store = from_mds(sources, tmp_path / "s", Choices(tokenizer_path, documents="eod"))
    assert documents_of(store) == [[1, 2, 0], [3], [1, 2, 0], [3]]
    assert [store.origin(number).line for number in range(4)] == [1, 1, 1, 1]
    assert [Path(store.origin(number).path).name for number in range(2)] == ["shard.00000.mds", "shard.00001.mds"]


def test_a_document_that_never_ends_is_named(tmp_path: Path, tokenizer_path: str) -> None:
    choices = Choices(tokenizer_path, documents="eod", pieces=Pieces(max_document_bytes=100))
    source = write_rows(tmp_path / "in", [[1, 2], [0, 3], *[[1, 1]] * 20])
    with pytest.raises(CheckFailed, match=r"shard.00000.mds: document 1 has more than 100 bytes of tokens"):
        from_mds([source], tmp_path / "s", choices)


@pytest.mark.parametrize("group_bytes", [1, 200, 1 << 30])
def test_groups_are_cut_by_size_and_shards_by_theirs(tmp_path: Path, tokenizer_path: str, group_bytes: int) -> None:
    rows = [[1, 2, 3][: 1 + i % 3] for i in range(13)]
    choices = Choices(tokenizer_path, pieces=Pieces(group_bytes=group_bytes, max_shard_documents=4))
    store = from_mds([write_rows(tmp_path / "in", rows)], tmp_path / "s", choices)
    assert documents_of(store) == rows
    names = [shard.name for shard in store.manifest.shards]
    assert names == sorted(names)
    assert len({name[:12] for name in names}) == {1: 5, 200: 3, 1 << 30: 1}[group_bytes]


def test_a_killed_conversion_is_continued(tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = Choices(tokenizer_path, pieces=Pieces(group_bytes=1))
    source = write_rows(tmp_path / "in", [[i, i + 1] for i in range(9)])
    whole = files_of(from_mds([source], tmp_path / "whole", choices).path)
    for steps in range(8):  # 3 groups are moved, then noted, each; the tokenizer's copy; the manifest
        output = tmp_path / str(steps)
        with monkeypatch.context() as patch:
            end_after(patch, steps, Output, "write", "adopt")
            with pytest.raises(Ends):
                from_mds([source], output, choices)
        if steps:
            with pytest.raises(UserError, match="was begun from other sources"):
                from_mds([source], output, Choices(tokenizer_path, documents="eod"))
        with monkeypatch.context() as patch:
            passed = end_after(patch, 99, Output, "write", "adopt")
            from_mds([source], output, choices)
        # what was noted, or is there, is not made again
        assert len(passed) == 8 - steps // 2 * 2 - (steps == 7)
        assert files_of(output) == whole
        assert documents_of(TokenStore.open(output)) == [[i, i + 1] for i in range(9)]
    before = files_of(tmp_path / "whole")
    (tmp_path / "whole" / ".work").mkdir()  # as a kill after the manifest may leave it
    from_mds([source], tmp_path / "whole", choices)
    assert files_of(tmp_path / "whole") == before


@pytest.mark.parametrize("num_uploads", range(7))
def test_a_conversion_to_s3_that_was_killed_is_continued(
    tmp_path: Path, tokenizer_path: str, s3_url: str, monkeypatch: pytest.MonkeyPatch, num_uploads: int
) -> None:
    choices = Choices(tokenizer_path, pieces=Pieces(group_bytes=1))
    source = write_rows(tmp_path / "in", [[i, i + 1] for i in range(6)])

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    local = from_mds([source], tmp_path / "local", choices)
    with monkeypatch.context() as patch:
        end_after(patch, num_uploads, Output, "upload")
        patch.setattr(Output, "commit", kill)
        with pytest.raises(KeyboardInterrupt):
            from_mds([source], s3_url, choices)
    assert not open_storage(s3_url).info("manifest.json")
    with monkeypatch.context() as patch:
        passed = end_after(patch, 99, Output, "upload")
        found = from_mds([source], s3_url, choices)
    assert len(passed) == 6 - num_uploads // 3 * 3  # a group that was noted is not uploaded again
    storage = open_storage(s3_url)
    assert {info.key: storage.read(info.key) for info in storage.list()} == files_of(local.path)
    assert found.place == s3_url
    assert from_mds([source], s3_url, choices).fingerprint == local.fingerprint


def test_a_bad_source_leaves_a_url_free(tmp_path: Path, tokenizer_path: str) -> None:
    url, bad = f"memory://{uuid.uuid4().hex}", write_rows(tmp_path / "bad", [[1, 2], [-3, 4]])
    with pytest.raises(CheckFailed, match=r"document 1 holds token -3, beyond the vocabulary of"):
        from_mds([bad], url, Choices(tokenizer_path))
    assert not list(open_storage(url).list())
    from_mds([write_rows(tmp_path / "good", [[1, 2]])], url, Choices(tokenizer_path))
    assert not verify(url)


def test_a_full_disk_leaves_the_output_to_be_continued(
    tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in", [[1, 2], [3]])

    def full(*_: object) -> None:
        raise StorageError("cannot write: no space left")

    with monkeypatch.context() as patch:
        patch.setattr(StoreShardWriter, "finish", full)
        with pytest.raises(StorageError):
            from_mds([source], tmp_path / "s", Choices(tokenizer_path))
    assert {path.name for path in (tmp_path / "s" / ".work").iterdir()} == {"assembly.json", "lock"}
    assert documents_of(from_mds([source], tmp_path / "s", Choices(tokenizer_path))) == [[1, 2], [3]]


def test_a_bad_source_leaves_the_output_free(tmp_path: Path, tokenizer_path: str) -> None:
    bad = write_rows(tmp_path / "bad", [[1, 2], [-3, 4]])
    with pytest.raises(CheckFailed, match=r"document 1 holds token -3, beyond the vocabulary of"):
        from_mds([bad], tmp_path / "s", Choices(tokenizer_path))
    good = write_rows(tmp_path / "good", [[1, 2]])
    assert documents_of(from_mds([good], tmp_path / "s", Choices(tokenizer_path))) == [[1, 2]]


def test_the_vocabulary_decides_the_dtype(tmp_path: Path, tokenizer_path: str) -> None:
    content = json.loads(Path(tokenizer_path).read_text())
    size = len(content["model"]["vocab"])
    content["model"]["vocab"] |= {f"<unused {i}>": i for i in range(size, 70_000)}
    (tmp_path / "wide.json").write_text(json.dumps(content))
    source = write_rows(tmp_path / "in", [[69_999, 1], [2]])
    store = from_mds([source], tmp_path / "s", Choices(str(tmp_path / "wide.json")))
    assert (store.dtype, documents_of(store)) == ("int32", [[69_999, 1], [2]])
    with pytest.raises(CheckFailed, match="document 0 holds token 69999"):
        from_mds([source], tmp_path / "t", Choices(tokenizer_path))


def test_an_index_that_names_nothing_is_refused(
    tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    full = write_rows(tmp_path / "full", [[1, 2, 3]])
    for kind, parts, index in (("mds", "shards", {"version": 2}), ("litdata", "chunks", {"config": {}})):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "index.json").write_text(json.dumps({**index, parts: []}))
        for sources in ([Path(kind)], [full, tmp_path / kind]) if kind == "mds" else ([Path(kind)],):
            with pytest.raises(UserError, match=f"{kind}/index.json names no {parts}: the dataset is empty") as caught:
                convert_to_store(sources, tmp_path / "s", Choices(tokenizer_path))
            assert str(caught.value.hint).startswith("ls ")
    assert not (tmp_path / "s").exists()
