"""NewFile: a local file under construction, hidden under a temporary name until it is durable, then in its place.

Each try writes a file of its own: nothing that a failed or killed try wrote, or could not make durable, becomes part of
a later one. Whatever fails removes the file before it reports.
"""

import contextlib
import errno
import fcntl
import filecmp
import os
from collections.abc import Iterable
from pathlib import Path

from threefold.closing import Closing
from threefold.errors import StorageError
from threefold.storage.contract import AlreadyExists, Buffer, temporary_name
from threefold.storage.folders import Folder, surviving_races

NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # what link(2) says on FAT and on some network mounts


class NewFile(Closing):
    """The file of a key below a local folder, which is made with those on the way; use it in a `with`.

    Leaving the `with` removes what was not published. StorageError if the key, or a folder on its way, is a link.
    Failures of the system are OSErrors. It keeps one descriptor, with a lock until the file has its name.
    """

    def __init__(self, root: Path, key: str) -> None:
        self.path = root / key
        self._root, (self._inner, _, self._name) = root, key.rpartition("/")
        self._temporary = temporary_name(self._name)
        self.descriptor = surviving_races(self._create)

    def fill(self, buffers: Iterable[Buffer]) -> None:
        """Write buffers one after the other."""
        with os.fdopen(self.descriptor, "wb", closefd=False) as file:
            for buffer in buffers:
                file.write(buffer)

    def publish(self, *, if_absent: bool = False) -> None:
        """Make the content durable, then give the file its name, durably.

        With if_absent AlreadyExists if the name is taken by other bytes. If the last move alone fails, which
        makes the name durable, the file has it.
        """
        os.fsync(self.descriptor)
        lock = os.dup(self.descriptor)
        try:
            self._close_descriptor()
            self._name_it(if_absent=if_absent)
        finally:
            os.close(lock)

    def _name_it(self, *, if_absent: bool) -> None:
        with Folder(self._root, self._inner) as folder:
            if if_absent:
                self._link(folder)
                folder.unlink(self._temporary)
            else:
                folder.replace(self._temporary, self._name)
            self._temporary = ""
            folder.sync()

    def close(self) -> None:
        """Remove the file unless it was published."""
        temporary, self._temporary = self._temporary, ""
        with contextlib.suppress(OSError):  # the failure that led here is the one to report
            self._close_descriptor()
        if temporary:
            with contextlib.suppress(OSError, StorageError), Folder(self._root, self._inner) as folder:
                folder.unlink(temporary)

    def _create(self) -> int:
        with Folder(self._root, self._inner, make=True) as folder:
            folder.refuse_link(self._name)
            descriptor = folder.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                with contextlib.suppress(OSError):  # where there are no locks, nothing says that it is being written
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                folder.require(self._temporary)  # until it was locked another process could remove it
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor

    def _close_descriptor(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(InterruptedError):  # it is closed all the same
                os.close(descriptor)  # network file systems report here what they could not write

    def _link(self, folder: Folder) -> None:
        try:
            folder.link(self._temporary, self._name)
        except FileExistsError:
            folder.refuse_link(self._name)
            if not filecmp.cmp(self.path.with_name(self._temporary), self.path, shallow=False):
                raise AlreadyExists(f"{self.path} exists already: another writer won") from None
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            raise StorageError(
                f"cannot write {self.path} once and only once: its file system has no hard links ({error.strerror})",
                hint="choose a place on another file system",
            ) from error
