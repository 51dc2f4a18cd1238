"""Archiving: a token store into a folder or object storage, compressed so that ranges of it can still be read.

Files are streamed through compression in threads; memory is a few MiB a thread, on S3 also the parts in flight. Each
byte is checked against the store's manifest on its way. Killed, it continues: a plan under `.work` claims the
destination, a note there for each whole file keeps its digest, and `archive.json` is written last.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import xxhash

from datakit.archives.archive_record import PLAN_KEY, SUFFIX, ArchiveRecord, digest_of, store_files
from datakit.archives.file_threads import FileThreads, Report
from datakit.archives.seekable_zstd import FRAME_BYTES, pack
from datakit.archives.store_source import StoreSource
from datakit.files.durable import FileDigest, blocks_of
from datakit.store.manifest import ARCHIVE_NAME, FILE_NAME, WORK_FOLDER, is_plain_folder
from datakit.store.output import abort_uploads
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage, is_temporary
from threefold.storage.repeating import open_repeating, repeating

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
    num_workers: int = 1,
    report: Report = lambda text: None,
) -> ArchiveSummary:
    """Make an archive of a local store at a folder or URL; UserError where that holds anything else.

    The same call continues after a kill, and gives the summary where the archive is complete. One run at a time.
    """
    if not 1 <= level <= MAX_LEVEL:
        raise UserError(f"there is no level {level}", hint=f"--level {DEFAULT_LEVEL}, of 1 to {MAX_LEVEL}")
    threads = FileThreads(num_workers)
    if not is_plain_folder(os.fspath(store)):
        raise UserError(
            f"{store} is no token store in a local folder", hint=f"datakit unarchive {store} --output STORE"
        )
    opened = TokenStore.open(store)
    work = _Archiving(opened, open_repeating(destination), level, threads, report)
    return work.run()


class _Archiving:
    """One run of `archive`."""

    def __init__(self, store: TokenStore, storage: Storage, level: int, threads: FileThreads, report: Report) -> None:
        self._folder, self._storage, self._level = store.path, storage, level
        self._threads, self._report = threads, report
        self._files = store_files(store.manifest)
        self._manifest_bytes = b"".join(blocks_of(store.path / FILE_NAME))
        self._manifest = digest_of(self._manifest_bytes)

    def run(self) -> ArchiveSummary:
        """Make what is missing, then commit."""
        if self._storage.info(ARCHIVE_NAME):
            record, num_kept = self._complete_record(), len(self._files)
        else:
            sizes = self._claim()
            kept = {name: digest for name in self._files if (digest := self._kept(name, sizes))}
            missing = [name for name in self._files if name not in kept]
            made = kept | dict(zip(missing, self._threads.map(self._pack, missing, self._report), strict=True))
            files = {f"{name}{SUFFIX}": made[name] for name in self._files}
            record, num_kept = ArchiveRecord(self._level, FRAME_BYTES, self._manifest, files), len(kept)
            if files:
                prefix = os.path.commonprefix(list(files))  # noqa: RUF071 - the begin of keys, not a folder
                abort_uploads(self._storage, prefix, self._report)
            self._storage.write(FILE_NAME, self._manifest_bytes)
            self._storage.write(ARCHIVE_NAME, record.encode())
        self._storage.delete([PLAN_KEY, *map(_note_key, self._files)])
        return ArchiveSummary(
            self._storage.url,
            len(self._files),
            num_kept,
            sum(digest.size_bytes for digest in self._files.values()),
            record.packed_bytes,
        )

    def _complete_record(self) -> ArchiveRecord:
        """The record of the complete archive that is there; UserError where it is another one."""
        url = self._storage.url
        record = StoreSource.open(self._storage.address).record
        assert record
        if (record.manifest, record.level, record.frame_bytes) != (self._manifest, self._level, FRAME_BYTES):
            raise UserError(
                f"{url} holds an archive of another store or made in another way", hint="choose another --output"
            )
        sizes = {found.key: found.size_bytes for found in self._storage.list()}
        for name, digest in record.files.items():
            if sizes.get(name) != digest.size_bytes:
                raise CheckFailed(
                    f"{url}/{name} has {sizes.get(name, 'no')} bytes, {ARCHIVE_NAME} says {digest.size_bytes}",
                    hint=f"datakit verify {url}",
                )
        return record

    def _claim(self) -> dict[str, int]:
        """Take an empty destination or one that the same command has begun; gives the sizes of what is there."""
        url = self._storage.url
        plan = orjson.dumps({"manifest": asdict(self._manifest), "level": self._level, "frame_bytes": FRAME_BYTES})
        begun, ours, sizes = self._storage.info(PLAN_KEY), {PLAN_KEY}, {}
        if begun:
            if begun.size_bytes != len(plan) or self._storage.read(PLAN_KEY) != plan:
                raise UserError(
                    f"{url} was begun of another store or in another way",
                    hint="rerun the command it was begun with, or choose another --output",
                )
            ours |= {FILE_NAME} | {key for name in self._files for key in (f"{name}{SUFFIX}", _note_key(name))}
        for found in self._storage.list():
            if found.key not in ours:
                raise UserError(f"{url} is not empty: it holds {found.key}", hint="choose another --output")
            sizes[found.key] = found.size_bytes
        if not begun:
            self._storage.write(PLAN_KEY, plan, if_absent=True)
        elif (plan_file := self._storage.local_path(PLAN_KEY)) is not None:
            names = {key.rpartition("/")[2] for key in (*ours, ARCHIVE_NAME)}
            for folder in (plan_file.parent, plan_file.parent.parent):
                _remove_temporaries(folder, names)
        return sizes

    def _kept(self, name: str, sizes: dict[str, int]) -> FileDigest | None:
        """The digest of a file that an earlier run has stored whole and noted, else None."""
        key, note_key = f"{name}{SUFFIX}", _note_key(name)
        if key not in sizes or not 0 < sizes.get(note_key, 0) <= _MAX_NOTE_BYTES:
            return None
        try:
            digest = FileDigest(**orjson.loads(self._storage.read(note_key)))
        except (orjson.JSONDecodeError, TypeError):
            return None
        return digest if digest.size_bytes == sizes[key] else None

    def _pack(self, name: str) -> FileDigest:
        """Store one file compressed, then note its digest."""
        digest = repeating(lambda: self._write_packed(name))
        self._storage.write(_note_key(name), orjson.dumps(asdict(digest)))
        return digest

    def _write_packed(self, name: str) -> FileDigest:
        stream = _PackedStream(self._folder / name, self._files[name], self._level, self._threads)
        try:
            self._storage.write(f"{name}{SUFFIX}", iter(stream))
        except Exception:
            if stream.fault:  # a client library may have made an error of its own of it
                raise stream.fault from None
            raise
        return FileDigest(stream.size_bytes, stream.hasher.hexdigest())


class _PackedStream:
    """The bytes of one file's compressed form, made as they are taken; `fault` is what ended them early."""

    def __init__(self, source: Path, digest: FileDigest, level: int, threads: FileThreads) -> None:
        self._source, self._digest, self._level, self._threads = source, digest, level, threads
        self.hasher, self.size_bytes = xxhash.xxh3_64(), 0
        self.fault: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            for buffer in pack(self._checked_blocks(), self._level, FRAME_BYTES):
                self.hasher.update(buffer)
                self.size_bytes += len(buffer)
                yield buffer
        except Exception as fault:
            self.fault = fault
            raise

    def _checked_blocks(self) -> Iterator[bytes]:
        """The file's bytes; CheckFailed before the stream can end where they are not the manifest's."""
        hasher = xxhash.xxh3_64()
        for block in self._threads.until_ended(blocks_of(self._source)):
            hasher.update(block)
            yield block
        if hasher.hexdigest() != self._digest.xxh3_64:
            raise CheckFailed(
                f"{self._source} is damaged: its checksum does not hold", hint=f"datakit verify {self._source.parent}"
            )


def _note_key(name: str) -> str:
    return f"{WORK_FOLDER}/{name}{SUFFIX}.json"


def _remove_temporaries(folder: Path, names: set[str]) -> None:
    """Remove what a killed run has half written of these files: a local file gets its name once it is whole."""
    for path in folder.iterdir():
        if is_temporary(path.name) and path.name[1:].rsplit(".", 2)[0] in names:
            path.unlink(missing_ok=True)
