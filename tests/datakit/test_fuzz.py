"""Any bytes in place of an `.idx`, an `.origin` or a manifest: every verb ends in a result or in one clear error.

The error names the store and gives a hint; nothing else is raised, and nothing large is allocated on the word of a
header. Files are damaged under their old checksums, and with checksums made anew, so that each later check is reached.
"""

import contextlib
import dataclasses
import io
import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import TokenShard, TokenStore, write_store
from datakit.cli import build_parser
from datakit.files.durable import digest_file
from datakit.format.manifest import FILE_NAME, Manifest
from threefold.cli import run
from threefold.errors import CheckFailed, StorageError

DOCUMENTS = [[(7 * i + j) % 300 for j in range(i % 9)] for i in range(30)]
MAX_ALLOCATED_BYTES = 64 << 20
HUGE = [0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
PARSER = build_parser()
EXAMPLES = settings(max_examples=15)


@dataclasses.dataclass(frozen=True)
class Place:
    """A store that is damaged and mended again and again, a sound one, and where outputs go."""

    store: Path
    sound: Path
    output: Path
    tokenizer: str
    manifest: Manifest

    @property
    def stem(self) -> Path:
        return self.store / "shard-000001-000"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("damaged", "sound"):
        write_store(folder / name, DOCUMENTS, vocab_size=300, shard_documents=10)
    manifest = Manifest.read(folder / "damaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)  # thousands of outputs that no loss of power need survive
        yield Place(folder / "damaged", folder / "sound", folder / "output", tokenizer_path, manifest)


@st.composite
def damages(draw: st.DrawFn, sound: bytes, counts_at: tuple[int, ...]) -> bytes:
    """A file's bytes after one kind of damage; `counts_at` are the offsets of the counts in its header."""
    kind = draw(st.sampled_from(["random", "cut", "longer", "flip", "column", "count"]))
    at = draw(st.integers(0, len(sound) - 1))
    if kind == "random":
        return draw(st.binary(max_size=300))
    if kind == "cut":
        return sound[:at]
    if kind == "longer":
        return sound + draw(st.binary(min_size=1, max_size=40))
    if kind == "flip":
        return sound[:at] + bytes([sound[at] ^ draw(st.integers(1, 255))]) + sound[at + 1 :]
    changed = bytearray(sound)
    if kind == "column":  # a whole number anywhere, as the formats store them
        width = draw(st.sampled_from([4, 8]))
        number = draw(st.sampled_from(HUGE)) % (1 << 8 * width)
        changed[at : at + width] = number.to_bytes(width, "little")[: len(sound) - at]
    for offset in draw(st.lists(st.sampled_from(counts_at), unique=True)) if kind == "count" else []:
        changed[offset : offset + 8] = draw(st.sampled_from(HUGE)).to_bytes(8, "little")
    return bytes(changed)


@pytest.mark.parametrize("is_resealed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("suffix", "counts_at"), [(".idx", (17, 18, 26)), (".origin", (8, 16, 24))])
@EXAMPLES
@given(data=st.data())
def test_any_bytes_of_a_shards_file(
    place: Place, suffix: str, counts_at: tuple[int, ...], is_resealed: bool, data: st.DataObject
) -> None:
    with damaged(place, place.stem.with_suffix(suffix), data.draw, counts_at):
        if is_resealed:
            reseal(place)
        check_all_verbs(place)
        check_reads(place)


@EXAMPLES
@given(data=st.data())
def test_any_bytes_of_a_manifest(place: Place, data: st.DataObject) -> None:
    with damaged(place, place.store / FILE_NAME, data.draw, (0, 30, 60)):
        check_all_verbs(place)


JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from(HUGE) | st.integers(-(2**63), 2**63) | st.floats()
    | st.sampled_from(["", "shard-000000-000", "int32", "../../etc/passwd", "\x00", "größe", "x" * 10**5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["", "a", "é"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=2 * EXAMPLES.max_examples)
@given(data=st.data())
def test_any_value_in_a_manifest(place: Place, data: st.DataObject) -> None:
    """Fields changed or left out, all sums and the checksum right again, so that the fields' own checks are reached."""
    raw = json.loads((place.store / FILE_NAME).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        change(raw, data.draw)
    with written(place, place.store / FILE_NAME, sealed(raw)):
        check_all_verbs(place)
        check_reads(place)


def test_a_manifest_nested_beyond_measure(place: Place) -> None:
    raw = json.loads((place.store / FILE_NAME).read_bytes())
    deep = orjson.dumps(raw).replace(b'"settings":{}', b'"settings":{"a":' + b"[" * 600 + b"]" * 600 + b"}")
    with written(place, place.store / FILE_NAME, deep):
        check_all_verbs(place)


def change(raw: Any, draw: Any) -> None:
    """Change one value somewhere in a tree of JSON, or leave it out."""
    while True:
        key = draw(st.sampled_from(sorted(raw) if isinstance(raw, dict) else range(len(raw))))
        if not isinstance(raw[key], dict | list) or not raw[key] or draw(st.integers(0, 4)) == 0:
            break
        raw = raw[key]
    if draw(st.integers(0, 4)) == 0:
        del raw[key]
    else:
        raw[key] = draw(JSON)


def sealed(raw: dict[str, Any]) -> bytes:
    """A manifest's content with its sums, where they can be made, and its checksum."""
    with contextlib.suppress(Exception):
        for name in ("num_documents", "num_tokens"):
            raw[name] = sum(shard[name] for shard in raw["shards"])
        content = [raw["dtype"], [[shard["num_tokens"], shard["bin"]["xxh3_64"]] for shard in raw["shards"]]]
        raw["fingerprint"] = xxhash.xxh3_128_hexdigest(orjson.dumps(content))
    raw.pop("checksum", None)
    try:
        plain = orjson.dumps(raw, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # a number of more than 64 bits
        return json.dumps(raw).encode()
    return orjson.dumps(raw | {"checksum": xxhash.xxh3_64_hexdigest(orjson.dumps(orjson.loads(plain), option=4))})


@contextlib.contextmanager
def damaged(place: Place, file: Path, draw: Any, counts_at: tuple[int, ...]) -> Iterator[None]:
    with written(place, file, draw(damages(file.read_bytes(), counts_at))):
        yield


@contextlib.contextmanager
def written(place: Place, file: Path, content: bytes) -> Iterator[None]:
    """Put other bytes in place of a file, and the store's own back in the end."""
    sound = file.read_bytes()
    try:
        file.write_bytes(content)
        yield
    finally:
        file.write_bytes(sound)
        place.manifest.write(place.store)


def reseal(place: Place) -> None:
    """Make the manifest's digests those of the files there are."""
    first, entry, last = place.manifest.shards
    digests = {kind: digest_file(place.stem.with_suffix(f".{kind}")) for kind in ("idx", "origin")}
    shards = first, dataclasses.replace(entry, **digests), last
    dataclasses.replace(place.manifest, shards=shards).write(place.store)


def check_all_verbs(place: Place) -> None:
    store, sound, output = place.store, place.sound, place.output
    tracemalloc.start()
    for words in (
        ["verify", store],
        ["verify", store, "--json"],
        ["inspect", store],
        ["inspect", store, "--document", 12],
        ["inspect", store, "--sample", 5, "--seq-length", 8, "--json"],
        ["stats", store],
        ["diff", store, sound],
        ["diff", sound, store],
        ["merge", sound, store, "--output", output],
        ["merge", sound, store, "--output", output, "--copy"],
        ["convert", store, "--to", "megatron", "--output", output],
        ["convert", place.stem, "--output", output, "--tokenizer", place.tokenizer],
    ):
        check_verb(place, [str(word) for word in words])
        shutil.rmtree(output, ignore_errors=True)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < MAX_ALLOCATED_BYTES, f"{peak_bytes} bytes allocated"


def check_verb(place: Place, words: list[str]) -> None:
    """Run a command line: what it says of a fault names the store and what to do."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
        code = run(PARSER, words)
    if code:
        assert code in (1, 2, 3), printed.getvalue()
        if "error:" in printed.getvalue() or words[0] != "diff":
            assert str(place.store) in printed.getvalue(), f"{words}: {printed.getvalue()}"
            assert "hint: " in printed.getvalue(), f"{words}: {printed.getvalue()}"


def check_reads(place: Place) -> None:
    """Read every document and some windows of tokens through the library."""
    with allowed(place):
        shard = TokenShard(place.stem)
        for number in range(min(shard.num_documents, 20)):
            with allowed(place):
                shard.document(number)
    with allowed(place):
        store = TokenStore.open(place.store)
        for number in range(min(store.num_documents, 40)):
            with allowed(place):
                assert store.document(number).dtype == np.dtype(store.dtype)
            with allowed(place):
                assert store.origin(number).line > 0
            with allowed(place):
                assert 0 <= store.first_token(number) <= store.num_tokens
        for token in range(0, min(store.num_tokens, 200), 7):
            with allowed(place):
                assert 0 <= store.document_at(token) < store.num_documents
            with allowed(place):
                assert len(store.tokens(token, min(token + 50, store.num_tokens))) <= 50


@contextlib.contextmanager
def allowed(place: Place) -> Iterator[None]:
    """Let damage and faults of storage pass, where they name the store and what to do."""
    try:
        yield
    except (CheckFailed, StorageError) as error:
        if str(place.store) not in error.message or not error.hint:
            raise AssertionError(f"no place or no hint: {error}") from error
