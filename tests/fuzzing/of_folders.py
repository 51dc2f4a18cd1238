"""Parsers of other programs' files: safetensors, torch, DCP, torch_checkpointing, Hugging Face, MDS, litdata."""

import io
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.foreign.dcp.metadata import DcpChunk, DcpContents, DcpTensor, read_metadata, write_metadata
from ckptkit.foreign.hf.contents import CONFIG, INDEX, WEIGHTS, read_contents, read_places
from ckptkit.foreign.safetensors_file import read_file
from ckptkit.foreign.stored_parts import Place
from ckptkit.foreign.torch_checkpointing.folder import CUT, FILE_VERSION, TORCH, read_items
from ckptkit.foreign.torch_files.archive import read_archive, read_tensor
from ckptkit.foreign.torch_files.pickle_writer import Call, External, Global, pickled
from ckptkit.foreign.torch_files.zip_writer import TensorZip
from datakit.foreign.foreign_index import ForeignIndex
from datakit.foreign.foreign_store import Choices
from datakit.foreign.litdata import _chunks
from datakit.foreign.mosaic import _MdsFile
from tests.ckptkit.support.hf_folders import config_of, shapes_of
from tests.fuzzing.of_checkpoints import json_seeds
from threefold.storage.local import system_failure
from threefold.storage.memory import MemoryStorage
from tools.fuzzing.fuzz import Parser
from tools.fuzzing.mutation import mutated_json

KEY = "file"
CHOICES = Choices("tok.json")
HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "__metadata__": {"format": "pt"},
}
MDS = {
    "version": 2,
    "shards": [
        {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": ["sha1"],
            "samples": 2,
            "size_limit": 1,
            "column_names": ["tokens"],
            "column_encodings": ["ndarray:uint16"],
            "column_sizes": [None],
            "raw_data": {"basename": "shard.00000.mds", "bytes": 80, "hashes": {"sha1": "0"}},
            "zip_data": None,
        }
    ],
}
LITDATA = {
    "chunks": [{"chunk_bytes": 80, "chunk_size": 2, "dim": None, "filename": "chunk-0-0.bin"}],
    "config": {
        "compression": None,
        "compression_level": None,
        "data_format": ["no_header_tensor:18"],
        "data_spec": None,
        "encryption": None,
        "item_loader": "PyTreeLoader",
    },
}
ITEMS = {
    "version": FILE_VERSION,
    "world_size": 1,
    "metadata": {
        "model": {
            "rank_to_layout_info": {0: {"serialization_format": {"type": TORCH}, "file_path": "model_0.pt"}},
            "nested_path_to_metadata": {
                '["weight"]': [
                    {
                        "sharding_metadata": {
                            "type": CUT,
                            "data": {
                                "mesh_spec": {"mesh_shape": [1], "mesh_data": [0]},
                                "global_shape": [2, 3],
                                "dtype": "torch.float32",
                                "placements": [{"type": "Shard", "dim": 0}],
                            },
                        }
                    }
                ]
            },
        }
    },
}


def stored(data: bytes, **others: bytes) -> MemoryStorage:
    """Return a storage with a file of these bytes."""
    storage = MemoryStorage()
    for key, content in {KEY: data, **others}.items():
        storage.write(key, content)
    return storage


def read_header(data: bytes) -> object:
    """Read a safetensors file with this header, whose data are as long as most headers of the seed say."""
    return read_file(stored(struct.pack("<Q", len(data)) + data + bytes(26)), KEY)


def small_file() -> bytes:
    """Return a safetensors file."""
    [header] = json_seeds(HEADER)
    return struct.pack("<Q", len(header)) + header + bytes(26)


def tensor_zip(*shape: int) -> bytes:
    """Return what torch.save makes of a tensor of six numbers."""
    content = bytes(range(24))
    around = TensorZip("float32", shape, len(content))
    return around.head + content + around.tail(zlib.crc32(content))


def description() -> bytes:
    """Return the pickled description of nested values, a tensor among them."""
    kind = Global("torch", "FloatStorage")
    args = (
        External(("storage", kind, "0", "cpu", 6)),
        0,
        (2, 3),
        (3, 1),
        False,
        Call(Global("collections", "OrderedDict")),
    )
    tensor = Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
    return pickled(
        {
            "model": {"weight": tensor},
            "lr": [1, None, True, ("a", -(1 << 40))],
            "size": Call(Global("torch", "Size"), ((2, 3),)),
        }
    )


def described(data: bytes) -> bytes:
    """Return a file of torch.save that has this description, and the numbers of a tensor."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", bytes(24))
    return content.getvalue()


def read_description(data: bytes) -> object:
    """Read a file of torch.save that has this description."""
    return read_archive(stored(described(data)), KEY)


def metadata() -> bytes:
    """Return the metadata of a folder of torch.distributed.checkpoint."""
    chunks = [DcpChunk((row, 0), (1, 3), Place("__0_0.distcp", 12 * row, 12)) for row in range(2)]
    tensor = DcpTensor("float32", (2, 3), chunks)
    paths = {"model.weight": ("model", "weight"), "lr": ("lr",)}
    return write_metadata(DcpContents({"model.weight": tensor}, {"lr": Place("__0_0.distcp", 24, 9)}, paths))


def read_model(data: bytes) -> object:
    """Read a Hugging Face folder with this config.json, and the weights of the seed's."""
    return read_contents(stored(b"", **{CONFIG: data, WEIGHTS: WEIGHTS_OF_LLAMA}))


def weights() -> bytes:
    """Return the safetensors file of a small Llama, of zeros."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes_of(config_of("llama")).items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


@cache
def dataset() -> TemporaryDirectory[str]:
    """Return a folder with the files that the indices of datasets name."""
    folder = TemporaryDirectory()
    for name in ("shard.00000.mds", "chunk-0-0.bin"):
        Path(folder.name, name).write_bytes(bytes(80))
    return folder


def index_of(data: bytes) -> ForeignIndex:
    """Return the index of a dataset."""
    return ForeignIndex.parse(Path(dataset().name, "index.json"), data)


def read_mds(data: bytes) -> object:
    """Read an index.json of MosaicML streaming."""
    with as_commands_do():
        return [_MdsFile.open(shard, "in", CHOICES) for shard in index_of(data).parts("shards")]


def read_litdata(data: bytes) -> object:
    """Read an index.json of litdata."""
    with as_commands_do():
        return _chunks(index_of(data), CHOICES)


@contextmanager
def as_commands_do() -> Iterator[None]:
    """Raise what the system says of a file, such as that its name is too long, as a command reports it."""
    try:
        yield
    except OSError as error:
        raise system_failure(error) from error


WEIGHTS_OF_LLAMA = weights()
FOLDERS = (
    Parser("safetensors", lambda: [small_file()], lambda data: read_file(stored(data), KEY)),
    Parser("safetensors-header", lambda: json_seeds(HEADER), read_header, mutate=mutated_json),
    Parser("torch-zip", lambda: [tensor_zip(2, 3)], lambda data: read_tensor(stored(data), KEY, 0, len(data))),
    Parser("torch-description", lambda: [description()], read_description),
    Parser("dcp-metadata", lambda: [metadata()], lambda data: read_metadata(data, "here")),
    Parser(
        "torch-checkpointing",
        lambda: [pickle.dumps(ITEMS, protocol) for protocol in (2, 4)],
        lambda data: read_items(data, "here"),
    ),
    Parser("hf-config", lambda: json_seeds(config_of("llama")), read_model, mutate=mutated_json),
    Parser(
        "hf-index",
        lambda: json_seeds({"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}),
        lambda data: read_places(stored(b"", **{INDEX: data})),
        mutate=mutated_json,
    ),
    Parser("mds-index", lambda: json_seeds(MDS), read_mds, mutate=mutated_json),
    Parser("litdata-index", lambda: json_seeds(LITDATA), read_litdata, mutate=mutated_json),
)
