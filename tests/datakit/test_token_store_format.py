"""docs/formats/token-store.md is enough to write a second reader from: this one uses nothing of datakit to read."""

import json
import struct
from pathlib import Path

import numpy as np
import xxhash

from datakit import Blend, Recipe, TokenStore, preprocess
from tests.datakit.conftest import write_jsonl


def compact(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_every_field_is_as_the_page_says(tmp_path: Path, tokenizer_path: str, texts: list[str]) -> None:
    corpus = write_jsonl(tmp_path / "größe.jsonl", texts)
    preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path, append_eod=True), item_bytes=9000)
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_bytes())
    assert (
        xxhash.xxh3_64_hexdigest(compact({k: v for k, v in manifest.items() if k != "checksum"}))
        == manifest["checksum"]
    )
    identity = [manifest["dtype"], [[shard["num_tokens"], shard["bin"]["xxh3_64"]] for shard in manifest["shards"]]]
    assert xxhash.xxh3_128_hexdigest(compact(identity)) == manifest["fingerprint"]
    assert xxhash.xxh3_128_hexdigest(Path(tokenizer_path).read_bytes()) == manifest["tokenizer"]["fingerprint"]
    number, stream = 0, b""
    for shard in manifest["shards"]:
        files = {kind: (tmp_path / "s" / f"{shard['name']}.{kind}").read_bytes() for kind in ("bin", "idx", "origin")}
        for kind, content in files.items():
            digest = {"size_bytes": len(content), "xxh3_64": xxhash.xxh3_64_hexdigest(content)}
            assert shard[kind] == digest
        magic, version, dtype, num_sequences, boundaries = struct.unpack_from("<9sQBQQ", files["idx"])
        assert (magic, version, dtype, boundaries) == (b"MMIDIDX\0\0", 1, 8, num_sequences + 1)
        lengths = np.frombuffer(files["idx"], "<i4", num_sequences, 34)
        offsets = np.frombuffer(files["idx"], "<i8", num_sequences, 34 + 4 * num_sequences)
        assert len(files["idx"]) == 34 + 12 * num_sequences + 8 * boundaries
        magic, version, zero, num_documents, table = struct.unpack_from("<8sIIQQ", files["origin"])
        assert (magic, version, zero, num_documents) == (b"TFORIGIN", 1, 0, shard["num_documents"])
        assert len(files["origin"]) == 32 + table + 20 * num_documents
        sources = json.loads(files["origin"][32 : 32 + table])
        at = 32 + table
        places = np.frombuffer(files["origin"], "<u8", num_documents, at)
        names, lines, checks = (
            np.frombuffer(files["origin"], "<u4", num_documents, at + before * num_documents) for before in (8, 12, 16)
        )
        for i in range(num_documents):
            tokens = files["bin"][offsets[i] : offsets[i] + 2 * lengths[i]]
            row = struct.pack("<QII", places[i], names[i], lines[i])
            assert xxhash.xxh3_64_intdigest(row + tokens) & 0xFFFFFFFF == checks[i]
            content = Path(sources[names[i]]).read_bytes()
            assert json.loads(content[places[i] :].split(b"\n")[0])["text"] == texts[number]
            assert json.loads(content.split(b"\n")[shard["first_line"] + lines[i]])["text"] == texts[number]
            number += 1
        stream += files["bin"]
    assert number == len(texts) == manifest["num_documents"]
    tokens = np.frombuffer(stream, "<u2")
    assert len(tokens) == manifest["num_tokens"]

    row_length = 16
    num_rows = (len(tokens) - 1) // row_length
    blend = Blend([(TokenStore.open(tmp_path / "s"), 1.0)], seq_length=row_length, seed=9)
    batch = blend.batch(np.arange(2 * num_rows))
    for k in (0, 1, 2, num_rows - 1, num_rows, 2 * num_rows - 1):
        key = f"9/{manifest['fingerprint']}/{k // num_rows}".encode()
        start = permuted(k % num_rows, num_rows, key) * row_length
        assert batch.tokens[k].tolist() == tokens[start : start + row_length].tolist()
        assert batch.labels[k].tolist() == tokens[start + 1 : start + 1 + row_length].tolist()


def permuted(value: int, size: int, key: bytes) -> int:
    num_bits = max(2, (size - 1).bit_length())
    while True:
        left_bits, right_bits = num_bits // 2, -(-num_bits // 2)
        left, right = value >> right_bits, value % (1 << right_bits)
        for i in range(8):
            mixed = mix(right ^ xxhash.xxh3_64_intdigest(key, seed=i)) % (1 << left_bits)
            left, right, left_bits, right_bits = right, left ^ mixed, right_bits, left_bits
        value = left << right_bits | right
        if value < size:
            return value


def mix(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ x >> shift) * factor % (1 << 64)
    return x
