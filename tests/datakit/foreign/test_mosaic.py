"""Mosaic: MDS shards as its writer lays them out become stores; what contradicts itself or is pickled is refused."""

import gzip
import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datakit.foreign.foreign_store import Choices
from datakit.foreign.mosaic import from_mds
from tests.datakit.conftest import documents_of, files_of, mutate, named_or_sound
from threefold.errors import CheckFailed, UserError

DOCUMENTS = [[3, 1, 2, 0], [5] * 400, [7, 0], [9, 8, 0], [6]]
PACK: dict[str, Callable[[bytes], bytes]] = {"zstd:7": zstandard.compress, "gz": gzip.compress}
CODES = {"uint16": 16, "int32": 33, "int64": 65}


def encode(encoding: str, value: Any) -> bytes:
    """One column of a sample."""
    kind, dtype, shape = f"{encoding}::".split(":")[:3]
    if kind != "ndarray":
        return value if isinstance(value, bytes) else str(value).encode()
    array = np.array(value, dtype or "uint16")
    width = min(width for width in (1, 2, 4, 8) if max(array.shape) < 1 << 8 * width)
    dims = np.array(array.shape, f"<u{width}").tobytes()
    head = b"" if dtype else bytes([CODES[array.dtype.name]])
    head += b"" if shape else bytes([array.ndim << 2 | (1, 2, 4, 8).index(width)]) + dims
    return head + array.tobytes()


def write_mds(
    folder: Path,
    columns: dict[str, str],
    samples: Sequence[dict[str, Any]],
    *,
    compression: str | None = None,
    shard_samples: int = 2,
    changes: dict[str, Any] | None = None,
) -> Path:
    """A dataset; `changes` are of each shard's entry in the index."""
    folder.mkdir(parents=True)
    names = sorted(columns)
    sizes = [
        int(np.dtype(columns[name].split(":")[1]).itemsize * int(columns[name].split(":")[2]))
        if columns[name].count(":") == 2
        else None
        for name in names
    ]
    config = json.dumps({"version": 2, "format": "mds", "column_names": names}).encode()
    shards = []
    for number, at in enumerate(range(0, len(samples), shard_samples)):
        encoded = []
        for sample in samples[at : at + shard_samples]:
            parts = [encode(columns[name], sample[name]) for name in names]
            variable = [len(part) for part, size in zip(parts, sizes, strict=True) if size is None]
            encoded.append(struct.pack(f"<{len(variable)}I", *variable) + b"".join(parts))
        first = 8 + 4 * len(encoded) + len(config)
        offsets = first + np.cumsum([0, *map(len, encoded)])
        raw = struct.pack("<I", len(encoded)) + offsets.astype("<u4").tobytes() + config + b"".join(encoded)
        name = f"shard.{number:05}.mds"
        hashes = {"sha1": hashlib.sha1(raw).hexdigest(), "xxh64": xxhash.xxh64_hexdigest(raw), "unknown": "1"}
        entry: dict[str, Any] = {"raw_data": {"basename": name, "bytes": len(raw), "hashes": hashes}, "zip_data": None}
        if compression:
            name, raw = f"{name}.{compression.split(':')[0]}", PACK[compression](raw)
            entry["zip_data"] = {"basename": name, "bytes": len(raw), "hashes": {}}
        (folder / name).write_bytes(raw)
        shards.append(
            {
                "version": 2, "format": "mds", "compression": compression, "hashes": [], "size_limit": 1, **entry,
                "samples": len(encoded), "column_names": names, "column_sizes": sizes,
                "column_encodings": [columns[name] for name in names], **(changes or {}),
            }
        )  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def tokens_only(documents: Sequence[Sequence[int]] = DOCUMENTS) -> list[dict[str, Any]]:
    return [{"tokens": document} for document in documents]


@pytest.mark.parametrize("compression", [None, "zstd:7", "gz"])
@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:int32", "ndarray:uint16", "ndarray:int64"])
def test_arrays_become_documents(tmp_path: Path, tokenizer_path: str, encoding: str, compression: str | None) -> None:
    source = write_mds(tmp_path / "in", {"tokens": encoding}, tokens_only(), compression=compression)
    store = from_mds([source, source / "index.json"], tmp_path / "s", Choices(tokenizer_path))
    assert documents_of(store) == [*DOCUMENTS, *DOCUMENTS]
    assert (store.dtype, store.manifest.settings["documents"]) == ("uint16", "items")
    assert [store.origin(number).line for number in range(5)] == [1, 2, 1, 2, 1]
    for number in range(0 if compression else 5):
        origin, dtype = store.origin(number), encoding.partition(":")[2] or "uint16"
        tokens = np.fromfile(origin.path, dtype, len(store.document(number)), offset=origin.offset_bytes)
        assert np.array_equal(tokens, store.document(number))


def test_the_column_is_chosen_among_others(tmp_path: Path, tokenizer_path: str) -> None:
    columns = {"a": "str", "ids": "ndarray:int32", "more": "ndarray:uint16:3", "z": "pkl"}
    samples = [{"a": "x" * n, "ids": ids, "more": [n, n, n], "z": b"?" * n} for n, ids in enumerate(DOCUMENTS)]
    source = write_mds(tmp_path / "in", columns, samples)
    with pytest.raises(UserError, match=r"more than one column that may hold tokens: a \(str\), ids \(ndarray:int32\)"):
        from_mds([source], tmp_path / "s", Choices(tokenizer_path))
    for column, documents in (("ids", DOCUMENTS), ("more", [[n, n, n] for n in range(5)])):
        store = from_mds([source], tmp_path / column, Choices(tokenizer_path, column=column))
        assert documents_of(store) == documents
    for column, fault in (
        ("z", "is pkl; pickle is never loaded"),
        ("a", "is str; tokens are"),
        ("b", "has no column 'b'"),
    ):
        with pytest.raises(UserError, match=fault):
            from_mds([source], tmp_path / "s", Choices(tokenizer_path, column=column))
    pickled = write_mds(tmp_path / "pickled", {"tokens": "pkl"}, [{"tokens": b"cos\nsystem\n"}])
    with pytest.raises(UserError, match=r"no column that may hold tokens: tokens \(pkl\)"):
        from_mds([pickled], tmp_path / "s", Choices(tokenizer_path))


def test_raw_bytes_need_their_dtype(tmp_path: Path, tokenizer_path: str) -> None:
    samples = [{"tokens": np.array(document, "<i8").tobytes()} for document in DOCUMENTS]
    source = write_mds(tmp_path / "in", {"tokens": "bytes"}, samples)
    with pytest.raises(UserError, match="raw bytes, which do not say"):
        from_mds([source], tmp_path / "s", Choices(tokenizer_path))
    with pytest.raises(UserError, match="every second token is 0"):
        from_mds([source], tmp_path / "s", Choices(tokenizer_path, dtype="int32"))
    store = from_mds([source], tmp_path / "s", Choices(tokenizer_path, dtype="int64"))
    assert documents_of(store) == DOCUMENTS
    assert store.manifest.settings["dtype"] == "int64"
    array = write_mds(tmp_path / "array", {"tokens": "ndarray:int32"}, tokens_only())
    with pytest.raises(UserError, match="'tokens' is int32, not int64"):
        from_mds([array], tmp_path / "t", Choices(tokenizer_path, dtype="int64"))


def test_rows_of_other_shapes(tmp_path: Path, tokenizer_path: str) -> None:
    flat = write_mds(tmp_path / "flat", {"tokens": "ndarray"}, tokens_only([[[1, 2, 3]], [[4]]]))  # type: ignore[list-item]
    assert documents_of(from_mds([flat], tmp_path / "s", Choices(tokenizer_path))) == [[1, 2, 3], [4]]
    square = write_mds(tmp_path / "square", {"tokens": "ndarray"}, tokens_only([[[1, 2], [3, 4]]]))  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"sample 0 has tokens of shape \(2, 2\)"):
        from_mds([square], tmp_path / "t", Choices(tokenizer_path))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"samples": 3}, "says 2 samples, its index 3"),
        ({"samples": True}, "samples is True, a number from 0 expected"),
        ({"version": 1}, "version 1, format 'mds'"),
        ({"format": "json"}, "format 'json'"),
        ({"compression": "br", "zip_data": {"basename": "x", "bytes": 1}, "raw_data": {"basename": "y", "bytes": 1}},
         "compression is 'br'; zstd and gz are read"),
        ({"column_sizes": []}, "do not fit the columns"),
        ({"column_sizes": [8]}, r"sample 0 has columns of \[8\] bytes"),
        ({"raw_data": {"basename": "../in/shard.00000.mds", "bytes": 1}}, "is not a file of this folder"),
        ({"raw_data": {"basename": "/etc/passwd", "bytes": 1}}, "is not a file of this folder"),
        ({"raw_data": {"basename": "gone", "bytes": 1}}, "names gone, which is missing"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 1}}, "bytes, its index says 1"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 1, "hashes": ["sha1"]}}, "hashes is not a JSON object"),
        ({"raw_data": None}, "raw_data is not a JSON object"),
        ({"column_encodings": ["ndarray:float32"]}, "no column that may hold tokens"),
    ],
)  # fmt: skip
def test_an_index_of_nonsense_is_named(
    tmp_path: Path, tokenizer_path: str, changes: dict[str, Any], fault: str
) -> None:
    source = write_mds(tmp_path / "in", {"tokens": "ndarray"}, tokens_only(), changes=changes)
    with pytest.raises(UserError, match=fault) as caught:
        from_mds([source], tmp_path / "s", Choices(tokenizer_path))
    assert str(source) in caught.value.message
    assert not files_of(tmp_path / "s")


def test_a_shard_of_another_version_may_say_no_format(tmp_path: Path, tokenizer_path: str) -> None:
    source = write_mds(tmp_path / "in", {"tokens": "ndarray"}, tokens_only(), changes={"version": 1})
    index = json.loads((source / "index.json").read_text())
    del index["shards"][0]["format"]
    (source / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="is of version 1, format None; version 2, 'mds' is read"):
        from_mds([source], tmp_path / "s", Choices(tokenizer_path))


@pytest.mark.parametrize("compression", [None, "zstd:7", "gz"])
def test_hashes_and_tokens_are_checked(tmp_path: Path, tokenizer_path: str, compression: str | None) -> None:
    raw_data = {"basename": "shard.00000.mds", "bytes": 0, "hashes": {"xxh64": "0" * 16}}
    source = write_mds(tmp_path / "in", {"tokens": "ndarray"}, tokens_only()[:2], compression=compression)
    index = json.loads((source / "index.json").read_text())
    raw_data["bytes"] = index["shards"][0]["raw_data"]["bytes"]
    index["shards"][0]["raw_data"] = raw_data
    (source / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckFailed, match="its xxh64 does not hold"):
        from_mds([source], tmp_path / "s", Choices(tokenizer_path))
    beyond = write_mds(
        tmp_path / "b", {"tokens": "ndarray"}, tokens_only([[1], [2], [3, 60000]]), compression=compression
    )
    with pytest.raises(CheckFailed, match=r"shard.00001.mds.*: document 0 holds token 60000, beyond the vocabulary"):
        from_mds([beyond], tmp_path / "s", Choices(tokenizer_path))


@pytest.mark.parametrize("compression", [None, "zstd:7", "gz"])
@given(data=st.data())
def test_damage_is_named_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str, compression: str | None, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("d")
    columns = {"tokens": data.draw(st.sampled_from(["ndarray", "ndarray:int32"])), "u": "str"}
    samples = [{"u": "u", "tokens": document} for document in DOCUMENTS]
    source = write_mds(folder / "in", columns, samples, compression=compression)
    mutate(data, source, sorted(path.name for path in source.iterdir()))
    named_or_sound(source, lambda: from_mds([source], folder / "s", Choices(tokenizer_path)))
