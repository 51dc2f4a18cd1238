"""docs/formats/archive.md is enough to write a second reader from: this one uses nothing of datakit to read."""

import json
import struct
from pathlib import Path

import numpy as np
import xxhash
import zstandard

from tests.datakit.support.archived import FRAME_BYTES, make_archive, make_store


def test_every_field_is_as_the_page_says(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s").path
    make_archive(store, str(tmp_path / "a"))
    record = json.loads((tmp_path / "a" / "archive.json").read_bytes())
    rest = {key: value for key, value in record.items() if key != "checksum"}
    compact = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert record["checksum"] == xxhash.xxh3_64_hexdigest(compact)
    assert (record["format"], record["version"], record["level"]) == ("threefold-archive", 1, 3)
    assert record["frame_bytes"] == FRAME_BYTES
    manifest_bytes = (tmp_path / "a" / "manifest.json").read_bytes()
    digest = {"size_bytes": len(manifest_bytes), "xxh3_64": xxhash.xxh3_64_hexdigest(manifest_bytes)}
    assert record["manifest"] == digest
    assert manifest_bytes == (store / "manifest.json").read_bytes()
    manifest = json.loads(manifest_bytes)
    names = [f"{shard['name']}.{kind}.zst" for shard in manifest["shards"] for kind in ("bin", "idx", "origin")]
    assert [entry["name"] for entry in record["files"]] == names
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"archive.json", "manifest.json", *names}
    for entry in record["files"]:
        content = (tmp_path / "a" / entry["name"]).read_bytes()
        assert (entry["size_bytes"], entry["xxh3_64"]) == (len(content), xxhash.xxh3_64_hexdigest(content))
        assert frames_of(content) == (store / entry["name"].removesuffix(".zst")).read_bytes()


def frames_of(file: bytes) -> bytes:
    """The content of a seekable file, by its table."""
    num_frames, flags, magic = struct.unpack_from("<IBI", file, len(file) - 9)
    assert (flags, magic) == (0x80, 0x8F92EAB1)
    table = len(file) - 9 - 12 * num_frames - 8
    assert struct.unpack_from("<II", file, table) == (0x184D2A5E, 12 * num_frames + 9)
    content, at = b"", 0
    for packed_bytes, size_bytes, check in np.frombuffer(file[table + 8 : -9], "<u4").reshape(-1, 3).tolist():
        frame = zstandard.ZstdDecompressor().decompress(file[at : at + packed_bytes])
        parameters = zstandard.get_frame_parameters(file[at : at + packed_bytes])
        assert (parameters.content_size, parameters.has_checksum, parameters.dict_id) == (size_bytes, True, 0)
        assert (len(frame), xxhash.xxh64_intdigest(frame) & 0xFFFFFFFF) == (size_bytes, check)
        assert size_bytes == FRAME_BYTES or at + packed_bytes == table
        content, at = content + frame, at + packed_bytes
    assert at == table
    return content
