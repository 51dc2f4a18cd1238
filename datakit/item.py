"""One work item: its documents are read, tokenized and sealed as shards; memory is 64 KiB of text or one document.

An item is sealed in three moves: its shards are written in a folder of the encoder's own under `.work/`, renamed into
their store, and then recorded, all durably. Only the record makes an item done, so a kill at any moment costs at most
the item's work, and two encoders at the same item, as after a node that was only thought dead, put the same bytes.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from datakit.documents import Document, DocumentReader
from datakit.encoder import Encoder
from datakit.inputs import WorkItem
from datakit.manifest import WORK_FOLDER, ShardEntry, TokenizerIdentity, replace_durably
from datakit.recipe import Recipe
from datakit.shard import FileDigest, writing
from datakit.store_writer import StoreShardWriter, store_dtype
from datakit.tokenizer import Ids
from threefold.storage.local import sync_folder

_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 18, 1024
SUFFIXES = (".bin", ".idx", ".origin")
SCRATCH = "shards"  # under the work folder: what is not sealed yet


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """What a sealed item gave: the lines it read, its input bytes, its shards by store, what it skipped by reason."""

    item: WorkItem
    num_lines: int
    input_bytes: int
    shards: dict[str, list[ShardEntry]]
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an item is."""

    input_bytes: int
    num_tokens: int


class ItemEncoder:
    """Turns work items into shards of the stores under `output`."""

    def __init__(self, output: Path, recipe: Recipe, encoder: Encoder, identity: TokenizerIdentity) -> None:
        self._output, self._recipe, self._encoder = output, recipe, encoder
        self._dtype = np.dtype(store_dtype(identity.vocab_size)).newbyteorder("<")
        self._eod_id = identity.eod_id if recipe.append_eod else None
        self._scratch = output / WORK_FOLDER / SCRATCH / secrets.token_hex(8)

    def seal(self, item: WorkItem, report: Callable[[Progress], None] = lambda _: None) -> None:
        """Make the item's shards and its record, or nothing."""
        end = [] if self._eod_id is None else [self._eod_id]
        writers = {part: _ShardSequence(self._work(part), item.number, self._dtype, end) for part in self._recipe.parts}
        num_lines = input_bytes = num_tokens = 0
        skipped: Counter[str] = Counter()
        try:
            for part in item.slices:
                reader = DocumentReader(part, self._recipe.rules)
                for batch in _batches(reader):
                    encoded = self._encoder.encode_batch([document.text for document in batch])
                    shares: dict[str, list[tuple[Document, Ids]]] = {}
                    for document, ids in zip(batch, encoded, strict=True):
                        shares.setdefault(self._recipe.part_of(document.text), []).append((document, ids))
                    input_bytes += sum(document.input_bytes for document in batch)
                    num_tokens += sum(map(len, encoded))
                    for store, share in shares.items():
                        writers[store].extend(share, part.file.path)
                    report(Progress(input_bytes, num_tokens))
                num_lines += reader.num_lines
                skipped += reader.skipped
            shards = {part: writer.finish() for part, writer in writers.items()}
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise
        for store, entries in shards.items():
            self._move_into_store(store, entries)
        record, path = ItemRecord(item, num_lines, input_bytes, shards, skipped), record_path(self._output, item.number)
        replace_durably(path, orjson.dumps(record), temporary=self._scratch / path.name)

    def _work(self, part: str) -> Path:
        folder = self._scratch / part
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _move_into_store(self, part: str, entries: list[ShardEntry]) -> None:
        work, store = self._scratch / part, self._output / part
        with writing(store):
            for entry in entries:
                for suffix in SUFFIXES:
                    (work / f"{entry.name}{suffix}").replace(store / f"{entry.name}{suffix}")
            sync_folder(store)


class _ShardSequence:
    """The shards that one item puts into one store, each document with `end` after it; the next where one is full."""

    def __init__(self, folder: Path, item_number: int, dtype: "np.dtype[Any]", end: list[int]) -> None:
        self._folder, self._item_number, self._dtype = folder, item_number, dtype
        self._end = np.array(end, dtype)
        self._open: StoreShardWriter | None = None
        self._finished: list[ShardEntry] = []

    def extend(self, documents: list[tuple[Document, Ids]], path: str) -> None:
        """Append documents of one file."""
        while documents:
            lengths = [len(ids) + len(self._end) for _, ids in documents]
            target = self._current()
            count = target.room(lengths)
            pieces = [piece for _, ids in documents[:count] for piece in (ids, self._end)]
            target.extend(
                np.concatenate(pieces, dtype=self._dtype, casting="unsafe").tobytes(),
                lengths[:count],
                path,
                [document.offset_bytes for document, _ in documents[:count]],
                [document.line for document, _ in documents[:count]],
            )
            documents = documents[count:]

    def _current(self) -> StoreShardWriter:
        if self._open is not None and self._open.is_full:
            self._finished.append(self._open.finish())
            self._open = None
        if self._open is None:
            name = f"shard-{self._item_number:06}-{len(self._finished):03}"
            self._open = StoreShardWriter(self._folder / name, self._dtype.name)
        return self._open

    def finish(self) -> list[ShardEntry]:
        if self._open is not None:
            self._finished.append(self._open.finish())
            self._open = None
        return self._finished

    def abandon(self) -> None:
        if self._open is not None:
            self._open.abandon()
        for entry in self._finished:
            for suffix in SUFFIXES:
                (self._folder / f"{entry.name}{suffix}").unlink(missing_ok=True)


def record_path(output: Path, number: int) -> Path:
    """Where an item's record lies."""
    return output / WORK_FOLDER / "items" / f"{number:06}.json"


def read_record(output: Path, item: WorkItem) -> ItemRecord | None:
    """The record of an item, None where it is not sealed, or was from other input or with a lost shard."""
    try:
        raw = orjson.loads(record_path(output, item.number).read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    if raw["item"] != orjson.loads(orjson.dumps(item)):
        return None
    shards = {part: [_shard_entry(entry) for entry in entries] for part, entries in raw["shards"].items()}
    for part, entries in shards.items():
        for entry in entries:
            for suffix, digest in zip(SUFFIXES, (entry.bin, entry.idx, entry.origin)):
                file = output / part / f"{entry.name}{suffix}"
                if not file.is_file() or file.stat().st_size != digest.size_bytes:
                    return None
    return ItemRecord(item, raw["num_lines"], raw["input_bytes"], shards, raw.get("skipped", {}))


def _shard_entry(raw: dict[str, object]) -> ShardEntry:
    digests = {kind: FileDigest(**raw.pop(kind)) for kind in ("bin", "idx", "origin")}  # type: ignore[arg-type]
    return ShardEntry(**raw, **digests)  # type: ignore[arg-type]


def _batches(documents: DocumentReader) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        if batch and (characters + len(document.text) > _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS):
            yield batch
            batch, characters = [], 0
        batch.append(document)
        characters += len(document.text)
    if batch:
        yield batch
