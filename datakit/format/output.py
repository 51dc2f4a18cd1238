"""Output: a place, a local folder or a URL, that a verb puts stores, an archive or indexed datasets into.

Files are written in a local scratch folder and then moved, or uploaded, under their names; notes, records and manifests
are small objects that a Storage writes atomically and durably. Who writes an output holds it first (see claim.py).
"""

import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import xxhash

from datakit.files.durable import FileDigest, blocks_of, checked_blocks, durable_file, temporary_folder, writing
from datakit.files.remote_file import is_url
from datakit.format.manifest import FILE_NAME, WORK_FOLDER, Manifest
from datakit.text.inputs import open_file
from threefold.claim import Note, this_process
from threefold.errors import StorageError, UserError, is_utf8, quoted
from threefold.storage import AlreadyExists, Storage, TemporaryFailure, written_name
from threefold.storage.folders import local_root, make_folders, sync_folder
from threefold.storage.local import LocalStorage, sync_name
from threefold.storage.repeating import open_repeating, repeating
from threefold.storage.stale_uploads import abort_stale_uploads

RECIPE_NOTE, ASSEMBLY_NOTE, LOCK = "recipe.json", "assembly.json", "lock"
RUN = "run"  # in a note: the run that put it
UPLOAD_MEMORY_BYTES = 48 << 20
_NUM_READERS, _BLOCK_BYTES = 64, 4 << 20


class Output:
    """One output; `place` is how the user named it, `note_key` the note of what it is made of.

    While this process holds it, `lock` is the descriptor of its lock.
    """

    def __init__(self, place: str, note: str = RECIPE_NOTE) -> None:
        if not is_utf8(place):
            raise UserError(f"the name {place!r} is not UTF-8", hint="choose another --output")
        self.folder = None if is_url(place) else Path(place)
        self.place = str(self.folder or place.rstrip("/"))
        self.note_key = f"{WORK_FOLDER}/{note}"
        self.lock, self.is_complete, self._is_begun_here = -1, False, False
        self.storage = open_repeating(place, write_memory_bytes=UPLOAD_MEMORY_BYTES)
        self._placed: set[str] = set()
        self.may_grow = False  # whether an upload ended without an answer, so that its file may come yet
        self._held: Note | None = None
        name = f"datakit-{os.getuid()}-{xxhash.xxh3_64_hexdigest(self.place.encode())}"
        self.work = self.folder / WORK_FOLDER if self.folder else temporary_folder() / name
        self.scratch = self.work / "shards"  # for what is not sealed yet; each encoder has a folder of its own in it

    def part(self, part: str) -> str:
        """How one of the output's stores is named."""
        return f"{self.place}/{part}" if part else self.place

    def manifest(self, part: str = "") -> Manifest | None:
        """Return the manifest of one of the output's stores, None if it is not complete."""
        content = self.read(key_of(part, FILE_NAME))
        return None if content is None else Manifest.parse(f"{self.part(part)}/{FILE_NAME}", content)

    def read(self, key: str) -> bytes | None:
        """Return a small file of the output, None if it is missing."""
        return self.storage.read(key) if self.storage.info(key) else None

    def read_many(self, keys: Iterable[str], among: Collection[str]) -> Iterator[bytes | None]:
        """Small files of the output in order, None for each that is not `among` those there; read side by side."""
        with ThreadPoolExecutor(_NUM_READERS) as threads:
            yield from threads.map(lambda key: self.storage.read(key) if key in among else None, keys)

    def write(self, key: str, content: bytes) -> None:
        """Put a small file, seen whole or not at all."""
        folder, _, name = key.rpartition("/")
        storage, root = self._storage_of(folder)
        storage.write(f"{root}{name}", content)

    def begin(self, made_of: dict[str, Any]) -> Note:
        """Put the note of what the output is made of, and return it, or the one that is there.

        On a local disk, where the lock lets no other in, one under which nothing was made yet is replaced. Raise
        StorageError if another machine's run filled the output since it was looked at.
        """
        made_of = orjson.loads(orjson.dumps(made_of))  # as it is read again
        if self.read(self.note_key) is None:
            with suppress(AlreadyExists):
                self._put_note(made_of, if_absent=self.storage.supports_if_absent)
                self._is_begun_here = True
                self._refuse_filled()
        sync_name(self.storage, self.note_key)
        self._held = self._note()
        if self._held is None:
            raise self._taken()
        noted = self._held.made_of
        if self.folder and noted != made_of and noted.keys() == made_of.keys() and not self.holds_any():
            self._put_note(made_of)
            self._held = Note(made_of, this_process())
        return self._held

    def holds_any(self) -> bool:
        """Return whether anything was made here since the note was put."""
        return any(key not in (self.note_key, f"{WORK_FOLDER}/{LOCK}") for key in self.sizes())

    def take_over(self, note: Note, **changes: Any) -> None:
        """Replace a note that differs from what this run makes; UserError behind a URL, where its run may be alive."""
        if self.folder is None:
            raise UserError(
                f"{self.place} was begun from other input{note.by}",
                hint="rerun with the input it was begun with, or choose another --output",
            )
        self._put_note(note.made_of | changes)

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file of the output."""
        return bytes(self.storage.read_ranges(key, [(start, stop)])[0])

    def blocks(self, key: str) -> Iterator[bytes]:
        """Yield the bytes of a file of the output, some MiB at a time."""
        with open_file(f"{self.place}/{key}") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block

    def adopt(self, folder: str, files: Sequence[Path]) -> None:
        """Move finished, durable files into one of the output's stores, or another folder of it."""
        keys = [key_of(folder, file.name) for file in files]
        self._placed.update(keys)
        if self.folder is None:
            for file, key in zip(files, keys, strict=True):
                self.upload(key, lambda file=file: blocks_of(file))  # type: ignore[misc]
                file.unlink()
            return
        target = self.folder / folder
        with writing(target):
            make_folders(target)
            for file in files:
                file.replace(target / file.name)
            sync_folder(target)

    def place_file(self, source: Path, name: str, digest: FileDigest, *, copy: bool) -> None:
        """Give the output a file of these bytes; one that an earlier run placed is kept.

        A copy, and what goes to a URL, is checked against its digest, a hard link against its size alone.
        """
        if self.has(name, digest):
            return
        if self.folder is None:
            self.upload(name, lambda: checked_blocks(source, digest), size_bytes=digest.size_bytes)
        elif copy:
            temporary = self.scratch / name
            with durable_file(temporary) as file:
                file.writelines(checked_blocks(source, digest))
            self.adopt("", [temporary])
        else:
            target = self.folder / name
            try:
                target.unlink(missing_ok=True)
                target.hardlink_to(source)
            except OSError as error:
                raise StorageError(f"cannot link {source} as {target}: {error.strerror}", hint="--copy") from error

    def has(self, name: str, digest: FileDigest) -> bool:
        """Return whether an earlier run placed a file of this name and size, which is then kept."""
        self._placed.add(name)
        return self.size_of(name) == digest.size_bytes

    def upload(self, key: str, blocks: Callable[[], Iterable[bytes]], *, size_bytes: int | None = None) -> None:
        """Write a large file, whole or not at all; `blocks` makes its bytes once more for each try.

        An exception of theirs is raised as it is, whatever a client library makes of it.
        """

        def write() -> None:
            faults: list[Exception] = []
            try:
                self.storage.write(key, _noting(faults, blocks()), size_bytes=size_bytes)
            except Exception as error:
                if faults:
                    raise faults[0] from None
                self.may_grow |= isinstance(error, TemporaryFailure)
                raise

        repeating(write)

    def commit(self, contents: Mapping[str, bytes], report: Callable[[str], None] = lambda _: None) -> None:
        """Complete the output: write these small files in order, which name what it holds, and drop the work folder.

        The files' names are durable before. `report` takes what could not be tidied up on a server.
        """
        for part in {key.rpartition("/")[0] for key in contents} or {""}:
            try:
                abort_stale_uploads(self.storage, key_of(part, "shard-"), older_than_s=-math.inf)
            except UserError as error:
                report(f"uploads that a killed run left unfinished may remain at {self.storage.url}: {error.message}")
        for folder in sorted({key.rpartition("/")[0] for key in (*self._placed, *contents)} | {""}):
            if self.folder and (self.folder / folder).is_dir():  # a killed run may have put some of the names
                sync_name(self.storage, key_of(folder, "any"))
        if self.folder is None:
            self._require_held(contents)
        for key, content in contents.items():
            self._put_last(key, content)
        self.remove_work()
        self.is_complete = True

    def settle(self, parts: Iterable[str] = ("",)) -> None:
        """Make durable what an earlier run completed, and drop what it left of its work."""
        for part in parts:
            sync_name(self.storage, key_of(part, FILE_NAME))
        self.remove_work()

    def abandon(self) -> None:
        """Remove all that was placed, and the note; sources keep their own names.

        Behind a URL what another run has begun stays: it may be at work.
        """
        if self.folder is None and not self._is_begun_here:
            return
        self.storage.delete(sorted(self._placed))
        self.remove_work()

    def _put_note(self, made_of: dict[str, Any], *, if_absent: bool = False) -> None:
        self.storage.write(self.note_key, Note(made_of, this_process()).encode(RUN), if_absent=if_absent)

    def _note(self) -> Note | None:
        content = self.read(self.note_key)
        return None if content is None else Note.parse(f"{self.place}/{self.note_key}", content, RUN)

    def _refuse_filled(self) -> None:
        """Take the note back if another run made something here between the look for it and the note.

        On a local disk the lock lets no other in.
        """
        if self.folder is None and any(info.key != self.note_key for info in self.storage.list()):
            self.storage.delete([self.note_key])
            raise self._taken()

    def _require_held(self, contents: Iterable[str]) -> None:
        """Raise StorageError if another run emptied the output, or holds it.

        One that made the same may have completed it.
        """
        note = self._note()
        is_whole = note is not None or self.sizes().keys() >= {*self._placed, *contents}
        if not is_whole or (note and self._held and note.made_of != self._held.made_of):
            raise self._taken(note)

    def _put_last(self, key: str, content: bytes) -> None:
        """Put a small file that says that the output is complete; behind a URL StorageError if another run put one."""
        if self.folder:
            self.write(key, content)
            return
        try:
            self.storage.write(key, content, if_absent=self.storage.supports_if_absent)
        except AlreadyExists:
            raise self._taken() from None

    def _taken(self, note: Note | None = None) -> StorageError:
        """Return what to raise if another run works on this output, or has just completed it."""
        by = note.by if note else ""
        return StorageError(
            f"{self.place} is taken: another run writes it or has just completed it{by}",
            hint=f"datakit inspect {quoted(self.place)}; choose another --output",
        )

    def _storage_of(self, folder: str) -> tuple[Storage, str]:
        """Return the storage of one of the output's folders and how its keys begin; a store may be a link to a disk."""
        if self.folder is None or not folder or folder.startswith(WORK_FOLDER):
            return self.storage, key_of(folder, "")
        return LocalStorage(self.folder / folder), ""

    def size_of(self, key: str) -> int | None:
        """Return the size in bytes of a file of the output, None if it is missing."""
        info = self.storage.info(key)
        return info.size_bytes if info else None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of all that is there, or below a folder, by key."""
        return {info.key: info.size_bytes for info in self.storage.list(key_of(folder, ""))}

    def remove_shards(self, part: str, *, but: set[str]) -> None:
        """Remove the shards of one of the output's stores, except those of these names."""
        files = [key.removeprefix(key_of(part, "")) for key in self.sizes(part)]
        names = [name for name in files if name.startswith("shard-") and Path(name).stem not in but]
        storage, root = self._storage_of(part)
        storage.delete([f"{root}{name}" for name in names])

    def remove_folder(self, folder: str) -> None:
        """Remove all files below a folder of the output."""
        self.storage.delete(list(self.sizes(folder)))

    def remove_work(self) -> None:
        """Remove all that only an unfinished output needs."""
        if self.folder is None:
            self.remove_folder(WORK_FOLDER)
        self.remove_leftovers()
        shutil.rmtree(self.work, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove what kills left half written: unsealed files, and small ones that were being put."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        if root := local_root(self.storage):
            for path in (*root.glob(".*.tmp"), *root.glob("*/.*.tmp")):
                if written_name(path.name):
                    path.unlink(missing_ok=True)

    def remove_unbegun(self) -> None:
        """Remove the local folders of a run that ended before it noted anything."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.folder and (self.is_complete or (self.folder / self.note_key).exists()):
            return
        shutil.rmtree(self.work, ignore_errors=True)
        if self.folder:
            with suppress(OSError):  # it holds a store
                self.folder.rmdir()

    def vanished(self, num_lost: int, num_items: int) -> StorageError:
        """Return what to raise where all work items were done, and some no longer are."""
        counts = f"{num_lost} of {num_items} sealed work items"
        return StorageError(
            f"{counts} have vanished from {self.place}: does another run write there?",
            hint="rerun the same command to continue",
        )

    def check_free(self) -> None:
        """Raise UserError if the output holds anything but what a run with the same kind of note has begun."""
        if self.folder and self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.place} is not a folder", hint="choose another --output")
        if self.read(self.note_key) is not None:
            return
        foreign = next((info.key for info in self.storage.list() if info.key != f"{WORK_FOLDER}/{LOCK}"), None)
        if foreign and self.read(self.note_key) is None:  # no other machine's run has begun meanwhile
            raise UserError(f"{self.place} is not empty: it holds {foreign}", hint="choose another --output")


def key_of(part: str, name: str) -> str:
    """Return the key of a file in one of an output's stores."""
    return f"{part}/{name}" if part else name


def _noting(faults: list[Exception], blocks: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from blocks
    except Exception as fault:
        faults.append(fault)
        raise
