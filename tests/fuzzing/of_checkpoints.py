"""Parsers of a run's files: root, part index, trees of values, and the record of what a step's stream reads."""

import json
import re
import struct
from collections.abc import Sequence
from typing import Any

from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.format.state_tree import key_of
from ckptkit.io.blocks import xxh3_64
from datakit.order.stream_record import Cursor, StreamRecord
from tests.ckptkit.format.test_hostile_files import INDEX, ROOT
from threefold.errors import UserError
from tools.fuzzing.fuzz import Parser
from tools.fuzzing.mutation import mutated_json

CHECKSUM = re.compile(rb',\s*"checksum": "[0-9a-f]{16}"\s*}\s*$')
CURSOR = {"version": 1, "num_samples": 5, "seed": 1, "seq_length": 8, "num_segments": 1, "digest": "0" * 32}
RECORD = {
    "version": 1,
    "sources": [{"path": "store", "fingerprint": "f" * 32, "rows": 7, "seq_length": 8}],
    "segments": [
        {"from_sample": 0, "weights": [1.0], "skip": [[2, 3]], "mask_digest": "", "from_step": 1, "seq_length": 8}
    ],
}


def sealed_root(data: bytes) -> bytes:
    """Return a root with the checksum of what is before it."""
    found = CHECKSUM.search(data)
    body = data[: found.start()] if found else data.rstrip().removesuffix(b"}")
    return body + f',\n"checksum": "{xxh3_64(body):016x}"\n}}\n'.encode()


def sealed_index(data: bytes) -> bytes:
    """Return a part index with its checksum."""
    return data[:-8] + struct.pack("<Q", xxh3_64(data[:-8]))


def json_seeds(*documents: Any) -> Sequence[bytes]:
    """Return some documents as JSON."""
    return [json.dumps(document).encode() for document in documents]


def document_of(data: bytes) -> Any:
    """Return what JSON says; a UserError where it is none, which its own reader would raise."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from None


def read_key(data: bytes) -> object:
    """Read a key of a tree's path, whose errors of this kind its callers report."""
    try:
        return key_of(data.decode())
    except ValueError as error:
        raise UserError(str(error)) from None


CHECKPOINTS = (
    Parser("root", lambda: [ROOT], lambda data: Root.from_bytes(data, "here"), sealed_root, mutated_json),
    Parser("part-index", lambda: [INDEX], lambda data: PartIndex.from_bytes(data, "here"), sealed_index),
    Parser("tree-key", lambda: [b"weight", b"%23a", b"#7", b"#null"], read_key),
    Parser("cursor", lambda: json_seeds(CURSOR), lambda data: Cursor.from_json(document_of(data)), mutate=mutated_json),
    Parser(
        "stream-record",
        lambda: json_seeds(RECORD),
        lambda data: StreamRecord.from_json(document_of(data)),
        mutate=mutated_json,
    ),
)
