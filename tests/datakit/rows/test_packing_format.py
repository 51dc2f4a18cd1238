"""docs/formats/packing-index.md is enough to write a second reader from: this one uses nothing of datakit to read."""

import json
from pathlib import Path

import numpy as np
import xxhash

from datakit import Blend, PackedStore, pack
from tests.datakit.rows.test_pack import make_store
from tests.datakit.test_token_store_format import permuted


def compact(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_the_page_s_example_and_every_field_are_as_it_says(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [6, 2, 0])
    folder, _ = pack(store.path, seq_length=4)
    record = json.loads((folder / "packing.json").read_bytes())
    expected = {"ends": ("<i8", [1, 3]), "starts": ("<i8", [0, 4, 6]), "sizes": ("<i4", [-4, 2, 2])}
    for name, (dtype, values) in expected.items():
        content = (folder / f"{name}.bin").read_bytes()
        assert np.frombuffer(content, dtype).tolist() == values
        assert record["files"][name] == {"size_bytes": len(content), "xxh3_64": xxhash.xxh3_64_hexdigest(content)}
    assert record.pop("checksum") == xxhash.xxh3_64_hexdigest(compact(record))
    manifest = json.loads((store.path / "manifest.json").read_bytes())
    ends = [shard["idx"]["xxh3_64"] for shard in manifest["shards"]]
    assert (record["store"], record["documents"]) == (manifest["fingerprint"], xxhash.xxh3_128_hexdigest(compact(ends)))
    counts = {"num_documents": 3, "num_tokens": 8, "num_pieces": 3, "num_rows": 2, "window_rows": [2]}
    kinds = {"format": "threefold-packing-index", "version": 1, "packing": "best_fit", "seq_length": 4}
    assert {**counts, **kinds, "window_documents": 262144}.items() <= record.items()
    assert len(record) == 13


def test_rows_are_read_in_the_order_of_the_page(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [*range(1, 40)])
    folder, _ = pack(store.path, seq_length=40)
    record = json.loads((folder / "packing.json").read_bytes())
    sums = [record["files"][name]["xxh3_64"] for name in ("ends", "starts", "sizes")]
    named = [record["store"], record["packing"], record["seq_length"], sums]
    fingerprint, num_rows = xxhash.xxh3_128_hexdigest(compact(named)), record["num_rows"]
    blend = Blend([(PackedStore.of(store.path, packing="best_fit", seq_length=40), 1.0)], seq_length=40, seed=9)
    assert num_rows > 10
    for k in (0, 1, 2, num_rows - 1, num_rows, 2 * num_rows - 1):
        key = f"9/{fingerprint}/{k // num_rows}".encode()
        assert blend.locate([k])[1].tolist() == [k]
        assert blend.rows_at(np.array([0]), np.array([k])).tolist() == [permuted(k % num_rows, num_rows, key)]
