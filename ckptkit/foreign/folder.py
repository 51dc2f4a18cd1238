"""ForeignFolder: a folder of another program on any storage, with the face of a run of one step, 0.

An import makes it a committed step of a run, in one pass and bounded memory. The name of the attempt follows from the
folder's files, so a run that was killed is repeated with the same keys and the same bytes.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import ClassVar

from ckptkit.foreign.folder_source import FolderSource
from ckptkit.format.root import Root
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.reshard import ReshardReport, reshard
from threefold.storage import Storage, open_storage

NOTE = ".export.json"  # in the folder of an export of ours that is not finished


class ForeignFolder:
    """One folder, with the methods of a Run that holds one step; nothing is read before the first of them."""

    scheme: ClassVar[str]  # of its address
    allows_missing_chunks = False  # whether a chunk that is not there is one of fill values

    def __init__(self, url: str) -> None:
        self._place = url.removeprefix(self.scheme) if self.is_meant(url) else url
        self.url, self.named = f"{self.scheme}{self._place}", 0

    @classmethod
    def is_meant(cls, url: str) -> bool:
        """Return whether an address is one of such a folder."""
        return url.startswith(cls.scheme) and not url.startswith(f"{cls.scheme}//")

    @cached_property
    def storage(self) -> Storage:
        """Return the storage of the folder, opened at first use."""
        return open_storage(self._place)

    def open(self, step: int, exchange: object = None) -> FolderSource:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        raise NotImplementedError

    def newest_first(self) -> Iterator[int]:
        """Return its only step."""
        return iter([self.resolve()])

    def resolve(self) -> int:
        """Return its only step; an error if the folder is not sound."""
        return self.root(self.named).step

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        raise NotImplementedError

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        raise NotImplementedError

    @cached_property
    def attempt(self) -> str:
        """The name that every import of this folder, as it is now, has on a run's storage."""
        state = hashlib.sha256(self.storage.url.encode())
        for name in sorted(self.files):
            state.update(repr(self.storage.info(name)).encode())
        return f"import-{state.hexdigest()[:12]}"


def import_folder(
    folder: ForeignFolder,
    storage: Storage,
    *,
    step: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dry_run: bool = False,
) -> ReshardReport:
    """Write a folder into a run as a step, its placements set so that any layout can load it, and commit it.

    UserError if the step is there already, unless the same call made it, or if another process is making it. With
    `dry_run` all is checked, nothing is written.
    """
    with folder.open(step) as reader:
        return reshard(reader, storage, ParallelLayout(), step=step, progress=progress, dry_run=dry_run)
