"""Litdata: chunks as its writer lays them out become stores; what contradicts itself or is pickled is refused."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datakit.foreign.foreign_store import Choices
from datakit.foreign.litdata import from_litdata
from tests.datakit.conftest import documents_of, files_of, mutate, named_or_sound
from threefold.errors import CheckFailed, UserError

DOCUMENTS = [[3, 1, 2, 0], [5] * 400, [], [7, 0], [9, 8, 0], [6]]
DTYPES = {"no_header_tensor:18": "<i8", "no_header_tensor:20": "<u2", "no_header_numpy:2": "<i4"}
FLAT = {"item_loader": "TokensLoader"}


def headed(order: str, code: int, tokens: Sequence[int]) -> bytes:
    """An array of shape [1, n] with its header."""
    return struct.pack(f"{order}4I", code, 2, 1, len(tokens)) + np.array(tokens, "<i4").tobytes()


ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "tensor": lambda tokens: headed(">", 15, tokens),
    "numpy": lambda tokens: headed("<", 2, tokens),
    "bytes": lambda tokens: np.array(tokens, "<i8").tobytes(),
    "str": lambda text: b"t" * len(text),
    "pickle": lambda _: b"cos\nsystem\n",
    **{form: lambda tokens, dtype=dtype: np.array(tokens, dtype).tobytes() for form, dtype in DTYPES.items()},  # type: ignore[misc]
}


def spec(names: Sequence[str]) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps(
        [1, {"type": "builtins.dict", "context": json.dumps(names), "children_spec": [leaf for _ in names]}]
    )


def pack_batches(items: Sequence[bytes], frame_items: int = 2) -> bytes:
    frames = [items[at : at + frame_items] for at in range(0, len(items), frame_items)]
    packed = [zstandard.compress(b"".join(frame)) for frame in frames]
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, len(items), frame_items, len(frames))
    head += np.cumsum([0, *map(len, items)]).astype("<u4").tobytes()
    at = len(head) + 24 * len(frames)
    for number, (frame, data) in enumerate(zip(frames, packed, strict=True)):
        head += struct.pack("<IIQII", number * frame_items, len(frame), at, len(data), sum(map(len, frame)))
        at += len(data)
    return head + b"".join(packed)


def write_litdata(
    folder: Path,
    documents: Sequence[Sequence[int]] = DOCUMENTS,
    forms: Sequence[str] = ("no_header_tensor:18",),
    *,
    packing: str = "",
    chunk_items: int = 4,
    config: dict[str, Any] | None = None,
    chunk: dict[str, Any] | None = None,
) -> Path:
    """A dataset; `config` and `chunk` are changes of the index."""
    folder.mkdir(parents=True)
    is_flat = (config or {}).get("item_loader") == "TokensLoader"
    chunks = []
    for number, first in enumerate(range(0, len(documents), chunk_items)):
        items = []
        for document in documents[first : first + chunk_items]:
            leaves = [ENCODERS[form](document) for form in forms]
            sizes = b"" if is_flat else struct.pack(f"<{len(leaves)}I", *map(len, leaves))
            items.append(sizes + b"".join(leaves))
        stored = [zstandard.compress(item) for item in items] if packing == "sample" else items
        offsets = 8 + 4 * len(items) + np.cumsum([0, *map(len, stored)])
        data = struct.pack("<I", len(items)) + offsets.astype("<u4").tobytes() + b"".join(stored)
        if packing == "batch":
            data = pack_batches(items)
        name = f"chunk-0-{number}.zstd.bin" if packing == "chunk" else f"chunk-0-{number}.bin"
        (folder / name).write_bytes(zstandard.compress(data) if packing == "chunk" else data)
        entry = {"chunk_bytes": len(data), "chunk_size": len(items), "dim": None, "filename": name}
        chunks.append(entry | (chunk or {}))
    all_config = {
        "compression": "zstd" if packing else None, "compression_level": packing if packing != "chunk" else None,
        "data_format": list(forms), "data_spec": spec([f"leaf{i}" for i in range(len(forms))]), "encryption": None,
        "item_loader": "PyTreeLoader", **(config or {}),
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": all_config}))
    return folder


@pytest.mark.parametrize("packing", ["", "chunk", "batch", "sample"])
@pytest.mark.parametrize("form", ["no_header_tensor:18", "no_header_tensor:20", "no_header_numpy:2", "tensor", "numpy"])
def test_items_become_documents(tmp_path: Path, tokenizer_path: str, form: str, packing: str) -> None:
    source = write_litdata(tmp_path / "in", forms=[form], packing=packing)
    store = from_litdata([source, source / "index.json"], tmp_path / "s", Choices(tokenizer_path))
    assert documents_of(store) == [*DOCUMENTS, *DOCUMENTS]
    assert (store.dtype, store.manifest.settings["documents"]) == ("uint16", "items")
    assert [store.origin(number).line for number in range(6)] == [1, 2, 3, 4, 1, 2]
    for number in range(0 if packing else 6):
        origin, dtype = store.origin(number), DTYPES.get(form, "<i4")
        tokens = np.fromfile(origin.path, dtype, len(store.document(number)), offset=origin.offset_bytes)
        assert np.array_equal(tokens, store.document(number))


@pytest.mark.parametrize("config", [FLAT, {"item_loader": "TokensLoader", "data_spec": None}])
@pytest.mark.parametrize("packing", ["", "chunk"])
def test_items_of_a_tokens_loader_are_documents_too(
    tmp_path: Path, tokenizer_path: str, packing: str, config: dict[str, Any]
) -> None:
    source = write_litdata(tmp_path / "in", packing=packing, config=config)
    assert documents_of(from_litdata([source], tmp_path / "s", Choices(tokenizer_path))) == DOCUMENTS


def test_an_index_of_an_early_version(tmp_path: Path, tokenizer_path: str) -> None:
    """It counted the bytes of items alone, and told a TokensLoader by `dim` only."""
    size_bytes = sum(8 * len(document) for document in DOCUMENTS)
    source = write_litdata(
        tmp_path / "in", chunk_items=9, config=FLAT, chunk={"chunk_bytes": size_bytes, "dim": size_bytes // 8}
    )
    index = json.loads((source / "index.json").read_text())
    del index["config"]["item_loader"], index["config"]["compression_level"]
    (source / "index.json").write_text(json.dumps(index))
    assert documents_of(from_litdata([source], tmp_path / "s", Choices(tokenizer_path))) == DOCUMENTS


def test_the_leaf_is_chosen_among_others(tmp_path: Path, tokenizer_path: str) -> None:
    source = write_litdata(tmp_path / "in", forms=["str", "no_header_numpy:2", "pickle", "no_header_tensor:18"])
    with pytest.raises(UserError, match=r"more than one leaf that may hold tokens: leaf0 \(str\), leaf1 \(no_header"):
        from_litdata([source], tmp_path / "s", Choices(tokenizer_path))
    for column in ("leaf1", "leaf3"):
        store = from_litdata([source], tmp_path / column, Choices(tokenizer_path, column=column))
        assert documents_of(store) == DOCUMENTS
    for column, fault in (
        ("leaf2", "is pickle; pickle is never loaded"),
        ("leaf0", "is str; tokens are"),
        ("b", "has no leaf 'b'"),
    ):
        with pytest.raises(UserError, match=fault):
            from_litdata([source], tmp_path / "s", Choices(tokenizer_path, column=column))
    pickled = write_litdata(tmp_path / "pickled", forms=["pickle"])
    with pytest.raises(UserError, match=r"no leaf that may hold tokens: leaf0 \(pickle\); pickle is never loaded"):
        from_litdata([pickled], tmp_path / "s", Choices(tokenizer_path))


def test_raw_bytes_need_their_dtype(tmp_path: Path, tokenizer_path: str) -> None:
    source = write_litdata(tmp_path / "in", forms=["bytes"])
    with pytest.raises(UserError, match="raw bytes, which do not say"):
        from_litdata([source], tmp_path / "s", Choices(tokenizer_path))
    store = from_litdata([source], tmp_path / "s", Choices(tokenizer_path, dtype="int64"))
    assert documents_of(store) == DOCUMENTS
    tensors = write_litdata(tmp_path / "tensors")
    with pytest.raises(UserError, match="'leaf0' is int64"):
        from_litdata([tensors], tmp_path / "t", Choices(tokenizer_path, dtype="int32"))


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"encryption": {"algorithm": "fernet"}}, "chunks are encrypted"),
        ({"compression": "lz4"}, "has compression 'lz4'"),
        ({"compression": "zstd", "compression_level": "tree"}, "compression_level 'tree'"),
        ({"item_loader": "ParquetLoader"}, "items of 'ParquetLoader'"),
        ({"data_format": []}, "no leaf that may hold tokens: none"),
        ({"data_format": None}, "data_format is None, a list expected"),
        ({"data_format": ["no_header_tensor:0"]}, r"no leaf that may hold tokens: leaf0 \(no_header_tensor:0\)"),
        ({"data_format": ["no_header_tensor:99"]}, "no leaf that may hold tokens"),
        ({"data_format": ["no_header_tensor:18"] * 2}, "more than one leaf that may hold tokens: 0"),
        ({"data_format": ["tensor"], "item_loader": "TokensLoader"}, "is of a TokensLoader but"),
    ],
)
def test_a_config_of_nonsense_is_named(tmp_path: Path, tokenizer_path: str, config: dict[str, Any], fault: str) -> None:
    source = write_litdata(tmp_path / "in")
    index = json.loads((source / "index.json").read_text())
    index["config"] |= config
    (source / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=fault) as caught:
        from_litdata([source], tmp_path / "s", Choices(tokenizer_path))
    assert str(source) in caught.value.message
    assert not files_of(tmp_path / "s")


@pytest.mark.parametrize(
    ("chunk", "fault"),
    [
        ({"chunk_size": 7}, "says 4 items, its index 7"),
        ({"chunk_size": -1}, "chunk_size is -1, a number from 0 expected"),
        ({"chunk_bytes": 1}, "its index says 1"),
        ({"filename": "../in/chunk-0-0.bin"}, "is not a file of this folder"),
        ({"filename": "gone"}, "names gone, which is missing"),
    ],
)
def test_a_chunk_of_nonsense_is_named(tmp_path: Path, tokenizer_path: str, chunk: dict[str, Any], fault: str) -> None:
    source = write_litdata(tmp_path / "in", chunk=chunk)
    with pytest.raises(UserError, match=fault) as caught:
        from_litdata([source], tmp_path / "s", Choices(tokenizer_path))
    assert str(source) in caught.value.message


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path, tokenizer_path: str) -> None:
    source = write_litdata(tmp_path / "in", [*DOCUMENTS, [1, -4]])
    with pytest.raises(CheckFailed, match=r"chunk-0-1.bin: document 2 holds token -4, beyond the vocabulary"):
        from_litdata([source], tmp_path / "s", Choices(tokenizer_path))


@pytest.mark.parametrize("packing", ["", "chunk", "batch", "sample"])
@given(data=st.data())
def test_damage_is_named_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str, packing: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("d")
    forms = data.draw(st.sampled_from([["no_header_tensor:20"], ["str", "tensor"], ["numpy", "pickle"]]))
    source = write_litdata(folder / "in", forms=forms, packing=packing)
    mutate(data, source, sorted(path.name for path in source.iterdir()))
    named_or_sound(source, lambda: from_litdata([source], folder / "s", Choices(tokenizer_path)))
