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
from datakit.format.shard import damaged
from datakit.format.shard_entry import ScannedShards, ShardEntry
from datakit.text.finding import checkpoint_in
from datakit.text.formats import format_of
from datakit.tokenization.identity import TokenizerIdentity
from threefold.errors import UserError, listing, quoted
from threefold.storage.mistyped import url_meant

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
        return shards.num_documents if isinstance(shards, ScannedShards) else [shard.num_documents for shard in shards]

    @property
    def shard_tokens(self) -> list[int]:
        """Tokens of each shard."""
        shards = self.shards
        return shards.num_tokens if isinstance(shards, ScannedShards) else [shard.num_tokens for shard in shards]

    @property
    def fingerprint(self) -> str:
        """XXH3-128 over the dtype and each shard's token count and checksum: equal content, equal fingerprint."""
        content = (
            self.shards.content_json
            if isinstance(self.shards, ScannedShards)
            else orjson.dumps([[shard.num_tokens, shard.bin.xxh3_64] for shard in self.shards])
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
        counts = {"num_documents": self.num_documents, "num_tokens": self.num_tokens, "fingerprint": self.fingerprint}
        return encoded_record(FORMAT, VERSION, counts | self.as_json())

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
        require_record(fields, FORMAT, VERSION, "a token store's manifest", shards)
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
            raise damaged(f"{path}: {shard.num_tokens} {dtype} tokens in {shard.bin.size_bytes} bytes of {shard.name}")
        readers = {"num_documents": fields.number, "num_tokens": fields.number, "fingerprint": fields.text}
        for name, read in readers.items():
            value = read(name)
            if value != getattr(manifest, name):
                raise damaged(f"{path}: {name} is {reprlib.repr(value)}, its shards give {getattr(manifest, name)!r}")
        return manifest


def _first_unequal(manifest: Manifest) -> ShardEntry | None:
    """Return the first shard whose tokens have other bytes than their number says."""
    itemsize, shards = STORE_DTYPES[manifest.dtype], manifest.shards
    if isinstance(shards, ScannedShards):
        return shards.first_unequal(itemsize)
    return next((shard for shard in shards if shard.bin.size_bytes != shard.num_tokens * itemsize), None)


def encoded_record(format: str, version: int, content: dict[str, Any]) -> bytes:
    """Return a record as the content of a file of its own, with its format, version and checksum."""
    record = {"format": format, "version": version, **content}
    record["checksum"] = content_checksum(record)
    return orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n"


def require_record(fields: Fields, format: str, version: int, noun: str, shards: ScannedShards | None = None) -> None:
    """Raise CheckFailed if what was read is not a record of a format and version, or not of its checksum."""
    if fields.text("format") != format:
        raise fields.fault(f"it is not {noun}: format {reprlib.repr(fields.raw['format'])}")
    if fields.number("version") != version:
        raise fields.fault(f"it has version {fields.raw['version']}, this program reads version {version}")
    if fields.text("checksum") != content_checksum(fields.raw, shards):
        raise fields.fault("it is damaged: its checksum does not hold")


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
    num_documents, num_tokens, first_line = map(fields.number, ("num_documents", "num_tokens", "first_line"))
    digests = (digest_in(fields.table(kind)) for kind in ("bin", "idx", "origin"))
    return ShardEntry(name, num_documents, num_tokens, first_line, *digests)


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


def _not_a_store(place: Path) -> UserError:
    """Return the error for a local place without a manifest, which says what is there if that is known."""
    parts = [name for name in ("train", "valid") if (place / name / FILE_NAME).is_file()]
    if parts:
        return UserError(f"{place} is split; name one of its stores", hint=quoted(place / parts[0]))
    if (place / WORK_FOLDER).is_dir():
        return UserError(
            f"{place} is unfinished: the command that makes it did not come to an end",
            hint="rerun the same `datakit` command to continue it",
        )
    what = f"{place} is not a token store"
    if url := url_meant(str(place)):
        return UserError(f"{what}: nothing has that name here, and a URL has a colon", hint=quoted(url))
    prefix = str(place).removesuffix(".bin").removesuffix(".idx")
    if os.path.isfile(f"{prefix}.idx"):
        return UserError(
            f"{what} but a dataset of Megatron-LM", hint=f"datakit convert {quoted(prefix)} --output STORE"
        )
    if not os.path.lexists(place):
        return UserError(f"{what}: nothing has that name", hint=listing(place))
    if place.name == FILE_NAME:
        return UserError(f"{what} but the manifest of one", hint=f"datakit inspect {quoted(place.parent)}")
    if checkpoint := checkpoint_in(str(place)):
        return UserError(f"{what} but {checkpoint}", hint=f"ckptkit inspect {quoted(place)}")
    if text := _text_of(place):
        return UserError(
            f"{what} but {text}", hint=f"datakit preprocess {quoted(place)} --output STORE --tokenizer tok.json"
        )
    if place.is_file():
        return UserError(f"{what} but a file, and a store is a folder", hint=listing(place))
    return UserError(f"{what}: it has no {FILE_NAME}", hint=listing(place))


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


def _text_of(place: Path) -> str | None:
    """Return in words which text a place is or holds, None if it is none."""
    if place.is_file():
        return "text" if _is_text(place.name) else None
    name = next(filter(_is_text, sorted(os.listdir(place))), None)
    return name and f"a folder of text, such as {name}"


def _is_text(name: str) -> bool:
    """Return whether a name is one of text, as that of a `.json` need not be."""
    return format_of(name) is not None and not name.endswith(".json")
