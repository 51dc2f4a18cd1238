"""Manifest: what a token store holds, its sizes and checksums; one versioned JSON file, written last and atomically.

Every field is checked on reading; a fault is a CheckFailed that names file and field. The fields are explained in
docs/formats/token-store.md.
"""

import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import xxhash

from datakit.files.durable import FileDigest, reading, replace_durably, url_behind
from datakit.format.fields import Fields
from datakit.format.misplaced import not_a_store
from datakit.format.shard import damaged
from datakit.format.shard_entry import ScannedShards, ShardEntry
from datakit.tokenization.identity import TokenizerIdentity
from threefold.errors import UserError, quoted

FILE_NAME = "manifest.json"
ARCHIVE_NAME = "archive.json"  # what makes a folder an archive of a store
WORK_FOLDER = ".work"  # holds sealed items until a store is complete
FORMAT = "threefold-token-store"
VERSION = 1
MAX_BYTES = 512 << 20
_COPY_NAME = re.compile(r"tokenizer\.[A-Za-z0-9.]{1,32}")
STORE_DTYPES = {"uint16": 2, "int32": 4}


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of a store without opening a shard."""

    dtype: str
    tokenizer: TokenizerIdentity
    shards: Sequence[ShardEntry]
    settings: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)  # documents of the input that no store has, by reason
    tokenizer_files: dict[str, FileDigest] = field(default_factory=dict)  # the store's copy, the tokenizer's own first

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return sum(self.shard_documents)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(self.shard_tokens)

    @property
    def shard_documents(self) -> list[int]:
        """Documents of each shard."""
        shards = self.shards
        return shards.num_documents if isinstance(shards, ScannedShards) else [each.num_documents for each in shards]

    @property
    def shard_tokens(self) -> list[int]:
        """Tokens of each shard."""
        shards = self.shards
        return shards.num_tokens if isinstance(shards, ScannedShards) else [each.num_tokens for each in shards]

    @property
    def fingerprint(self) -> str:
        """XXH3-128 over the dtype and each shard's token count and checksum: equal content, equal fingerprint."""
        shards = self.shards
        content = (
            shards.content_json
            if isinstance(shards, ScannedShards)
            else orjson.dumps([[shard.num_tokens, shard.bin.xxh3_64] for shard in shards])
        )
        return xxhash.xxh3_128_hexdigest(b'["%b",%b]' % (self.dtype.encode(), bytes(content)))

    @property
    def documents_fingerprint(self) -> str:
        """XXH3-128 over the checksums of all indices, which say where documents end."""
        return xxhash.xxh3_128_hexdigest(orjson.dumps([shard.idx.xxh3_64 for shard in self.shards]))

    def files(self) -> dict[str, FileDigest]:
        """Return the digests of the files of all shards by name, in order."""
        return {name: digest for shard in self.shards for name, digest in shard.files().items()}

    def as_json(self) -> dict[str, Any]:
        """Return its fields as JSON holds them; what a store does not have is left out."""
        content = asdict(replace(self, shards=tuple(self.shards)))
        return {name: value for name, value in content.items() if value or name not in ("skipped", "tokenizer_files")}

    def encode(self) -> bytes:
        """Return the content of the manifest's file."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "fingerprint": self.fingerprint,
            **self.as_json(),
        }
        content["checksum"] = content_checksum(content)
        return orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n"

    def write(self, folder: Path) -> None:
        """Put the manifest into a store's folder, atomically and durably."""
        replace_durably(folder / FILE_NAME, self.encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and check a store's manifest."""
        path = folder / FILE_NAME
        require_folder(folder)
        with reading(path):
            try:
                with path.open("rb") as file:
                    size_bytes = os.fstat(file.fileno()).st_size
                    if size_bytes > MAX_BYTES:
                        raise damaged(f"{path} has {size_bytes} bytes, more than the {MAX_BYTES} a manifest may have")
                    data = file.read()
            except (FileNotFoundError, NotADirectoryError):
                raise _not_a_store(folder) from None
        return cls.parse(path, data)

    @classmethod
    def parse(cls, path: Path | str, data: bytes) -> "Manifest":
        """Check the content of a manifest's file at `path` or this URL; CheckFailed names it."""
        scanned = ScannedShards.scan(data)
        shards, rest = scanned or (None, data)
        fields = Fields.parse(path, rest)
        raw = fields.raw
        if fields.text("format") != FORMAT:
            raise damaged(f"{path} is not a token store's manifest: format {reprlib.repr(raw['format'])}")
        if fields.number("version") != VERSION:
            raise damaged(f"{path} has version {raw['version']}, this program reads version {VERSION}")
        if fields.text("checksum") != content_checksum(raw, shards):
            raise damaged(f"{path} is damaged: its checksum does not hold")
        dtype = fields.text("dtype")
        if dtype not in STORE_DTYPES:
            raise damaged(f"{path}: dtype {reprlib.repr(dtype)} is none of {', '.join(STORE_DTYPES)}")
        manifest = cls(
            dtype,
            _tokenizer(fields.table("tokenizer")),
            tuple(map(shard_entry, fields.tables("shards"))) if shards is None else shards,
            fields.table("settings").raw,
            fields.counts("skipped"),
            _tokenizer_files(fields),
        )
        if shard := _first_unequal(manifest):
            what = f"{shard.num_tokens} {dtype} tokens in {shard.bin.size_bytes} bytes of {shard.name}"
            raise damaged(f"{path}: {what}")
        found = fields.number("num_documents"), fields.number("num_tokens"), fields.text("fingerprint")
        for name, value in zip(("num_documents", "num_tokens", "fingerprint"), found, strict=True):
            if value != getattr(manifest, name):
                raise damaged(f"{path}: {name} is {reprlib.repr(value)}, its shards give {getattr(manifest, name)!r}")
        return manifest


def _first_unequal(manifest: Manifest) -> ShardEntry | None:
    """Return the first shard whose tokens have other bytes than their number says."""
    itemsize, shards = STORE_DTYPES[manifest.dtype], manifest.shards
    if isinstance(shards, ScannedShards):
        return shards.first_unequal(itemsize)
    return next((shard for shard in shards if shard.bin.size_bytes != shard.num_tokens * itemsize), None)


def _tokenizer(fields: Fields) -> TokenizerIdentity:
    return TokenizerIdentity(
        kind=fields.text("kind"),
        fingerprint=fields.text("fingerprint"),
        vocab_size=fields.number("vocab_size"),
        eod_token=None if fields.raw.get("eod_token") is None else fields.text("eod_token"),
        eod_id=None if fields.raw.get("eod_id") is None else fields.number("eod_id"),
    )


def _tokenizer_files(fields: Fields) -> dict[str, FileDigest]:
    """Return the digests of the copy of the tokenizer, none where it is left out."""
    if "tokenizer_files" not in fields.raw:
        return {}
    table = fields.table("tokenizer_files")
    if strange := next((name for name in table.raw if not _COPY_NAME.fullmatch(name)), None):
        raise table.fault(f"{reprlib.repr(strange)} is not a name of a tokenizer's file")
    return {name: digest_in(table.table(name)) for name in table.raw}


def shard_entry(fields: Fields) -> ShardEntry:
    """Return the entry of one shard that `asdict` made JSON of."""
    name = fields.text("name")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise damaged(f"{fields.path}: {fields.place}name {reprlib.repr(name)} is not a shard's name")
    digests = {kind: digest_in(fields.table(kind)) for kind in ("bin", "idx", "origin")}
    return ShardEntry(
        name, fields.number("num_documents"), fields.number("num_tokens"), fields.number("first_line"), **digests
    )


def digest_in(fields: Fields) -> FileDigest:
    """Return the digest that `asdict` made JSON of."""
    return FileDigest(fields.number("size_bytes"), fields.text("xxh3_64"))


def content_checksum(content: dict[str, Any], shards: ScannedShards | None = None) -> str | None:
    """XXH3-64 of a JSON object as compact JSON with sorted keys, without its checksum field; None for an object that
    is nested deeper than any that was written. `shards` are in place of those of the object.
    """
    rest = {key: value for key, value in content.items() if key != "checksum"}
    try:
        if shards is None:
            return xxhash.xxh3_64_hexdigest(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS))
        hasher = xxhash.xxh3_64()
        for number, key in enumerate(sorted(rest)):
            field = orjson.dumps({key: rest[key]}, option=orjson.OPT_SORT_KEYS)
            hasher.update((b"," if number else b"{") + (b'"shards":' if key == "shards" else field[1:-1]))
            if key == "shards":
                hasher.update(shards.sorted_json)
        hasher.update(b"}")
        return hasher.hexdigest()
    except orjson.JSONEncodeError:
        return None


def _not_a_store(folder: Path) -> UserError:
    parts = [name for name in ("train", "valid") if (folder / name / FILE_NAME).is_file()]
    if parts:
        return UserError(f"{folder} is split; name one of its stores", hint=quoted(folder / parts[0]))
    if (folder / WORK_FOLDER).is_dir():
        return UserError(
            f"{folder} is unfinished: the command that makes it did not come to an end",
            hint="rerun the same `datakit` command to continue it",
        )
    return not_a_store(folder, FILE_NAME)


def require_folder(path: Path) -> None:
    """Raise UserError if the path of a store is a URL: only files of this machine can be mapped."""
    if url := url_behind(path):
        raise UserError(f"{url} is not a local folder", hint=f"datakit unarchive {quoted(url)} --output STORE")


def is_plain_folder(place: str) -> bool:
    """Return whether `TokenStore.open` may open a place: a local folder, not an archive, finished or not."""
    # os.path.exists is false where a folder may not be read; opening the store there says why
    return "://" not in place and not any(
        os.path.exists(f"{place}/{name}") for name in (ARCHIVE_NAME, f"{WORK_FOLDER}/{ARCHIVE_NAME}")
    )
