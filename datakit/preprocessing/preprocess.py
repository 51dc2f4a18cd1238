"""Preprocess: text to token stores, in worker processes, with flat memory; the same bytes with any number of workers.

Work items are cut from the sorted input, each is sealed by itself (see task.py), and the manifests are written last, in
the items' order: nothing is merged. A rerun continues with the items that are not sealed.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datakit.dedup.duplicates import find_duplicates
from datakit.format.manifest import FILE_NAME, Manifest
from datakit.format.output import Output, key_of
from datakit.format.shard_entry import ShardEntry
from datakit.format.tags import require_matches
from datakit.format.tokenizer_copy import checked_tokenizer, digests_of, place_copy, tokenizer_copy
from datakit.preprocessing.meter import Meter
from datakit.preprocessing.recipe import (
    TRAIN,
    VALID,
    WHOLE,
    Recipe,
    content_probe,
    input_digest,
    older_rules,
    require_same,
    rules_of,
)
from datakit.preprocessing.sources import InputTable, require_unchanged
from datakit.preprocessing.summary import StoreSummary, Summary
from datakit.preprocessing.task import HASH, Task
from datakit.preprocessing.worker_pool import WorkerPool
from datakit.store.claim import PATIENCE_S, claim
from datakit.store.item_records import ItemRecord, read_records
from datakit.store.writer import store_dtype
from datakit.text.documents import DocumentReader
from datakit.text.hf_datasets import Input, paths_of
from datakit.text.inputs import InputFile, WorkItem, cut, default_item_bytes, find_inputs
from datakit.text.spool import Spool, is_pipe
from datakit.tokenization.encoder import AUTO, FAST, choose_backend, require_backend
from datakit.tokenization.identity import TokenizerIdentity
from datakit.tokenization.rank_file import sidecar_path
from datakit.tokenization.tokenizer import DEFAULT_EOD, Tokenizer, identify, open_tokenizer
from threefold.errors import CheckFailed, UserError, quoted

if TYPE_CHECKING:
    from datakit.preprocessing.ray_pool import RayPool

_PROBE_DOCUMENTS, _PROBE_CHARACTERS = 8, 1 << 14


def preprocess(
    inputs: Sequence[Input],
    output: str | os.PathLike[str],
    recipe: Recipe,
    *,
    num_workers: int = 1,
    backend: str = AUTO,
    engine: str = "local",
    ray_address: str | None = None,
    item_bytes: int | None = None,
    skip_unreadable: bool = False,
    report: Callable[[str], None] = lambda _: None,
    progress: Callable[[str, float], None] | None = None,
) -> Summary:
    """Make the store (with a split: the stores `train` and `valid`) of all documents of the inputs, in a folder or URL.

    An input is a path, a glob, a URL, or a dataset of Hugging Face's `datasets` that is in files of this machine.
    `backend` names what tokenizes (see encoder.py); `engine` is "local" for worker processes here or "ray" for actors
    on the cluster at `ray_address` (see ray_pool.py). Neither changes a byte. `item_bytes` overrides the size of a
    work item, `skip_unreadable` leaves out what cannot be read. `report` takes lines of what is done, `progress` how
    far it is and which share that is (without it `report` takes that too). Raises UserError and StorageError; what was
    sealed before then is kept, and the same call continues.
    """
    show, started_s = progress or (lambda line, _: report(line)), time.monotonic()
    if num_workers < 1:
        raise UserError(f"{num_workers} workers: at least 1 is needed", hint="--workers 1")
    recipe = replace(recipe, tokenizer=os.fspath(checked_tokenizer(recipe.tokenizer)))
    place, paths = Output(os.fspath(output)), paths_of(inputs, recipe.text_key)
    if any(map(is_pipe, paths)):
        _require_ready(place, recipe, engine)
    spool = Spool(report)  # its copies of pipes are there as long as it is
    own = [place.place, recipe.tokenizer, os.fspath(sidecar_path(Path(recipe.tokenizer)))]
    files = find_inputs(paths, spool, report, but=own, skip_unreadable=skip_unreadable)
    require_matches(recipe.tags, [file.path for file in files])
    job = _Job(place, recipe, files, item_bytes, report, show)
    if job.is_complete():
        report(f"{output} is complete already")
        return job.summary([], [], 0.0)
    with claim(job.output, keeps=(UserError,), patience_s=PATIENCE_S) as held:
        open_pool = partial(_open_pool, engine, num_workers, held.lock, ray_address)
        if recipe.dedup or engine != "local":
            job.begin(backend)
        if recipe.dedup:
            find_duplicates(job.output, job.items, partial(job.hash, open_pool), report)
        missing = job.missing()
        tokenized_by, num_by_reference = None, 0
        with open_pool(len(missing)) if missing else nullcontext() as pool:
            job.begin(backend)  # opens the tokenizer, while workers that run here start
            if pool:
                choice = choose_backend(backend, recipe.tokenizer, job.tokenizer, probe_texts(missing, job.recipe))
                report(f"tokenizing with {choice.backend}: {choice.reason}")
                job.report_end()
                tokenized_by = choice.backend
                task = Task(job.output.place, job.recipe, job.identity, choice.backend, choice.terms)
                num_by_reference = job.seal(missing, task, pool)
        records = job.records()
        job.finish(records)
        summary = job.summary(records, [records[item.number] for item in missing], time.monotonic() - started_s)
        return replace(summary, backend=tokenized_by, num_by_reference=num_by_reference)


def probe_texts(items: Sequence[WorkItem], recipe: Recipe) -> list[str]:
    """Return some documents from the begin, the middle and the end of the input, each cut to 16 Ki characters."""
    texts: list[str] = []
    for item in dict.fromkeys((items[0], items[len(items) // 2], items[-1])):
        reader = DocumentReader(item.slices[0], recipe.rules)
        with suppress(UserError):  # the worker that meets it reports it
            texts += [document.text[:_PROBE_CHARACTERS] for document in islice(reader, _PROBE_DOCUMENTS)]
    return texts


def _require_ready(output: Output, recipe: Recipe, engine: str) -> None:
    """UserError if nothing could be made of a pipe, which is read only once, so that not a byte of it is lost."""
    if engine != "local":
        raise UserError("a pipe cannot be read by the nodes of a cluster", hint="write it to a file first, name that")
    open_tokenizer(recipe.tokenizer)
    if not any(output.manifest(part) for part in recipe.parts):
        output.check_free()


def _open_pool(
    engine: str, num_workers: int, lock: int, ray_address: str | None, num_items: int
) -> "WorkerPool | RayPool":
    num_workers = min(num_workers, num_items)
    if engine == "local":
        return WorkerPool(num_workers, keep_open=lock)
    from datakit.preprocessing.ray_pool import RayPool

    return RayPool(num_workers, address=ray_address)


class _Job:
    """One output: what it is made from, how far it is, its beginning and end on disk, and the work between."""

    def __init__(
        self, output: Output, recipe: Recipe, files: list[InputFile], item_bytes: int | None,
        report: Callable[[str], None], show: Callable[[str, float], None],
    ) -> None:  # fmt: skip
        self.output, self.recipe, self._report, self._show = output, recipe, report, show
        if not any(file.size_bytes for file in files):
            first, names = files[0], [file.shown for file in files[:3]]
            what = f"{len(files)} files of 0 bytes" if len(files) > 1 else "1 file of 0 bytes"
            raise UserError(
                f"the input is empty: {what}: {', '.join(names)}",
                hint=first.hint("ls -l") if first.spooled else f"ls -l {' '.join(map(quoted, names))}",
            )
        self._files, self._item_bytes = files, item_bytes or default_item_bytes(files)
        self._sources: InputTable | None = None  # of complete stores
        self._rules_reported = recipe.rules_version
        self._input = {
            "num_files": len(files),
            "size_bytes": sum(file.size_bytes for file in files),
            "xxh3_64": input_digest(files),
            "item_bytes": self._item_bytes,
        }

    @cached_property
    def items(self) -> list[WorkItem]:
        """All work items; large files are looked into for them, which a complete store does without."""
        return list(cut(self._files, self._item_bytes, split_txt=self.recipe.txt_split == "line"))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The recipe's tokenizer, on its reference."""
        return open_tokenizer(self.recipe.tokenizer)

    @cached_property
    def identity(self) -> TokenizerIdentity:
        """The tokenizer's entry in the manifests; UserError if it lacks the token that ends documents."""
        recipe = self.recipe
        return identify(
            self.tokenizer,
            recipe.tokenizer,
            recipe.eod_token,
            required=recipe.append_eod or recipe.eod_token != DEFAULT_EOD,
        )

    def is_complete(self) -> bool:
        """Return whether the stores are there; UserError if others are, or where the input changed since."""
        for part in {WHOLE, TRAIN, VALID} - set(self.recipe.parts):
            if self.output.manifest(part):
                raise UserError(f"{self.output.part(part)} is a store already", hint="choose another --output")
        manifests = {part: self.output.manifest(part) for part in self.recipe.parts}
        for part, found in manifests.items():
            if found is None:
                return False
            self._require_same(found.tokenizer, found.settings, part, {"input": self._input})
        self._sources = require_unchanged(self.output, self._files, self._report)
        self.output.settle(self.recipe.parts)  # a kill may have come between the last manifest and this
        return True

    def begin(self, backend: str) -> None:
        """Compare with what was begun here, or note what is begun now; UserError if the backend cannot serve."""
        require_backend(backend, self.recipe.tokenizer, self.tokenizer)
        probe = content_probe(self._files)
        own = {"tokenizer": asdict(self.identity), "settings": self.recipe.settings(WHOLE)}
        note = self.output.begin(own | {"input": self._input, "probe": probe})
        try:
            noted = note.made_of
            tokenizer, settings = TokenizerIdentity(**noted["tokenizer"]), dict(noted["settings"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckFailed(
                f"{self.output.place}/{self.output.note_key} is damaged: {error!r}", hint="choose another --output"
            ) from None
        self._require_same(tokenizer, settings, WHOLE, {})
        if noted.get("input", self._input) != self._input or noted.get("probe", probe) != probe:
            self.output.take_over(note, input=self._input, probe=probe)

    def report_end(self) -> None:
        """Report an end-of-document token that is not written, as the tokenizer itself ends documents with it."""
        after = self.tokenizer.frame()[1]
        if self.recipe.append_eod and not self.recipe.end(self.identity, after):
            self._report(
                f"the tokenizer ends documents with {self.identity.eod_token!r} itself: it is not written twice"
            )

    def hash(self, open_pool: Callable[[int], "WorkerPool | RayPool"], items: list[WorkItem]) -> None:
        """Let workers hash the items' documents."""
        with open_pool(len(items)) as pool:
            self.seal(
                items, Task(self.output.place, self.recipe, self.identity, HASH), pool, "reading for duplicates: "
            )

    def seal(self, items: list[WorkItem], task: Task, pool: "WorkerPool | RayPool", doing: str = "") -> int:
        """Let workers seal the items, and show how far they are about every two seconds.

        Return how many documents the reference tokenized.
        """
        meter = Meter(items)
        if len(items) < len(self.items):
            self._report(f"continuing: {len(self.items) - len(items)} of {len(self.items)} work items are sealed")
        for item, message in pool.run(task, iter(items)):
            meter.update(item, message)
            if meter.is_due():
                self._show(doing + meter.line(), meter.share)
        self._show(doing + meter.line(), meter.share)
        if task.backend == FAST and meter.num_by_reference:
            self._report(f"{meter.num_by_reference:,} documents went to {task.identity.kind}, one by one")
        return meter.num_by_reference

    def missing(self) -> list[WorkItem]:
        """Return the items that are not sealed."""
        return [item for item, record in zip(self.items, read_records(self.output, self.items)) if record is None]

    def records(self) -> list[ItemRecord]:
        """Return the records of all items, which are all sealed."""
        records = [record for record in read_records(self.output, self.items) if record]
        if len(records) < len(self.items):
            raise self.output.vanished(len(self.items) - len(records), len(self.items))
        return records

    def finish(self, records: list[ItemRecord]) -> None:
        """Write the manifests, drop what is in none of them, and then the work folder."""
        shards = self._shards(records)
        counts = sum((Counter(record.skipped) for record in records), Counter[str]())
        num_documents = sum(shard.num_documents for entries in shards.values() for shard in entries)
        if not any(shard.num_tokens for entries in shards.values() for shard in entries):
            raise UserError(
                f"the input is empty: {num_documents} documents without any text, {counts.total()} skipped",
                hint=self.items[0].slices[0].file.hint("head -c 300"),
            )
        InputTable.of(self._files, records).write(self.output)
        manifests, copy = {}, tokenizer_copy(self.recipe.tokenizer, self.identity.fingerprint)
        skipped = dict(sorted(counts.items()))
        for part, entries in shards.items():
            if not entries:
                self._report(
                    f"{self.output.part(part)} holds no document: none of {num_documents} fell to it by its hash"
                )
            self.output.remove_shards(part, but={entry.name for entry in entries})  # of input that has changed since
            place_copy(self.output, part, copy)
            dtype = store_dtype(self.identity.vocab_size)
            settings = self.recipe.settings(part) | {"input": self._input}
            manifest = Manifest(dtype, self.identity, tuple(entries), settings, skipped, digests_of(copy))
            manifests[key_of(part, FILE_NAME)] = manifest.encode()
        self.output.commit(manifests, self._report)

    def summary(self, records: list[ItemRecord], sealed: list[ItemRecord], elapsed_s: float) -> Summary:
        """Return what the stores hold, and how fast those of their items were sealed that this run sealed."""
        manifests = {part: manifest for part in self.recipe.parts if (manifest := self.output.manifest(part))}
        stores = tuple(
            StoreSummary(self.output.part(part), manifest.num_documents, manifest.num_tokens, len(manifest.shards))
            for part, manifest in manifests.items()
        )
        input_bytes = sum(record.input_bytes for record in sealed)
        num_tokens = sum(shard.num_tokens for record in sealed for shards in record.shards.values() for shard in shards)
        num_items = self._sources.num_items if self._sources else len(self.items)
        return Summary(
            num_documents=sum(store.num_documents for store in stores),
            num_tokens=sum(store.num_tokens for store in stores),
            num_items=num_items,
            num_items_done_before=num_items - len(sealed),
            input_bytes=input_bytes,
            elapsed_s=elapsed_s,
            mb_per_s=input_bytes / 1e6 / elapsed_s if sealed else 0.0,
            tokens_per_s=num_tokens / elapsed_s if sealed else 0.0,
            stores=stores,
            skipped=next(iter(manifests.values())).skipped,
            backend=None,
            num_by_reference=0,
            num_replaced=sum(record.num_replaced for record in records),
        )

    def _shards(self, records: list[ItemRecord]) -> dict[str, list[ShardEntry]]:
        """Return the shards of all items by store, in order, with the number of lines of their file before them."""
        shards: dict[str, list[ShardEntry]] = {part: [] for part in self.recipe.parts}
        lines_before = 0
        for record in records:
            if record.item.slices[0].start == 0:
                lines_before = 0
            for part, entries in record.shards.items():
                shards[part] += [replace(entry, first_line=lines_before) for entry in entries]
            lines_before += record.num_lines
        return shards

    def _require_same(
        self, tokenizer: TokenizerIdentity, settings: dict[str, Any], part: str, more: dict[str, Any]
    ) -> None:
        """Go on by the rules of what is there, if they are older ones; UserError if it was made otherwise.

        That what is there follows older rules is reported once, with what they change here.
        """
        version = min(rules_of(settings), self.recipe.rules_version)
        self.recipe = replace(self.recipe, rules_version=version)
        new = self.identity, self.recipe.settings(part) | more
        require_same(self.output.place, (tokenizer, settings), new)
        if version < self._rules_reported:
            self._rules_reported = version
            self._report(f"{self.output.place} follows the rules that it was begun under: {older_rules(self.recipe)}")
