"""Task: what all work items of a preprocessing run have in common, as it travels to the workers; and sealing an item.

An item's documents are read, tokenized and sealed as shards; memory is 256 KiB of text or one document. It is sealed in
three moves: its shards are written in a scratch folder of the encoder's own, moved or uploaded into their store, and
then recorded, all durably. Only the record makes an item done, so a kill at any moment costs at most the item's work,
and two encoders at the same item, as after a node that was only thought dead, put the same bytes.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from datakit.dedup.duplicates import Duplicates, ItemHasher
from datakit.files.durable import writing
from datakit.format.output import Output
from datakit.preprocessing.recipe import WHOLE, Recipe
from datakit.store.item_records import ItemRecord, Progress, record_key
from datakit.store.writer import MAX_SHARD_DOCUMENTS, ShardSequence, store_dtype
from datakit.text.documents import DocumentReader, Documents
from datakit.text.inputs import FileSlice, WorkItem
from datakit.tokenization.encoded import Encoded
from datakit.tokenization.encoder import Encoder, open_encoder
from datakit.tokenization.fast_encoder import NO_TERMS, Terms
from datakit.tokenization.identity import TokenizerIdentity
from datakit.tokenization.tokenizer import TextFault
from threefold.errors import UserError
from threefold.plain import from_plain

HASH = "hash"  # in place of a backend: the documents are only hashed
BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 18, 1024


class ItemEncoder:
    """Turns work items into shards of the output's stores."""

    def __init__(
        self,
        output: Output,
        recipe: Recipe,
        encoder: Encoder,
        identity: TokenizerIdentity,
        *,
        batch_characters: int = BATCH_CHARACTERS,
        max_shard_documents: int = MAX_SHARD_DOCUMENTS,
    ) -> None:
        self._output, self._recipe, self._encoder = output, recipe, encoder
        self._batch_characters, self._max_shard_documents = batch_characters, max_shard_documents
        self._dtype = np.dtype(store_dtype(identity.vocab_size)).newbyteorder("<")
        self._end = recipe.end(identity, encoder.after)
        self._duplicates = Duplicates(output) if recipe.dedup else None
        self._scratch = output.scratch / secrets.token_hex(8)

    def seal(self, item: WorkItem, report: Callable[[Progress], None] = lambda _: None) -> None:
        """Make the item's shards and its record, or nothing."""
        num_lines = input_bytes = num_tokens = num_by_reference = num_replaced = 0
        digests: list[str] = []
        skipped: Counter[str] = Counter()
        duplicates = self._duplicates and self._duplicates.of_item(item.number)
        end, most = self._end, self._max_shard_documents
        with ExitStack() as stack:
            writers = {
                part: stack.enter_context(_ItemShards(self._work(part), item.number, self._dtype, end, most))
                for part in self._recipe.parts
            }
            for number, part in enumerate(item.slices):
                report(Progress(input_bytes, num_tokens, num_by_reference, number))
                reader = DocumentReader(part, self._recipe.rules, with_digest=part.file.is_known_by_time)
                runs = reader.runs()
                for batch in self._batches(map(duplicates.leave_out, runs) if duplicates else runs):
                    batch, encoded = self._encode(part, batch, skipped)
                    for store, documents, share in self._shares(batch, encoded):
                        writers[store].extend(documents, share, part.file.path)
                    input_bytes += batch.input_bytes
                    num_tokens += len(encoded.tokens)
                    num_by_reference += encoded.num_by_reference
                    report(Progress(input_bytes, num_tokens, num_by_reference, number))
                num_lines += reader.num_lines
                num_replaced += reader.num_replaced
                digests.append(reader.digest)
                skipped += reader.skipped
            if duplicates:
                duplicates.require_all(item.slices[0].file.path)
                skipped += Counter(duplicate=duplicates.num_left_out)
            shards = {part: writer.finish() for part, writer in writers.items()}
        for store, entries in shards.items():
            self._output.adopt(store, [self._scratch / store / name for entry in entries for name in entry.files()])
        record = ItemRecord(item, num_lines, input_bytes, shards, skipped, num_replaced, digests)
        self._output.write(record_key(item), orjson.dumps(record))

    def _batches(self, runs: Iterable[Documents]) -> Iterator[Documents]:
        waiting = Documents.of([])
        for run in runs:
            waiting += run
            while (count := self._room(waiting)) < len(waiting):
                yield waiting[:count]
                waiting = waiting[count:]
        if waiting:
            yield waiting

    def _room(self, documents: Documents) -> int:
        """Return how many of the next documents belong into one batch: at least one."""
        ends = np.cumsum([len(text) for text in documents.texts[:_BATCH_DOCUMENTS]])
        return max(1, int(np.searchsorted(ends, self._batch_characters, side="right")))

    def _encode(self, part: FileSlice, batch: Documents, skipped: Counter[str]) -> tuple[Documents, Encoded]:
        """Return the documents and their ids.

        One on which the tokenizer fails leaves the batch where invalid ones may.
        """
        while True:
            try:
                return batch, self._encoder.encode_batch(batch.texts)
            except TextFault as fault:
                if not self._recipe.skip_invalid:
                    place = f"{part.file.path}, the document at byte {batch.places[0, fault.number]}"
                    raise UserError(f"{place}: {fault.message}", hint=fault.hint) from None
                skipped["invalid"] += 1
                batch = batch[: fault.number] + batch[fault.number + 1 :]

    def _shares(self, batch: Documents, encoded: Encoded) -> Iterator[tuple[str, Documents, Encoded]]:
        """Yield what of a batch goes to each store."""
        if self._recipe.split is None:
            yield WHOLE, batch, encoded
            return
        parts = list(map(self._recipe.part_of, batch.texts))
        for store in dict.fromkeys(parts):
            chosen = np.array([part == store for part in parts])
            yield store, batch.where(chosen), encoded.where(chosen)

    def _work(self, part: str) -> Path:
        folder = self._scratch / part
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder


class _ItemShards(ShardSequence):
    """The shards that one item puts into one store, each document with `end` after it."""

    def __init__(
        self, folder: Path, item_number: int, dtype: "np.dtype[Any]", end: Sequence[int], max_documents: int
    ) -> None:
        super().__init__(folder, dtype.name, f"shard-{item_number:06}-{{:03}}".format, max_documents)
        self._little_endian, self._end = dtype, end

    def extend(self, documents: Documents, encoded: Encoded, path: str) -> None:
        """Append documents of one file."""
        ended = encoded.framed((), self._end)
        tokens, lengths = ended.tokens.astype(self._little_endian), ended.lengths.tolist()
        while documents:
            target = self.current()
            count = target.room(lengths)
            offsets, lines, _ = documents.places[:, :count].tolist()
            num_tokens = sum(lengths[:count])
            target.extend(tokens[:num_tokens].tobytes(), lengths[:count], path, offsets, lines)
            documents, lengths, tokens = documents[count:], lengths[count:], tokens[num_tokens:]


class Sealer(Protocol):
    """What does a run's work, item by item."""

    def seal(self, item: WorkItem, report: Callable[[Progress], None]) -> None:
        """Do all of an item's work and record it, or leave nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """Where the stores go, how text becomes tokens, whose tokens they are, and the backend with its terms."""

    output: str
    recipe: Recipe
    identity: TokenizerIdentity
    backend: str
    terms: Terms = NO_TERMS

    def sealer(self) -> Sealer:
        """Return what seals the run's items, in the process that calls this."""
        output = Output(self.output)
        if self.backend == HASH:
            return ItemHasher(output, self.recipe.rules)
        encoder = open_encoder(self.recipe.tokenizer, self.backend, self.terms)
        return ItemEncoder(output, self.recipe, encoder, self.identity)

    def to_line(self) -> bytes:
        """Return the task as one line of JSON."""
        return orjson.dumps(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Task":
        """Return the task of such a line."""
        task: Task = from_plain(cls, orjson.loads(line))
        return task
