"""Parsers of folders of Zarr arrays: descriptions of both versions, lists of arrays, chunks that are compressed.

tensorstore has threads that a forked process has not, so these run in processes that never imported it before.
"""

import io
import json
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ckptkit.check.hash import hash_checkpoint
from ckptkit.foreign.zarr.folder import TensorstoreFolder
from tools.fuzzing.fuzz import Parser
from tools.fuzzing.mutation import mutated_json

WHERE = "tests.fuzzing.parsers"
PLACED = {"stage": "first", "cuts": [], "round_to": 1, "tied_to": None}
KNOWN = {
    "version": 2,
    "step": 1,
    "num_layers": 1,
    "metadata": {},
    "tensors": [{"name": "w", "dtype": "F32", "shape": [4, 6], "placement": PLACED}],
}
GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
ARRAY_2 = {
    "zarr_format": 2,
    "shape": [4, 6],
    "chunks": [2, 3],
    "dtype": "<f4",
    "compressor": None,
    "fill_value": 0,
    "order": "C",
    "filters": None,
}


def array_3(*codecs: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an array of version 3."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4, 6],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *codecs],
        "attributes": {},
    }


GZIP = {"name": "gzip", "configuration": {"level": 1}}
ZSTD = {"name": "zstd", "configuration": {"level": 1}}
SHARDS = {
    "name": "sharding_indexed",
    "configuration": {
        "chunk_shape": [1, 3],
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    },
}


@cache
def folder(kind: str) -> TemporaryDirectory[str]:
    """Return a folder with an array `w`, whose chunks tensorstore wrote."""
    import tensorstore

    place = TemporaryDirectory()
    described = {
        "zarr2": ARRAY_2,
        "gzip": array_3(GZIP),
        "zstd": array_3(ZSTD),
        "shards": {**array_3(), "codecs": [SHARDS]},
    }
    metadata = described.get(kind, array_3())
    driver = "zarr" if kind == "zarr2" else "zarr3"
    spec = {"driver": driver, "kvstore": Path(place.name, "w").as_uri() + "/", "metadata": metadata, "create": True}
    array = tensorstore.open(spec).result()
    array.write(np.arange(1, 25, dtype=np.float32).reshape(4, 6)).result()
    if kind != "zarr2":
        Path(place.name, "zarr.json").write_text(json.dumps(GROUP))
    return place


def seed(kind: str, key: str) -> bytes:
    """Return a file of a folder, as it was written."""
    return Path(folder(kind).name, key).read_bytes()


def read(kind: str, key: str, data: bytes) -> object:
    """Read all values of a folder of which one file is this."""
    path = Path(folder(kind).name)
    (path / key).write_bytes(data)
    with redirect_stderr(io.StringIO()), TensorstoreFolder(f"tensorstore:{path}").open(0) as source:
        return hash_checkpoint(source).all


def parser(name: str, kind: str, key: str, *, seeds: list[Any] | None = None) -> Parser:
    """Return what reads one file of a folder."""
    return Parser(
        name,
        (lambda: [seed(kind, key)]) if seeds is None else lambda: [json.dumps(each).encode() for each in seeds],
        lambda data: read(kind, key, data),
        **({"mutate": mutated_json} if key.endswith(("json", "array", "metadata")) else {}),
        fresh=WHERE,
    )


ZARR = (
    parser("zarr2-array", "zarr2", "w/.zarray"),
    parser("zarr3-array", "plain", "w/zarr.json"),
    parser("zarr3-shards", "shards", "w/zarr.json"),
    parser("zarr3-shard", "shards", "w/c/0/0"),
    parser("zarr3-gzip", "gzip", "w/c/0/0"),
    parser("zarr3-zstd", "zstd", "w/c/0/0"),
    parser(
        "zarr3-group",
        "plain",
        "zarr.json",
        seeds=[
            GROUP,
            {**GROUP, "attributes": {"threefold": KNOWN}},
            {**GROUP, "consolidated_metadata": {"metadata": {"w": array_3()}}},
        ],
    ),
    parser("zarr2-consolidated", "zarr2", ".zmetadata", seeds=[{"metadata": {"w/.zarray": ARRAY_2}}]),
)
