"""Preprocess: text to token stores, in worker processes, with flat memory; the same bytes with any number of workers.

Work items are cut from the sorted input, each is sealed by itself (see item.py), and the manifests are written last, in
the items' order: there is no merge. A rerun continues with the items that are not sealed.
"""

import fcntl
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from datakit.deduplication import find_duplicates
from datakit.documents import DocumentReader
from datakit.encoder import AUTO, choose_backend
from datakit.inputs import InputFile, WorkItem, cut, default_item_bytes, find_inputs
from datakit.item import SCRATCH, ItemRecord, read_record
from datakit.manifest import FILE_NAME, WORK_FOLDER, Manifest, ShardEntry, TokenizerIdentity, replace_durably
from datakit.recipe import TRAIN, VALID, WHOLE, Recipe, differences, input_digest
from datakit.shard import writing
from datakit.store_writer import store_dtype
from datakit.tags import require_matches
from datakit.task import HASH, Task
from datakit.tokenizer import DEFAULT_EOD, identify, open_tokenizer
from datakit.worker_pool import WorkerPool
from threefold.errors import StorageError, UserError

if TYPE_CHECKING:
    from datakit.ray_pool import RayPool

_LOCK = "lock"
LOCK_PATIENCE_S = 5.0
PROGRESS_INTERVAL_S = 2.0
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
    """Make the store (with a split: the stores `train` and `valid`) of all documents of the inputs.

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
    job = _Job(Path(output), recipe, files, item_bytes)
    if job.is_complete():
        report(f"{output} is complete already")
        return job.summary([], 0.0)
    with job.locked() as lock:
        job.begin()
        open_pool = partial(_open_pool, engine, num_workers, lock, ray_address)
        if recipe.dedup:
            find_duplicates(job.output, job.items, partial(_hash, job, open_pool, report), report)
        missing = [item for item in job.items if read_record(job.output, item) is None]
        if missing:
            with open_pool(len(missing)) as pool:
                choice = choose_backend(backend, recipe.tokenizer, job.tokenizer, probe_texts(missing, recipe))
                report(f"tokenizing with {choice.backend}: {choice.reason}")
                _seal(job, missing, Task(str(job.output), recipe, job.identity, choice.backend), pool, report)
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
    from datakit.ray_pool import RayPool

    return RayPool(num_workers, address=ray_address)


def _hash(
    job: "_Job",
    open_pool: Callable[[int], "WorkerPool | RayPool"],
    report: Callable[[str], None],
    items: list[WorkItem],
) -> None:
    """Let workers hash the items' documents."""
    with open_pool(len(items)) as pool:
        task = Task(str(job.output), job.recipe, job.identity, HASH)
        _seal(job, items, task, pool, lambda line: report(f"reading for duplicates: {line}"))


def _seal(
    job: "_Job", items: list[WorkItem], task: Task, pool: "WorkerPool | RayPool", report: Callable[[str], None]
) -> None:
    """Let workers seal the items, and report about every two seconds."""
    meter = _Meter(items)
    if len(items) < len(job.items):
        report(f"continuing: {len(job.items) - len(items)} of {len(job.items)} work items are sealed")
    for item, message in pool.run(task, iter(items)):
        meter.update(item, message)
        if meter.is_due():
            report(meter.line())
    report(meter.line())


class _Meter:
    """Counts what all workers have done, and says when a line of progress is due."""

    def __init__(self, items: Sequence[WorkItem]) -> None:
        self._num_items, self._num_sealed = len(items), 0
        self._sizes = {item.number: sum(part.stop - part.start for part in item.slices) for item in items}
        self._read = 0  # bytes on disk of the sealed items
        self._bytes: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._started_s = self._reported_s = time.monotonic()

    def update(self, item: WorkItem, message: dict[str, Any]) -> None:
        if "sealed" in message:
            self._num_sealed += 1
            self._read += self._sizes[item.number]
        self._bytes[item.number] = message["progress"]["input_bytes"]
        self._tokens[item.number] = message["progress"]["num_tokens"]

    def is_due(self) -> bool:
        now_s = time.monotonic()
        due = now_s - self._reported_s >= PROGRESS_INTERVAL_S
        if due:
            self._reported_s = now_s
        return due

    def line(self) -> str:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-3)
        megabytes, tokens = sum(self._bytes.values()) / 1e6, sum(self._tokens.values())
        return (
            f"{self._num_sealed}/{self._num_items} work items, {megabytes:,.1f} MB, {megabytes / elapsed_s:.1f} MB/s"
            + (f", {tokens / elapsed_s:,.0f} tokens/s" if tokens else "")
            + self._left(elapsed_s)
        )

    def _left(self, elapsed_s: float) -> str:
        """How long the rest will take if it goes on like the sealed items."""
        if not self._read or self._num_sealed == self._num_items:
            return ""
        seconds = round(elapsed_s * (sum(self._sizes.values()) / self._read - 1))
        return f", {timedelta(seconds=seconds)} left"


class _Job:
    """One output: what it is made from, how far it is, and its beginning and end on disk."""

    def __init__(self, output: Path, recipe: Recipe, files: list[InputFile], item_bytes: int | None) -> None:
        self.output, self.recipe = output, recipe
        if not any(file.size_bytes for file in files):
            names = ", ".join(file.path for file in files[:3])
            raise UserError(f"the input is empty: {len(files)} files of 0 bytes: {names}", hint=f"ls -l {names}")
        self.tokenizer = open_tokenizer(recipe.tokenizer)
        needs_eod = recipe.append_eod or recipe.eod_token != DEFAULT_EOD
        self.identity = identify(self.tokenizer, recipe.tokenizer, recipe.eod_token, required=needs_eod)
        item_bytes = item_bytes or default_item_bytes(files)
        self.items = list(cut(files, item_bytes, split_txt=recipe.txt_split == "line"))
        self._input = {
            "num_files": len(files),
            "size_bytes": sum(file.size_bytes for file in files),
            "xxh3_64": input_digest(files),
            "item_bytes": item_bytes,
        }

    def is_complete(self) -> bool:
        """Whether the stores are there; UserError where others are."""
        for part in {WHOLE, TRAIN, VALID} - set(self.recipe.parts):
            if (self.output / part / FILE_NAME).exists():
                raise UserError(f"{self.output / part} is a store already", hint="choose another --output")
        if not all((self.output / part / FILE_NAME).exists() for part in self.recipe.parts):
            return False
        for part in self.recipe.parts:
            found = Manifest.read(self.output / part)
            self._compare(found.tokenizer, found.settings, self._settings(part))
        shutil.rmtree(self.output / WORK_FOLDER, ignore_errors=True)  # a kill may have left it after the last manifest
        return True

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the output for this process and its workers; gives the lock's file descriptor."""
        folder = self.output / WORK_FOLDER
        if not (folder / "items").exists() and _names(self.output) - {WORK_FOLDER} | _names(folder) - {_LOCK}:
            raise UserError(f"{self.output} is not empty and holds no unfinished store", hint="choose another --output")
        with writing(folder):
            (folder / "items").mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, self.output)
            yield descriptor
        finally:
            os.close(descriptor)

    def begin(self) -> None:
        """Compare with what was begun here, or note what is begun now."""
        note = self.output / WORK_FOLDER / "recipe.json"
        wanted = {"tokenizer": asdict(self.identity), "settings": self.recipe.settings(WHOLE)}
        if note.exists():
            found = orjson.loads(note.read_bytes())
            self._compare(TokenizerIdentity(**found["tokenizer"]), found["settings"], wanted["settings"])
        with writing(note):
            shutil.rmtree(self.output / WORK_FOLDER / SCRATCH, ignore_errors=True)  # of a run that was killed
            for part in self.recipe.parts:
                (self.output / part).mkdir(exist_ok=True)
            replace_durably(note, orjson.dumps(wanted))

    def records(self) -> list[ItemRecord]:
        """The records of all items, which are all sealed."""
        records = [read_record(self.output, item) for item in self.items]
        assert all(records), "every work item is sealed"
        return [record for record in records if record]

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
            store, listed = self.output / part, {entry.name for entry in entries}
            if not listed:
                report(f"{store} holds no document: none of {num_documents} fell to it by its hash")
            for file in store.glob("shard-*"):
                if file.stem not in listed:  # sealed from input that has changed since
                    file.unlink()
            with writing(store):
                dtype = store_dtype(self.identity.vocab_size)
                Manifest(dtype, self.identity, tuple(entries), self._settings(part), skipped).write(store)
        shutil.rmtree(self.output / WORK_FOLDER)

    def summary(self, sealed: list[ItemRecord], elapsed_s: float) -> Summary:
        """What the stores hold, and how fast these items were sealed."""
        manifests = {self.output / part: Manifest.read(self.output / part) for part in self.recipe.parts}
        stores = tuple(
            StoreSummary(str(path), manifest.num_documents, manifest.num_tokens, len(manifest.shards))
            for path, manifest in manifests.items()
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
                f"{self.output} was made otherwise: {'; '.join(sentences)}",
                hint="rerun with what it was made with, or choose another --output",
            )


def _names(folder: Path) -> set[str]:
    """What a folder holds; nothing where there is none."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _lock(descriptor: int, output: Path) -> None:
    """Take the lock; a killed run's workers let go of it within a moment."""
    deadline_s = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise StorageError(
                    f"another run is preprocessing into {output}", hint=f"lsof {output / WORK_FOLDER / _LOCK}"
                ) from None
            time.sleep(0.1)
    if not os.fstat(descriptor).st_nlink:
        raise StorageError(f"another run has just completed {output}", hint=f"datakit inspect {output}")
