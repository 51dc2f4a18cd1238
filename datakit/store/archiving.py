"""Archiving: a token store into a folder or object storage, compressed so that ranges can be read; and back.

Files are streamed through compression in threads; memory is a few MiB a thread, on S3 also the parts in flight. Each
byte is checked against the store's manifest on its way. Killed, it continues: a plan under `.work` claims the
destination, a note there for each whole file keeps its digest, and `archive.json` is written last.

Back, from an archive or a store, in a folder or at a URL, files are fetched in bounded ranges. A file gets its name
once it is whole, durable and of the manifest's checksum; the same call continues with the next one.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock
from typing import TypeVar

import orjson
import xxhash

from datakit.files.durable import FileDigest, blocks_of, checked_blocks, durable_file, url_behind
from datakit.format.archive_record import SUFFIX, ArchiveRecord
from datakit.format.manifest import ARCHIVE_NAME, FILE_NAME, WORK_FOLDER, is_plain_folder
from datakit.format.output import ASSEMBLY_NOTE, LOCK, Output
from datakit.format.seekable_zstd import FRAME_BYTES, MAX_FRAME_BYTES, pack
from datakit.shards.store_source import SourceFile, StoreSource
from datakit.store.claim import claim
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, StorageError, UserError, quoted

File = TypeVar("File")
Result = TypeVar("Result")
Report = Callable[[str], None]


class Ended(Exception):
    """Another file has failed: what this thread does is of no use any more."""


class FileThreads:
    """`num_workers` threads that each take one file after the other; good for one `map`."""

    def __init__(self, num_workers: int, *, report_every_s: float = 2.0) -> None:
        if num_workers < 1:
            raise UserError(f"{num_workers} workers: at least 1 is needed", hint="--workers 1")
        self._num_workers, self._report_every_s, self._ended = num_workers, report_every_s, Event()
        self._num_bytes, self._lock = 0, Lock()

    def map(self, work: Callable[[File], Result], files: Sequence[File], report: Report) -> list[Result]:
        """Return the results in the files' order.

        After a fault no file is begun, and it is raised once all threads rest.
        """

        def work_unless_ended(file: File) -> Result:
            if self._ended.is_set():
                raise Ended
            try:
                return work(file)
            except BaseException:
                self._ended.set()
                raise

        with ThreadPoolExecutor(self._num_workers) as pool:
            futures = [pool.submit(work_unless_ended, file) for file in files]
            unfinished = set(futures)
            try:
                while unfinished := wait(unfinished, timeout=self._report_every_s).not_done:
                    report(f"{len(files) - len(unfinished)}/{len(files)} files, {self._num_bytes / 1e6:,.1f} MB")
            finally:  # an interrupt comes up here, in the main thread
                self._ended.set()
        for future in futures:
            fault = future.exception()
            if fault is not None and not isinstance(fault, Ended):
                raise fault
        return [future.result() for future in futures]

    def until_ended(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the blocks of one file's work, which are counted.

        Ended between two of them once the work on all ends.
        """
        for block in blocks:
            if self._ended.is_set():
                raise Ended
            with self._lock:
                self._num_bytes += len(block)
            yield block


DEFAULT_LEVEL, MAX_LEVEL = 3, 19
_MAX_NOTE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """What an archive holds; `num_kept` files of an earlier run were kept."""

    path: str
    num_files: int
    num_kept: int
    size_bytes: int
    packed_bytes: int


def archive(
    store: str | os.PathLike[str],
    destination: str,
    *,
    level: int = DEFAULT_LEVEL,
    frame_bytes: int = FRAME_BYTES,
    num_workers: int = 1,
    report: Report = lambda text: None,
) -> ArchiveSummary:
    """Make an archive of a local store at a folder or URL; UserError if that holds anything else.

    Of each file so many bytes are a frame: what a reader of a single document unpacks. The same call continues after a
    kill, and returns the summary if the archive is complete. One run at a time.
    """
    if not 1 <= level <= MAX_LEVEL:
        raise UserError(f"there is no level {level}", hint=f"--level {DEFAULT_LEVEL}; 1 to {MAX_LEVEL} are levels")
    if not 1 <= frame_bytes <= MAX_FRAME_BYTES:
        raise UserError(f"frames of {frame_bytes} bytes", hint=f"frame_bytes={FRAME_BYTES}; at most {MAX_FRAME_BYTES}")
    threads = FileThreads(num_workers)
    if not is_plain_folder(os.fspath(store)):
        raise UserError(
            f"{store} is not a token store in a local folder", hint=f"datakit unarchive {quoted(store)} --output STORE"
        )
    output = Output(destination, ARCHIVE_NAME)
    return _Archiving(TokenStore.open(store), output, level, frame_bytes, threads, report).run()


class _Archiving:
    """One run of `archive`."""

    def __init__(
        self, store: TokenStore, output: Output, level: int, frame_bytes: int, threads: FileThreads, report: Report
    ) -> None:
        self._folder, self._output, self._level, self._frame_bytes = store.path, output, level, frame_bytes
        self._threads, self._report = threads, report
        self._files, self._copy = store.manifest.files(), store.manifest.tokenizer_files
        self._manifest_bytes = b"".join(blocks_of(store.path / FILE_NAME))
        self._manifest = FileDigest.of(self._manifest_bytes)

    def run(self) -> ArchiveSummary:
        """Make what is missing, then commit."""
        if self._output.size_of(ARCHIVE_NAME):
            record, num_kept = self._complete_record(), len(self._files)
            self._output.settle()
        else:
            plan = {"manifest": asdict(self._manifest), "level": self._level, "frame_bytes": self._frame_bytes}
            with claim(self._output, plan, keeps=(UserError,)):
                record, num_kept = self._make()
        return ArchiveSummary(
            self._output.storage.url,
            len(self._files),
            num_kept,
            sum(digest.size_bytes for digest in self._files.values()),
            record.packed_bytes,
        )

    def _make(self) -> tuple[ArchiveRecord, int]:
        """Compress the files that are missing, and commit; also return how many were kept."""
        sizes = self._own_sizes()
        stored = {name: digest for name in self._files if (digest := self._stored(name, sizes))}
        missing = [name for name in self._files if name not in stored]
        packed = stored | dict(zip(missing, self._threads.map(self._pack, missing, self._report), strict=True))
        files = {f"{name}{SUFFIX}": packed[name] for name in self._files}
        record = ArchiveRecord(self._level, self._frame_bytes, self._manifest, files)
        for name, digest in self._copy.items():  # as they are: they are small, and read by themselves
            if not self._output.has(name, digest):
                self._output.write(name, b"".join(checked_blocks(self._folder / name, digest)))
        self._output.commit({FILE_NAME: self._manifest_bytes, ARCHIVE_NAME: record.encode()}, self._report)
        return record, len(stored)

    def _complete_record(self) -> ArchiveRecord:
        """Return the record of the complete archive that is there; raise UserError if it is another one."""
        url = self._output.storage.url
        record = StoreSource.open(self._output.place).record
        assert record
        made_of = record.manifest, record.level, record.frame_bytes
        if made_of != (self._manifest, self._level, self._frame_bytes):
            raise UserError(
                f"{url} holds an archive of another store or made in another way", hint="choose another --output"
            )
        sizes = self._output.sizes()
        for name, digest in record.files.items():
            if sizes.get(name) != digest.size_bytes:
                raise CheckFailed(
                    f"{url}/{name} has {sizes.get(name, 'no')} bytes, {ARCHIVE_NAME} says {digest.size_bytes}",
                    hint=f"datakit verify {quoted(url)}",
                )
        return record

    def _own_sizes(self) -> dict[str, int]:
        """Return the sizes of what is there; raise UserError if some of it is not of this archive."""
        ours = {self._output.note_key, f"{WORK_FOLDER}/{LOCK}", FILE_NAME, *self._copy}
        ours |= {key for name in self._files for key in (f"{name}{SUFFIX}", _note_key(name))}
        sizes = self._output.sizes()
        if strange := next((key for key in sizes if key not in ours), None):
            raise UserError(f"{self._output.place} is not empty: it holds {strange}", hint="choose another --output")
        return sizes

    def _stored(self, name: str, sizes: dict[str, int]) -> FileDigest | None:
        """Return the digest of a file that an earlier run has stored whole and noted, else None."""
        key, note_key = f"{name}{SUFFIX}", _note_key(name)
        if key not in sizes or not 0 < sizes.get(note_key, 0) <= _MAX_NOTE_BYTES:
            return None
        try:
            digest = FileDigest(**orjson.loads(self._output.storage.read(note_key)))
        except (orjson.JSONDecodeError, TypeError):
            return None
        return digest if digest.size_bytes == sizes[key] else None

    def _pack(self, name: str) -> FileDigest:
        """Store one file compressed, then note its digest."""
        digest = FileDigest(0, "")

        def packed() -> Iterator[bytes]:
            nonlocal digest
            hasher, size_bytes = xxhash.xxh3_64(), 0
            blocks = self._threads.until_ended(checked_blocks(self._folder / name, self._files[name]))
            for buffer in pack(blocks, self._level, self._frame_bytes):
                hasher.update(buffer)
                size_bytes += len(buffer)
                yield buffer
            digest = FileDigest(size_bytes, hasher.hexdigest())

        self._output.upload(f"{name}{SUFFIX}", packed)
        self._output.write(_note_key(name), orjson.dumps(asdict(digest)))
        return digest


def _note_key(name: str) -> str:
    return f"{WORK_FOLDER}/{name}{SUFFIX}.json"


def unarchive(
    source: str, output: str | os.PathLike[str], *, num_workers: int = 1, report: Report = lambda text: None
) -> TokenStore:
    """Make a local store of an archive or a plain store; UserError if the output holds anything else.

    CheckFailed names a file that is damaged at the source; those fetched before are kept for the next call.
    """
    threads = FileThreads(num_workers)
    opened, folder = StoreSource.open(source), Path(output)
    if url := url_behind(folder):
        raise UserError(
            f"{url} is not a local folder, and only there can this be made",
            hint=f"choose a folder as --output; for a store, then datakit archive FOLDER --output {quoted(url)}",
        )
    place = Output(os.fspath(output), ASSEMBLY_NOTE)
    # an archive has such a manifest too, and files of other names
    if is_plain_folder(os.fspath(output)) and place.read(FILE_NAME) == opened.manifest_bytes:
        place.settle()
        return TokenStore.open(folder)

    def write(source: StoreSource, file: SourceFile, target: Path) -> None:
        with durable_file(target) as stream:
            stream.writelines(threads.until_ended(source.blocks(file)))

    def fetch(file: SourceFile) -> None:
        if not place.has(file.name, file.digest):
            target = place.scratch / file.name
            opened.checked(file, lambda source: write(source, file, target))
            place.adopt("", [target])

    made_of = {"manifest": asdict(FileDigest.of(opened.manifest_bytes))}
    with claim(place, made_of, keeps=(StorageError, CheckFailed)):
        threads.map(fetch, opened.files, report)
        for name, digest in opened.manifest.tokenizer_files.items():
            if not place.has(name, digest):
                place.write(name, opened.copied(name, digest))
        place.commit({FILE_NAME: opened.manifest_bytes})
    return TokenStore.open(folder)
