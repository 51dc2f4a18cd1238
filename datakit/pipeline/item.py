"""One work item: its documents are read, tokenized and sealed as shards; memory is 256 KiB of text or one document.

An item is sealed in three moves: its shards are written in a scratch folder of the encoder's own, moved or uploaded
into their store, and then recorded, all durably. Only the record makes an item done, so a kill at any moment costs at
most the item's work, and two encoders at the same item, as after a node that was only thought dead, put the same bytes.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from datakit.fields import Fields
from datakit.manifest import WORK_FOLDER, ShardEntry, TokenizerIdentity, shard_entry
from datakit.pipeline.duplicates import Duplicates
from datakit.pipeline.output import Output
from datakit.pipeline.recipe import Recipe
from datakit.shard import writing
from datakit.store_writer import StoreShardWriter, store_dtype
from datakit.text.documents import Document, DocumentReader
from datakit.text.inputs import FileSlice, WorkItem
from datakit.tokenization.encoder import Encoder
from datakit.tokenization.tokenizer import Ids, TextFault
from threefold.errors import CheckFailed, UserError

_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 18, 1024
SUFFIXES = (".bin", ".idx", ".origin")
RECORDS_FOLDER = f"{WORK_FOLDER}/items"


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
    """Turns work items into shards of the output's stores."""

    def __init__(self, output: Output, recipe: Recipe, encoder: Encoder, identity: TokenizerIdentity) -> None:
        self._output, self._recipe, self._encoder = output, recipe, encoder
        self._dtype = np.dtype(store_dtype(identity.vocab_size)).newbyteorder("<")
        self._eod_id = identity.eod_id if recipe.append_eod else None
        self._duplicates = Duplicates(output) if recipe.dedup else None
        self._scratch = output.scratch / secrets.token_hex(8)

    def seal(self, item: WorkItem, report: Callable[[Progress], None] = lambda _: None) -> None:
        """Make the item's shards and its record, or nothing."""
        end = [] if self._eod_id is None else [self._eod_id]
        writers = {part: _ShardSequence(self._work(part), item.number, self._dtype, end) for part in self._recipe.parts}
        num_lines = input_bytes = num_tokens = 0
        skipped: Counter[str] = Counter()
        duplicates = self._duplicates and self._duplicates.of_item(item.number)
        try:
            for part in item.slices:
                reader = DocumentReader(part, self._recipe.rules)
                for batch in _batches(duplicates.leave_out(reader) if duplicates else reader):
                    encoded = self._encode(part, batch, skipped)
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
            if duplicates:
                duplicates.require_all(item.slices[0].file.path)
                skipped += Counter(duplicate=duplicates.num_left_out)
            shards = {part: writer.finish() for part, writer in writers.items()}
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise
        for store, entries in shards.items():
            self._output.adopt(store, [self._scratch / store / name for entry in entries for name in _files(entry)])
        record = ItemRecord(item, num_lines, input_bytes, shards, skipped)
        self._output.write(_record_key(item), orjson.dumps(record))

    def _encode(self, part: FileSlice, batch: list[Document], skipped: Counter[str]) -> list[Ids]:
        """The ids of each document; one on which the tokenizer gives up leaves the batch where invalid ones may."""
        while True:
            try:
                return self._encoder.encode_batch([document.text for document in batch])
            except TextFault as fault:
                if not self._recipe.skip_invalid:
                    place = f"{part.file.path}, the document at byte {batch[fault.number].offset_bytes}"
                    raise UserError(f"{place}: {fault.message}", hint=fault.hint) from None
                skipped["invalid"] += 1
                del batch[fault.number]

    def _work(self, part: str) -> Path:
        folder = self._scratch / part
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder


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
            for name in _files(entry):
                (self._folder / name).unlink(missing_ok=True)


def read_records(output: Output, items: Sequence[WorkItem]) -> list[ItemRecord | None]:
    """The records of items, None where one is not sealed, or was from other input or with a lost shard."""
    sizes = output.sizes()
    keys = [_record_key(item) for item in items]
    contents = output.read_many([key for key in keys if key in sizes])
    return [_parse_record(next(contents), item, sizes) if key in sizes else None for item, key in zip(items, keys)]


def _record_key(item: WorkItem) -> str:
    return f"{RECORDS_FOLDER}/{item.number:06}.json"


def _parse_record(content: bytes, item: WorkItem, sizes: dict[str, int]) -> ItemRecord | None:
    record = fields_of_record(content, item)
    if record is None:
        return None
    try:
        stores = record.table("shards")
        shards = {part: [shard_entry(entry) for entry in stores.tables(part)] for part in stores.raw}
        found = ItemRecord(
            item, record.number("num_lines"), record.number("input_bytes"), shards, record.counts("skipped")
        )
    except CheckFailed:  # damaged: the item is made again
        return None
    for part, entries in shards.items():
        for entry in entries:
            for name, digest in zip(_files(entry), (entry.bin, entry.idx, entry.origin)):
                if sizes.get(f"{part}/{name}".lstrip("/")) != digest.size_bytes:
                    return None
    return found


def fields_of_record(content: bytes, item: WorkItem) -> Fields | None:
    """What the record of an item says, None where it is damaged, or of another item or other input."""
    try:
        record = Fields.parse("record", content)
    except CheckFailed:
        return None
    return record if record.raw.get("item") == orjson.loads(orjson.dumps(item)) else None


def _files(entry: ShardEntry) -> list[str]:
    return [f"{entry.name}{suffix}" for suffix in SUFFIXES]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
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
