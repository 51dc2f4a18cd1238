"""Output: where `preprocess` makes its stores, a local folder or a URL, and what is sealed there so far.

Shards are written in a local scratch folder and then moved, or uploaded, under their names; records and manifests are
small objects that a Storage writes atomically and durably. One run at a time works on a local output; behind a URL only
runs of one machine exclude each other, and runs of several put the same bytes.
"""

import fcntl
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from datakit.files.durable import blocks_of, temporary_folder, writing
from datakit.files.remote_file import is_url
from datakit.store.manifest import FILE_NAME, WORK_FOLDER, Manifest
from datakit.text.inputs import open_file
from threefold.errors import StorageError, UserError
from threefold.scratch import is_kept
from threefold.storage import AlreadyExists, Storage, written_name
from threefold.storage.folders import make_folders, sync_folder
from threefold.storage.local import LocalStorage
from threefold.storage.repeating import open_repeating, repeating
from threefold.storage.stale_uploads import abort_stale_uploads

NOTE = f"{WORK_FOLDER}/recipe.json"
LOCK_PATIENCE_S = 5.0
UPLOAD_MEMORY_BYTES = 48 << 20
_NUM_READERS, _BLOCK_BYTES = 64, 4 << 20


class Output:
    """One output; `place` is how the user named it."""

    def __init__(self, place: str) -> None:
        self.folder = None if is_url(place) else Path(place)
        self.place = str(self.folder or place.rstrip("/"))
        self._storage = open_repeating(place, write_memory_bytes=UPLOAD_MEMORY_BYTES)
        name = f"datakit-{os.getuid()}-{xxhash.xxh3_64_hexdigest(self.place.encode())}"
        self.work = self.folder / WORK_FOLDER if self.folder else temporary_folder() / name

    @property
    def scratch(self) -> Path:
        """The local folder for what is not sealed yet; each encoder has a folder of its own in it."""
        return self.work / "shards"

    def part(self, part: str) -> str:
        """How one of the output's stores is named."""
        return f"{self.place}/{part}" if part else self.place

    def manifest(self, part: str) -> Manifest | None:
        """The manifest of one of the output's stores, None where it is not complete."""
        content = self.read(key_of(part, FILE_NAME))
        return None if content is None else Manifest.parse(f"{self.part(part)}/{FILE_NAME}", content)

    def read(self, key: str) -> bytes | None:
        """A small file of the output, None where it is missing."""
        return self._storage.read(key) if self._storage.info(key) else None

    def read_many(self, keys: Sequence[str]) -> Iterator[bytes]:
        """Small files of the output, which are there, in order; read side by side."""
        with ThreadPoolExecutor(_NUM_READERS) as threads:
            yield from threads.map(self._storage.read, keys)

    def write(self, key: str, content: bytes) -> None:
        """Put a small file, seen whole or not at all."""
        folder, _, name = key.rpartition("/")
        storage, root = self._storage_of(folder)
        storage.write(f"{root}{name}", content)

    def begin(self, note: bytes) -> bytes:
        """Put the note that says how the output is made, or give the one that is there."""
        found = self.read(NOTE)
        if found is None:
            try:
                self._storage.write(NOTE, note, if_absent=self._storage.supports_if_absent)
            except AlreadyExists:
                found = self.read(NOTE)
        return found or note

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a file of the output."""
        [content] = self._storage.read_ranges(key, [(start, stop)])
        return bytes(content)

    def blocks(self, key: str) -> Iterator[bytes]:
        """The bytes of a file of the output, some MiB at a time."""
        with open_file(f"{self.place}/{key}") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block

    def adopt(self, folder: str, files: Iterable[Path]) -> None:
        """Move finished, durable files into one of the output's stores, or another folder of it."""
        if self.folder is None:
            for file in files:
                self._upload(file, key_of(folder, file.name))
            return
        target = self.folder / folder
        with writing(target):
            make_folders(target)
            for file in files:
                file.replace(target / file.name)
            sync_folder(target)

    def _storage_of(self, folder: str) -> tuple[Storage, str]:
        """The storage of one of the output's folders, and how its keys begin; a local one may be a link to a disk."""
        if self.folder is None or not folder:
            return self._storage, key_of(folder, "")
        return LocalStorage(self.folder / folder), ""

    def size_of(self, key: str) -> int | None:
        """The size in bytes of a file of the output, None where it is missing."""
        info = self._storage.info(key)
        return info.size_bytes if info else None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The size in bytes of all that is there, or below a folder, by key."""
        return {info.key: info.size_bytes for info in self._storage.list(key_of(folder, ""))}

    def remove_shards(self, part: str, *, but: set[str]) -> None:
        """Remove the shards of one of the output's stores, except those of these names."""
        keys = [key.removeprefix(key_of(part, "")) for key in self.sizes(part)]
        names = [name for name in keys if name.startswith("shard-") and Path(name).stem not in but]
        storage, root = self._storage_of(part)
        storage.delete([f"{root}{name}" for name in names])

    def abort_uploads(self, part: str, report: Callable[[str], None]) -> None:
        """Abort the uploads of shards of one of the output's stores that killed runs left unfinished."""
        abort_uploads(self._storage, key_of(part, "shard-"), report)

    def remove_folder(self, folder: str) -> None:
        """Remove all files below a folder of the output."""
        self._storage.delete(list(self.sizes(folder)))

    def remove_work(self) -> None:
        """Remove all that only an unfinished output needs, and what kills left of small files that were being put."""
        if self.folder is None:
            self.remove_folder(WORK_FOLDER)
        else:
            for path in (*self.folder.glob(".*.tmp"), *self.folder.glob("*/.*.tmp")):
                if written_name(path.name):
                    path.unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the output for this process and its workers; gives the lock's file descriptor."""
        self.check_free()
        lock = self.work / "lock"
        with writing(self.work):
            make_folders(self.work)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            take_lock(descriptor, lock, self.place, patience_s=LOCK_PATIENCE_S)
            shutil.rmtree(self.scratch, ignore_errors=True)  # of a run that was killed
            try:
                yield descriptor
            finally:
                if not is_kept(self.scratch):
                    shutil.rmtree(self.scratch, ignore_errors=True)
                    self._remove_unbegun()
        finally:
            os.close(descriptor)

    def _remove_unbegun(self) -> None:
        """Remove the local folders of a run that ended before it noted anything, or that is complete."""
        if self.folder is None:
            shutil.rmtree(self.work, ignore_errors=True)
        elif not (self.folder / NOTE).exists():
            shutil.rmtree(self.work, ignore_errors=True)
            with suppress(OSError):  # it holds a store
                self.folder.rmdir()

    def vanished(self, num_lost: int, num_items: int) -> StorageError:
        """What to raise where all work items were done, and some no longer are."""
        what = f"{num_lost} of {num_items} sealed work items have vanished from {self.place}"
        return StorageError(f"{what}: does another run write there?", hint="rerun the same command to continue")

    def _upload(self, file: Path, key: str) -> None:
        repeating(lambda: self._storage.write(key, blocks_of(file)))
        file.unlink()

    def check_free(self) -> None:
        """UserError where the output holds anything but an unfinished store."""
        lock = f"{WORK_FOLDER}/lock"
        if self.folder and self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.place} is no folder", hint="choose another --output")
        if self.read(NOTE) is None and any(info.key != lock for info in self._storage.list()):
            raise UserError(f"{self.place} is not empty and holds no unfinished store", hint="choose another --output")


def take_lock(descriptor: int, path: Path, output: str, *, patience_s: float = 0.0) -> None:
    """Take the lock of an output; a killed run's workers let go of it within a moment."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise StorageError(f"another run is writing {output}", hint=f"lsof {path}") from None
            time.sleep(0.1)
        except OSError as error:  # some network and parallel file systems are mounted without locks
            hint = "mount it with locks (Lustre: -o flock), or choose another --output"
            raise StorageError(f"cannot lock {path}: {error.strerror}", hint=hint) from error
    if not os.fstat(descriptor).st_nlink:
        raise StorageError(f"another run has just completed {output}", hint=f"datakit inspect {output}")


def abort_uploads(storage: Storage, prefix: str, report: Callable[[str], None]) -> None:
    """Abort what killed runs left unfinished of uploads of keys that start with prefix; report if that is impossible.

    Call it while no run uploads such keys: its files are all there.
    """
    try:
        abort_stale_uploads(storage, prefix, older_than_s=-math.inf)
    except UserError as error:
        report(f"uploads that a killed run left unfinished may remain at {storage.url}: {error.message}")


def key_of(part: str, name: str) -> str:
    """The key of a file in one of an output's stores."""
    return f"{part}/{name}" if part else name
