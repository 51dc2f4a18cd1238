"""Parsers of a token store's files: manifest, index, origins, packing index, archive, and of tokenizers' files."""

import base64
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import orjson

from datakit import write_store
from datakit.files.durable import FileDigest
from datakit.format.archive_record import ArchiveRecord
from datakit.format.manifest import FILE_NAME, Manifest, content_checksum
from datakit.format.origins import Origins
from datakit.format.seekable_zstd import SeekableReader, pack
from datakit.format.shard import ShardIndex, encode_index
from datakit.rows.packed_rows import COLUMNS, PackingRecord
from datakit.tokenization.rank_file import read_rank_file, read_tekken, sidecar_path
from datakit.tokenization.tokenizer import open_tokenizer
from tests.ckptkit.support.hf_folders import TOKENIZER
from tools.fuzzing.fuzz import Parser
from tools.fuzzing.mutation import mutated_json

DIGEST = FileDigest(80, "0" * 16)
TOKENS = [{"rank": number, "token_bytes": base64.b64encode(bytes([number])).decode()} for number in range(256)]
TEKKEN = {
    "config": {
        "pattern": "a",
        "num_vocab_tokens": 258,
        "default_vocab_size": 258,
        "default_num_special_tokens": 2,
        "version": "v3",
    },
    "vocab": TOKENS,
    "special_tokens": [{"rank": 0, "token_str": "<s>", "is_control": True}],
}
BYTES = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "normalizer": None,
    "post_processor": None,
    "added_tokens": [
        {
            "id": 2,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {"a": 0, "b": 1, "ab": 3},
        "merges": [["a", "b"]],
    },
}
RANKS = b"".join(b"%s %d\n" % (base64.b64encode(bytes([number])), number) for number in range(256))
SIDECAR = {"pattern": r"\S+|\s+", "special_tokens": {"<|endoftext|>": 256}}


def store_file(suffix: str) -> Callable[[], Sequence[bytes]]:
    """Return what makes the file of a small store that has a name's end."""

    def seeds() -> list[bytes]:
        with TemporaryDirectory() as folder:
            write_store(f"{folder}/store", [[1, 2, 3], [], [4] * 9], vocab_size=10, shard_documents=2)
            return [path.read_bytes() for path in sorted(Path(folder, "store").rglob(f"*{suffix}"))]

    return seeds


def sealed_record(data: bytes) -> bytes:
    """Return a record of JSON with its checksum."""
    try:
        content = orjson.loads(data)
        if isinstance(content, dict):
            return orjson.dumps(content | {"checksum": content_checksum(content)})
    except (TypeError, ValueError):
        pass
    return data


def packing() -> list[bytes]:
    """Return the record of a packing index."""
    files = {name: FileDigest(count, "0" * 16) for name, count in zip(COLUMNS, (8, 16, 8), strict=True)}
    return [PackingRecord("f" * 32, "d" * 32, "pad", 8, 4, 3, 5, 2, (1,), files).encode()]


def read_origins(data: bytes) -> None:
    """Read all origins of a file that claims few, else the first."""
    origins = Origins(Path("shard.origin"), data=memoryview(data))
    for number in range(min(origins.num_documents, 20)):
        _ = origins[number]


def read_index(data: bytes) -> None:
    """Read an index, and look up a byte in it."""
    index = ShardIndex("shard.idx", memoryview(data))
    index.sequence_at(5)


def read_frames(data: bytes) -> None:
    """Read the first MiB of an archived file."""
    reader = SeekableReader("shard.bin.zst", len(data), lambda start, stop: data[start:stop])
    with contextlib.suppress(IndexError):
        reader.read(0, min(reader.size_bytes, 1 << 20))


def read_sidecar(data: bytes) -> None:
    """Read a rank file whose sidecar says this."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "ranks.tiktoken")
        sidecar_path(path).write_bytes(data)
        read_rank_file(path, RANKS)


def read_ranks(data: bytes) -> None:
    """Read a rank file of a sound sidecar."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "ranks.tiktoken")
        sidecar_path(path).write_bytes(json.dumps(SIDECAR).encode())
        read_rank_file(path, data)


def read_tokenizer(data: bytes) -> None:
    """Open a tokenizer.json."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_bytes(data)
        open_tokenizer(path)


def archive_record() -> list[bytes]:
    """Return the record of an archive."""
    return [ArchiveRecord(3, 1 << 20, DIGEST, {"shard-000000-000.bin": DIGEST}).encode()]


STORES = (
    Parser(
        "manifest",
        store_file(FILE_NAME),
        lambda data: Manifest.parse("manifest.json", data),
        sealed_record,
        mutated_json,
    ),
    Parser("idx", lambda: [encode_index(np.array([3, 0, 5], np.int32), np.dtype("<u2"))], read_index),
    Parser("origin", store_file(".origin"), read_origins),
    Parser(
        "packing-record", packing, lambda data: PackingRecord.parse("packing.json", data), sealed_record, mutated_json
    ),
    Parser(
        "archive-record",
        archive_record,
        lambda data: ArchiveRecord.parse("archive.json", data),
        sealed_record,
        mutated_json,
    ),
    Parser("seekable-zstd", lambda: [b"".join(pack([b"tokens" * 400], 3, 512))], read_frames),
    Parser(
        "tekken",
        lambda: [json.dumps(TEKKEN).encode()],
        lambda data: read_tekken(Path("tekken.json"), data),
        mutate=mutated_json,
    ),
    Parser("rank-file", lambda: [RANKS], read_ranks),
    Parser(
        "tokenizer-json", lambda: [TOKENIZER.encode(), json.dumps(BYTES).encode()], read_tokenizer, mutate=mutated_json
    ),
    Parser("rank-sidecar", lambda: [json.dumps(SIDECAR).encode()], read_sidecar, mutate=mutated_json),
)
