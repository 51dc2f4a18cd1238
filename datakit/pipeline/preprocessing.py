"""Preprocess: text to token stores, in worker processes, with flat memory; the same bytes with any number of workers.

Work items are cut from the sorted input, each is sealed by itself (see item.py), and the manifests are written last, in
the items' order: there is no merge. A rerun continues with the items that are not sealed.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from datakit.manifest import FILE_NAME, Manifest, ShardEntry, TokenizerIdentity
from datakit.pipeline.deduplication import find_duplicates
from datakit.pipeline.item import ItemRecord, read_records
from datakit.pipeline.meter import Meter
from datakit.pipeline.output import NOTE, Output, key_of
from datakit.pipeline.recipe import TRAIN, VALID, WHOLE, Recipe, differences, input_digest
from datakit.pipeline.task import HASH, Task
from datakit.pipeline.worker_pool import WorkerPool
from datakit.store_writer import store_dtype
from datakit.tags import require_matches
from datakit.text.documents import DocumentReader
from datakit.text.inputs import InputFile, WorkItem, cut, default_item_bytes, find_inputs
from datakit.tokenization.encoder import AUTO, choose_backend, require_backend
from datakit.tokenization.tokenizer import DEFAULT_EOD, Tokenizer, identify, open_tokenizer
from threefold.errors import CheckFailed, UserError

if TYPE_CHECKING:
    from datakit.pipeline.ray_pool import RayPool

_PROBE_DOCUMENTS, _PROBE_CHARACTERS = 8, 1 << 14


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """One store that came out."""

    path: str
    num_documents: int
    num_tokens: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of preprocess did; counts are the stores' (what was skipped, by reason), rates are of this run's."""

    num_documents: int
    num_tokens: int
    num_items: int
    num_items_done_before: int
    input_bytes: int
    elapsed_s: float
    mb_per_s: float
    tokens_per_s: float
    stores: tuple[StoreSummary, ...]
    skipped: dict[str, int]


def preprocess(
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    recipe: Recipe,
    *,
    num_workers: int = 1,
    backend: str = AUTO,
    engine: str = "local",
    ray_address: str | None = None,
    item_bytes: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Summary:
    """Make the store (with a split: the stores `train` and `valid`) of all documents of the inputs, in a folder or URL.

    `backend` names what tokenizes (see encoder.py); `engine` is "local" for worker processes here or "ray" for actors
    on the cluster at `ray_address` (see ray_pool.py). Neither changes a byte. `item_bytes` overrides the size of a
    work item, `report` takes lines of progress. Raises UserError and StorageError; what was sealed before then is kept,
    and the same call continues.
    """
    if num_workers < 1:
        raise UserError(f"{num_workers} workers", hint="--workers 1")
    started_s = time.monotonic()
    files = find_inputs(inputs)
    require_matches(recipe.tags, [file.path for file in files])
    job = _Job(Output(os.fspath(output)), recipe, files, item_bytes)
    if job.is_complete():
        report(f"{output} is complete already")
        return job.summary([], 0.0)
    with job.output.locked() as lock:
        open_pool = partial(_open_pool, engine, num_workers, lock, ray_address)
        if recipe.dedup or engine != "local":
            job.begin(backend)
        if recipe.dedup:
            find_duplicates(job.output, job.items, partial(_hash, job, open_pool, report), report)
        missing = job.missing()
        with open_pool(len(missing)) if missing else nullcontext() as pool:
            job.begin(backend)  # opens the tokenizer, while workers that run here start
            if pool:
                choice = choose_backend(backend, recipe.tokenizer, job.tokenizer, probe_texts(missing, recipe))
                report(f"tokenizing with {choice.backend}: {choice.reason}")
                _seal(job, missing, Task(job.output.place, recipe, job.identity, choice.backend), pool, report)
        records = job.records()
        job.finish(records, report)
        sealed = [records[item.number] for item in missing]
        return job.summary(sealed, time.monotonic() - started_s)


def probe_texts(items: Sequence[WorkItem], recipe: Recipe) -> list[str]:
    """Some documents from the begin, the middle and the end of the input, each cut to 16 Ki characters."""
    texts: list[str] = []
    for item in dict.fromkeys((items[0], items[len(items) // 2], items[-1])):
        reader = DocumentReader(item.slices[0], recipe.rules)
        with suppress(UserError):  # the worker that meets it tells it
            texts += [document.text[:_PROBE_CHARACTERS] for document in islice(reader, _PROBE_DOCUMENTS)]
    return texts


def _open_pool(
    engine: str, num_workers: int, lock: int, ray_address: str | None, num_items: int
) -> "WorkerPool | RayPool":
    num_workers = min(num_workers, num_items)
    if engine == "local":
        return WorkerPool(num_workers, keep_open=lock)
    from datakit.pipeline.ray_pool import RayPool

    return RayPool(num_workers, address=ray_address)


def _hash(
    job: "_Job",
    open_pool: Callable[[int], "WorkerPool | RayPool"],
    report: Callable[[str], None],
    items: list[WorkItem],
) -> None:
    """Let workers hash the items' documents."""
    with open_pool(len(items)) as pool:
        task = Task(job.output.place, job.recipe, job.identity, HASH)
        _seal(job, items, task, pool, lambda line: report(f"reading for duplicates: {line}"))


def _seal(
    job: "_Job", items: list[WorkItem], task: Task, pool: "WorkerPool | RayPool", report: Callable[[str], None]
) -> None:
    """Let workers seal the items, and report about every two seconds."""
    meter = Meter(items)
    if len(items) < len(job.items):
        report(f"continuing: {len(job.items) - len(items)} of {len(job.items)} work items are sealed")
    for item, message in pool.run(task, iter(items)):
        meter.update(item, message)
        if meter.is_due():
            report(meter.line())
    report(meter.line())


class _Job:
    """One output: what it is made from, how far it is, and its beginning and end on disk."""

    def __init__(self, output: Output, recipe: Recipe, files: list[InputFile], item_bytes: int | None) -> None:
        self.output, self.recipe = output, recipe
        if not any(file.size_bytes for file in files):
            names = ", ".join(file.path for file in files[:3])
            raise UserError(f"the input is empty: {len(files)} files of 0 bytes: {names}", hint=f"ls -l {names}")
        item_bytes = item_bytes or default_item_bytes(files)
        self.items = list(cut(files, item_bytes, split_txt=recipe.txt_split == "line"))
        self._input = {
            "num_files": len(files),
            "size_bytes": sum(file.size_bytes for file in files),
            "xxh3_64": input_digest(files),
            "item_bytes": item_bytes,
        }

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The recipe's tokenizer, on its reference."""
        return open_tokenizer(self.recipe.tokenizer)

    @cached_property
    def identity(self) -> TokenizerIdentity:
        """The tokenizer's entry in the manifests; UserError where it lacks the token that ends documents."""
        recipe = self.recipe
        needs_eod = recipe.append_eod or recipe.eod_token != DEFAULT_EOD
        return identify(self.tokenizer, recipe.tokenizer, recipe.eod_token, required=needs_eod)

    def is_complete(self) -> bool:
        """Whether the stores are there; UserError where others are."""
        for part in {WHOLE, TRAIN, VALID} - set(self.recipe.parts):
            if self.output.manifest(part):
                raise UserError(f"{self.output.part(part)} is a store already", hint="choose another --output")
        manifests = {part: self.output.manifest(part) for part in self.recipe.parts}
        for part, found in manifests.items():
            if found is None:
                return False
            self._compare(found.tokenizer, found.settings, self._settings(part))
        self.output.remove_work()  # a kill may have left it after the last manifest
        return True

    def begin(self, backend: str) -> None:
        """Compare with what was begun here, or note what is begun now; UserError where the backend cannot serve."""
        require_backend(backend, self.recipe.tokenizer, self.tokenizer)
        wanted = {"tokenizer": asdict(self.identity), "settings": self.recipe.settings(WHOLE)}
        place = f"{self.output.place}/{NOTE}"
        try:
            found = orjson.loads(self.output.begin(orjson.dumps(wanted)))
            tokenizer, settings = TokenizerIdentity(**found["tokenizer"]), dict(found["settings"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckFailed(f"{place} is damaged: {error!r}", hint="choose another --output") from None
        self._compare(tokenizer, settings, wanted["settings"])

    def missing(self) -> list[WorkItem]:
        """The items that are not sealed."""
        return [item for item, record in zip(self.items, read_records(self.output, self.items)) if record is None]

    def records(self) -> list[ItemRecord]:
        """The records of all items, which are all sealed."""
        records = [record for record in read_records(self.output, self.items) if record]
        if len(records) < len(self.items):
            raise self.output.vanished(len(self.items) - len(records), len(self.items))
        return records

    def finish(self, records: list[ItemRecord], report: Callable[[str], None]) -> None:
        """Write the manifests, drop what is in none of them, and then the work folder."""
        shards = self._shards(records)
        counts = sum((Counter(record.skipped) for record in records), Counter[str]())
        skipped = dict(sorted(counts.items()))
        num_documents = sum(shard.num_documents for entries in shards.values() for shard in entries)
        if not any(shard.num_tokens for entries in shards.values() for shard in entries):
            raise UserError(
                f"the input is empty: {num_documents} documents without any text, {counts.total()} skipped",
                hint=f"head -c 300 {self.items[0].slices[0].file.path}",
            )
        for part, entries in shards.items():
            if not entries:
                report(f"{self.output.part(part)} holds no document: none of {num_documents} fell to it by its hash")
            self.output.remove_shards(part, but={entry.name for entry in entries})  # of input that has changed since
            dtype = store_dtype(self.identity.vocab_size)
            manifest = Manifest(dtype, self.identity, tuple(entries), self._settings(part), skipped)
            self.output.write(key_of(part, FILE_NAME), manifest.encode())
        self.output.remove_work()

    def summary(self, sealed: list[ItemRecord], elapsed_s: float) -> Summary:
        """What the stores hold, and how fast these items were sealed."""
        manifests = {part: manifest for part in self.recipe.parts if (manifest := self.output.manifest(part))}
        stores = tuple(
            StoreSummary(self.output.part(part), manifest.num_documents, manifest.num_tokens, len(manifest.shards))
            for part, manifest in manifests.items()
        )
        input_bytes = sum(record.input_bytes for record in sealed)
        num_tokens = sum(shard.num_tokens for record in sealed for shards in record.shards.values() for shard in shards)
        return Summary(
            num_documents=sum(store.num_documents for store in stores),
            num_tokens=sum(store.num_tokens for store in stores),
            num_items=len(self.items),
            num_items_done_before=len(self.items) - len(sealed),
            input_bytes=input_bytes,
            elapsed_s=elapsed_s,
            mb_per_s=input_bytes / 1e6 / elapsed_s if sealed else 0.0,
            tokens_per_s=num_tokens / elapsed_s if sealed else 0.0,
            stores=stores,
            skipped=next(iter(manifests.values())).skipped,
        )

    def _shards(self, records: list[ItemRecord]) -> dict[str, list[ShardEntry]]:
        """The shards of all items by store, in order, with the number of lines of their file before them."""
        shards: dict[str, list[ShardEntry]] = {part: [] for part in self.recipe.parts}
        lines_before = 0
        for record in records:
            if record.item.slices[0].start == 0:
                lines_before = 0
            for part, entries in record.shards.items():
                shards[part] += [replace(entry, first_line=lines_before) for entry in entries]
            lines_before += record.num_lines
        return shards

    def _settings(self, part: str) -> dict[str, Any]:
        return self.recipe.settings(part) | {"input": self._input}

    def _compare(self, tokenizer: TokenizerIdentity, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        sentences = differences((tokenizer, found), (self.identity, wanted))
        if sentences:
            raise UserError(
                f"{self.output.place} was made otherwise: {'; '.join(sentences)}",
                hint="rerun with what it was made with, or choose another --output",
            )
