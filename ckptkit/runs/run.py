"""Run: the committed steps at one URL; where a trainer, a tool or a notebook finds, reads, removes and sets them aside.

Nothing is remembered between calls: each derives what is committed from the storage, `newest` by one listing and a few
lookups. Any process and thread may hold a Run.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property

from ckptkit.format.address import split_address
from ckptkit.format.root import Root
from ckptkit.loading.exchange import Exchange
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore
from ckptkit.loading.roots import newest_first, read_root, root_info, root_key
from ckptkit.model.tensor import Piece, TensorInfo
from ckptkit.runs.catalogue import committed_steps, no_step
from ckptkit.runs.pruning import PruneReport, remove
from ckptkit.runs.rollback import RollbackReport, quarantine, rollback, set_aside_after, undo_rollback
from threefold.errors import UserError
from threefold.masking import masked
from threefold.storage import Storage, open_storage
from threefold.storage.local import sync_name


class Run:
    """The steps of a run that are committed.

    Of the address of one step, `RUN/step-000000100`, only that step counts: `url` is the run's then, and `named` the
    step; else `named` is None.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        text = os.fspath(url) if isinstance(url, os.PathLike) else url
        if not isinstance(text, str):
            raise UserError(
                f"a run is at a folder or URL, a text or a Path, not {type(url).__name__}",
                hint='Run("runs/one") or Run("s3://bucket/runs/one")',
            )
        self.url, self.named = split_address(text)

    def __repr__(self) -> str:
        return f"Run({masked(self.url)!r})"

    @cached_property
    def storage(self) -> Storage:
        """Return the storage of the run, opened at first use."""
        return open_storage(self.url)

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return committed_steps(self.storage) if self.named is None else list(self.newest_first())

    def newest_first(self) -> Iterator[int]:
        """Return the committed steps, newest first; roots are looked up as far as steps are taken."""
        if self.named is None:
            return newest_first(self.storage)
        return iter([self.named] if self.is_committed(self.named) else [])

    def newest(self) -> int | None:
        """Return the newest committed step, None if there is none."""
        return next(self.newest_first(), None)

    def resolve(self) -> int:
        """Return the step that the address means; UserError if it is not committed, StorageError without a run."""
        step = self.newest()
        if step is None:
            raise no_step(self.storage, self.named)
        return step

    def is_committed(self, step: int, *, durably: bool = False) -> bool:
        """Return whether a step is committed; `durably` also syncs its root's name, which another process put."""
        is_there = root_info(self.storage, step) is not None
        if is_there and durably:
            sync_name(self.storage, root_key(step))
        return is_there

    def root(self, step: int, exchange: Exchange | None = None) -> Root:
        """Return the root of a committed step, read by the first rank of an exchange; UserError if there is none."""
        return read_root(self.storage, step, exchange)

    def open(self, step: int, exchange: Exchange | None = None) -> CheckpointReader:
        """Return a reader of a committed step, for a `with`; all ranks of an exchange open it together."""
        return CheckpointReader(self.storage, step, exchange=exchange)

    def restore(
        self, step: int, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo] | None = None,
        exchange: Exchange | None = None,
    ) -> Root:  # fmt: skip
        """Fill pieces from a committed step and return its root, as `ckptkit.restore` does."""
        return restore(self.url, step, pieces, tensors=tensors, exchange=exchange)

    def quarantine(self, step: int, attempt: str | None = None) -> bool:
        """Keep the root of a step as damaged-root.json, so that the step is not committed and can be saved again.

        Its data files stay until `prune` takes them for debris. Return False if the step was not committed, or with an
        attempt if it is another one's by now.
        """
        return quarantine(self.storage, step, attempt)

    def remove(self, *steps: int, newest_too: bool = False, dry_run: bool = False) -> PruneReport:
        """Delete committed steps, roots first; UserError for pinned ones, and for the newest unless `newest_too`."""
        return remove(self.storage, steps, newest_too=newest_too, dry_run=dry_run)

    def rollback(self, step: int, *, dry_run: bool = False) -> RollbackReport:
        """Make a committed step the newest: set all newer ones aside; UserError if one of them is pinned."""
        return rollback(self.storage, step, dry_run=dry_run)

    def set_aside_after(self, step: int, *, dry_run: bool = False) -> RollbackReport:
        """Set the steps after one aside, as `rollback` does, in a run that need not hold that step."""
        return set_aside_after(self.storage, step, dry_run=dry_run)

    def undo_rollback(self, step: int, *, dry_run: bool = False) -> RollbackReport:
        """Bring the steps after one back that were set aside, as far as they are whole."""
        return undo_rollback(self.storage, step, dry_run=dry_run)


def resolve(url: str) -> tuple[Storage, int]:
    """Return the run's storage and the step that an address means: the one it names, or the newest committed one.

    UserError where no step is committed there, StorageError where there is no such place.
    """
    run = Run(url)
    return run.storage, run.resolve()
