import threading
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import given

from datakit import write_store
from datakit.files.durable import FileDigest
from datakit.format.manifest import Manifest
from datakit.format.shard_entry import ScannedShards, ShardEntry
from datakit.shards.folder_shards import FolderShards
from datakit.tokenization.identity import TokenizerIdentity
from threefold.errors import CheckFailed, StorageError

numbers = st.integers(0, 2**63 - 1)
digests = st.builds(FileDigest, numbers, st.text("0123456789abcdef", min_size=16, max_size=16))


@st.composite
def entries(draw: st.DrawFn) -> ShardEntry:
    num_documents, num_tokens = draw(st.tuples(st.integers(0, 2**60), st.integers(0, 2**60)))
    name = draw(st.text("abcXYZ019-_", min_size=1, max_size=30))
    tokens = replace(draw(digests), size_bytes=2 * num_tokens)
    return ShardEntry(name, num_documents, num_tokens, draw(numbers), tokens, draw(digests), draw(digests))


@given(shards=st.lists(entries(), min_size=1, max_size=4), settings=st.dictionaries(st.text(), st.text(), max_size=2))
def test_a_manifest_is_scanned_as_it_is_parsed(shards: list[ShardEntry], settings: dict[str, str]) -> None:
    manifest = Manifest("uint16", TokenizerIdentity("none", "", 9, None, None), shards, {"shards": [], **settings})
    text = manifest.encode()
    scanned, parsed = Manifest.parse("it", text), Manifest.parse("it", orjson.dumps(orjson.loads(text)))
    assert isinstance(scanned.shards, ScannedShards)
    assert not isinstance(parsed.shards, ScannedShards)
    assert list(scanned.shards) == list(parsed.shards) == shards
    assert scanned.shards[-1] == shards[-1]
    assert scanned.shards[1:] == tuple(shards[1:])
    for name in ("fingerprint", "num_tokens", "num_documents", "settings", "shard_tokens", "shard_documents"):
        assert getattr(scanned, name) == getattr(parsed, name), name
    assert scanned.encode() == text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"num_tokens": 3,\n      "', b'"num_tokens": 03,\n      "'),
        (b'"num_tokens": 3,\n      "', b'"num_tokens": -3,\n      "'),
        (b'"num_tokens": 3,\n      "', b'"num_tokens": 9223372036854775808,\n      "'),
        (b'"first_line"', b'"first"'),
        (b"shard-000000-000", b"shard/000000-000"),
        (b"\n  ]", b"\n  }"),
        (b'"shards": [\n', b'"shards": []\n'),
        (b'"shards"', b'"pieces"'),
    ],
)
def test_what_is_laid_out_otherwise_is_not_scanned(tmp_path: Path, old: bytes, new: bytes) -> None:
    text = write_store(tmp_path / "a", [[1, 2], [3]], vocab_size=100).manifest.encode()
    assert ScannedShards.scan(text)
    assert old in text
    assert ScannedShards.scan(text.replace(old, new, 1)) is None
    for end in range(text.index(b"\n  ],") + 3):  # cut short
        assert ScannedShards.scan(text[:end]) is None


@pytest.mark.parametrize("suffix", ["bin", "idx", "origin"])
def test_of_many_shards_a_wrong_size_is_raised_by_a_read(tmp_path: Path, suffix: str) -> None:
    last = write_store(tmp_path / "a", [[1, 2], [3], [4, 5]], vocab_size=100, shard_documents=1).manifest.shards[-1]
    file = tmp_path / "a" / f"{last.name}.{suffix}"
    for content, error in ((file.read_bytes()[:-1], CheckFailed), (None, StorageError)):
        file.unlink() if content is None else file.write_bytes(content)
        for reading in ("mmap", "pread"):
            shards = FolderShards.open(tmp_path / "a", reading, checked_at_once=2)  # type: ignore[arg-type]
            for thread in threading.enumerate():
                if thread.name == "datakit-sizes":
                    thread.join(60)
            with pytest.raises(error, match=file.name):
                shards.file_pieces(0, 0, 2) if reading == "pread" else shards.shard(0)
