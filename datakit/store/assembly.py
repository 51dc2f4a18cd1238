"""Assembly: a folder being put together of files that exist already, by hard links or copies; killed, it continues.

A note under `.work` says what the folder is made of, before any file is there; the same call then continues, another
one is refused. A file gets its name once it is whole and durable. Memory is one block.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import xxhash

from datakit.files.durable import FileDigest, blocks_of, durable_file, replace_durably, url_behind, writing
from datakit.store.manifest import WORK_FOLDER
from datakit.store.output import take_lock
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage.folders import make_folders, sync_folder

_NOTE, _LOCK = "assembly.json", "lock"


class Assembly:
    """An output folder that this process holds; `assembling` gives one."""

    def __init__(self, output: Path, *, copy: bool) -> None:
        self.output, self.work, self._copy = output, output / WORK_FOLDER, copy
        self._placed: set[str] = set()

    def place(self, source: Path, name: str, digest: FileDigest) -> None:
        """Give the output a file of these bytes; one that an earlier run placed is kept. A copy is checked against its
        digest, a link by its size alone.
        """
        if self.has(name, digest):
            return
        target = self.output / name
        if self._copy:
            temporary = self.work / name
            _copy_file(source, temporary, digest)
            self.adopt(temporary)
            return
        try:
            target.unlink(missing_ok=True)
            target.hardlink_to(source)
        except OSError as error:
            raise StorageError(f"cannot link {source} as {target}: {error.strerror}", hint="--copy") from error

    def has(self, name: str, digest: FileDigest) -> bool:
        """Whether an earlier run placed a file of this name and size, which is then kept."""
        target = self.output / name
        self._placed.add(name)
        return target.exists() and target.stat().st_size == digest.size_bytes

    def adopt(self, file: Path) -> None:
        """Move a whole, durable file from the work folder into the output, under its name."""
        self._placed.add(file.name)
        with writing(self.output / file.name):
            file.replace(self.output / file.name)

    def abandon(self) -> None:
        """Remove all that was placed; the sources keep their own names."""
        for name in self._placed:
            (self.output / name).unlink(missing_ok=True)
        shutil.rmtree(self.work)

    def sync(self) -> None:
        """Make the names of all files that were placed durable; a manifest may then name them."""
        with writing(self.output):
            sync_folder(self.output)


@contextmanager
def assembling(
    output: Path,
    made_of: dict[str, Any],
    *,
    copy: bool,
    keep_after: tuple[type[UserError], ...] = (StorageError,),
) -> Iterator[Assembly]:
    """Hold an empty or unfinished output while it is put together; the work folder goes when that comes to an end.

    `made_of` is JSON of all that decides the output's bytes. UserError where the output holds anything else. Kills and
    the faults of `keep_after` leave the output to be continued, any other UserError empties it.
    """
    assembly = Assembly(output, copy=copy)
    note = assembly.work / _NOTE
    _check_free(output)
    with writing(output):
        make_folders(assembly.work)
        lock = os.open(assembly.work / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        take_lock(lock, assembly.work / _LOCK, str(output))
        if not note.exists():
            replace_durably(note, orjson.dumps(made_of))
        elif note.read_bytes() != orjson.dumps(made_of):
            raise UserError(
                f"{output} was begun of other sources or in another way",
                hint="rerun the command it was begun with, or choose another --output",
            )
        try:
            yield assembly
        except keep_after:
            raise
        except UserError:  # what it is made of does not do: the output is free for another try
            assembly.abandon()
            raise
        assembly.sync()
        shutil.rmtree(assembly.work)
    finally:
        os.close(lock)


def remove_work(output: Path) -> None:
    """Remove the work folder of a complete output, which a kill may have left."""
    shutil.rmtree(output / WORK_FOLDER, ignore_errors=True)


def _check_free(output: Path) -> None:
    if url := url_behind(output):
        raise UserError(
            f"{url} is no local folder, and only there can this be made",
            hint=f"choose a folder as --output; for a store, then datakit archive FOLDER --output {url}",
        )
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"{output} is no folder", hint="choose another --output")
    work = output / WORK_FOLDER
    if (work / _NOTE).exists():
        return
    found = {path.name for path in output.iterdir()} - {WORK_FOLDER}
    if work.is_dir():  # a kill may have come before the note
        found |= {path.name for path in work.iterdir()} - {_LOCK, f".{_NOTE}.tmp"}
    if found:
        raise UserError(f"{output} is not empty: it holds {min(found)}", hint="choose another --output")


def _copy_file(source: Path, target: Path, digest: FileDigest) -> None:
    hasher = xxhash.xxh3_64()
    with durable_file(target) as file:
        for block in blocks_of(source):
            hasher.update(block)
            file.write(block)
    if hasher.hexdigest() != digest.xxh3_64:
        raise CheckFailed(f"{source} is damaged: its checksum does not hold", hint=f"datakit verify {source.parent}")
