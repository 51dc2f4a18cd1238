"""FolderClaim: the empty folder that an export fills, held by a note in it until all of it is there.

The note is put before any file, once if two calls come together, and goes last. Killed, the same call goes on: files
that are there in their full size under an equal note are kept, as a file has its name only once it is whole. The note
names the call that wrote it: the call that goes on puts its own in its place, and one that lost its note has not made
the folder.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from ckptkit.foreign.folder import NOTE
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.runs.temporaries import Temporary, remove_unless_written
from threefold.claim import Note, this_call
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import AlreadyExists, Storage, written_name
from threefold.storage.folders import local_root
from threefold.storage.new_file import NO_HARD_LINKS
from threefold.storage.second_look import read_checked

BY = "by"  # in a note: the machine, process and call that wrote it


def note_of(source: ChunkSource, sizes: Mapping[str, int], **options: Any) -> bytes:
    """Return what a note says: the source, the files, and how they are made."""
    digest = hashlib.sha256(source.root.to_bytes()).hexdigest()
    return json.dumps({"root": digest, "files": dict(sizes), **options}).encode()


class FolderClaim:
    """The target folder, held by its note: what is in it, and what becomes of it.

    `sizes` are those of all files to come, `heads` how the large ones begin, `files` all bytes of the small ones.
    """

    def __init__(
        self, target: Storage, note: bytes, sizes: Mapping[str, int], heads: Mapping[str, bytes],
        files: Mapping[str, bytes],
    ) -> None:  # fmt: skip
        self._target, self._sizes, self._heads, self._files = target, sizes, heads, files
        self._what = json.loads(note)
        self._note = Note(self._what, this_call()).encode(BY)
        root = local_root(target)
        self._made = root if root is not None and not root.exists() else None
        self._is_begun = False  # by another call: one that was killed, or is at work
        self._other = ""  # that call

    def check(self) -> dict[str, int]:
        """Return the files that are there whole, with their sizes; UserError if the folder is not free for this."""
        target, sizes = self._target, dict[str, int]()
        for info in target.list():
            if info.key not in self._sizes and info.key != NOTE:
                raise self._refusal(f"holds other files, such as {info.key}")
            sizes[info.key] = info.size_bytes
        self._is_begun = NOTE in sizes
        if self._is_begun:
            noted = _parsed(self._note_there() or b"")
            self._other = noted.call
            if noted.made_of != self._what:
                raise self._refusal("was begun from another checkpoint or in another way")
            return {name: size for name, size in sizes.items() if name in self._heads and size == self._sizes[name]}
        if sizes and not self._is_complete(sizes):
            raise self._refusal(f"holds files already, such as {min(sizes)}")
        return sizes

    def _is_complete(self, sizes: dict[str, int]) -> bool:
        """Return whether the folder is what the same call made: its small files, and the headers of the large ones."""
        beginnings = {**self._files, **self._heads}
        return sizes == self._sizes and all(self._begins(name, head) for name, head in beginnings.items() if head)

    def _begins(self, name: str, head: bytes) -> bool:
        """Return whether a file begins with some bytes; behind a network a second look decides that it does not."""

        def read(storage: Storage) -> None:
            [there] = storage.read_ranges(name, [(0, len(head))])
            if bytes(there) != head:
                raise CheckFailed(f"{self._target.url}/{name} is another file")

        try:
            read_checked(self._target, f"{self._target.url}/{name}", read)
        except CheckFailed:
            return False
        return True

    def _note_there(self) -> bytes | None:
        """Return the note in the folder, None if it is gone; behind a network the second look's if it is another's."""
        if self._target.info(NOTE) is None:
            return None
        note = self._target.read(NOTE)
        again = None if note == self._note else self._target.afresh()
        return note if again is None else again.read(NOTE)

    def _refusal(self, what: str) -> UserError:
        return UserError(f"{self._target.url} {what}", hint="name a folder that does not exist yet")

    def __enter__(self) -> None:
        """Put the note, or go on under an equal one; UserError if another call put its own since the check."""
        try:
            self._put_note()
        except AlreadyExists:
            raise self._refusal("was begun from another checkpoint or in another way") from None
        if not self._is_begun and (there := sorted(set(self._target.list_keys()) - {NOTE})):
            self._target.delete([NOTE])
            raise self._refusal(f"holds files already, such as {there[0]}")

    def _put_note(self) -> None:
        try:
            if_absent = self._target.supports_if_absent and not self._is_begun
            self._target.write(NOTE, self._note, if_absent=if_absent)
        except StorageError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in NO_HARD_LINKS:
                raise
            self._target.write(NOTE, self._note)  # on such a disk nothing is put once and only once

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is None:
            note = self._note_there()
            if note != self._note:
                by = self._other if note is None else _parsed(note).call
                gone = ", and the note of this one is gone" if note is None else ""
                lost = f"{self._target.url} was taken by another call{by and f' ({by})'}{gone}"
                raise StorageError(lost, hint="repeat this call once the other has ended, or export to another folder")
            self._target.delete([NOTE])
            return
        # an equal call of another machine may be at work; on a local disk it was killed
        is_shared = self._is_begun and local_root(self._target) is None
        if issubclass(kind, UserError) and not issubclass(kind, StorageError) and not is_shared:
            with contextlib.suppress(StorageError):  # the first failure is the one to report
                if self._note_there() != self._note:
                    return
                self._target.delete([*self._sizes, NOTE])
                for folder, _, _ in os.walk(self._made or "", topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)

    def make_room(self, *, dry_run: bool) -> int:
        """Remove the hidden files of a try that was killed, not those that a living process writes.

        Return the bytes of all of them; a dry run leaves them there.
        """
        root, sizes = local_root(self._target), dict[str, int]()
        for folder, _, names in os.walk(root or ""):
            inner = os.path.relpath(folder, root)
            for name in names:
                written = written_name(name)
                if written and os.path.normpath(f"{inner}/{written}") in {*self._sizes, NOTE}:
                    with contextlib.suppress(FileNotFoundError):  # renamed meanwhile by another process
                        status = os.lstat(os.path.join(folder, name))
                        sizes[os.path.normpath(f"{inner}/{name}")] = status.st_blocks * 512
        for key in () if dry_run else sizes:
            with contextlib.suppress(StorageError):  # another process removed it
                remove_unless_written(self._target, Temporary(key, "", sizes[key], 0.0))
        return sum(sizes.values())


def _parsed(note: bytes) -> Note:
    """Return what a note says of an export; of a damaged one nothing."""
    try:
        return Note.parse(NOTE, note, BY)
    except CheckFailed:
        return Note({}, "")
