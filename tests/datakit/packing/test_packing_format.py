"""docs/formats/packing-index.md is enough to write a second reader from: this one uses nothing of datakit to read."""

import json
from pathlib import Path

import numpy as np
import xxhash

from datakit import pack
from tests.datakit.packing.test_pack import make_store


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
