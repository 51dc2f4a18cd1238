"""Shared by the tests of a run's steps: small committed steps, a storage that is watched, files that look old."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import listed_steps
from ckptkit.runs.record import Records, StepRecord
from ckptkit.runs.retention import Retention
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from threefold.storage import Storage
from threefold.storage.local import LocalStorage

TENSORS = gpt_tensors(1)
VALUES = values(TENSORS)
LAST = Retention(keep_last=1)
DAY_S = 24 * 3600.0


def write_steps(storage: Storage, *steps: int) -> None:
    """Commit steps of a root and four files each."""
    for step in steps:
        write_checkpoint(storage, step, ParallelLayout(tp=2), 1, TENSORS, VALUES)


def checked_records(storage: Storage) -> list[StepRecord]:
    """What is known of all committed steps, after a look at all that their roots name but data."""
    records = Records(storage)
    return [records.checked(record) for record in records.of(listed_steps(storage))]


def keys(storage: Storage) -> list[str]:
    """All keys of a run."""
    return [item.key for item in storage.list()]


def age(folder: Path, seconds: float) -> None:
    """Make all files look older."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - seconds, time.time() - seconds))


class Watched(LocalStorage):
    """Calls `before(keys)` before each deletion and `after(keys)` after it."""

    before: Callable[[list[str]], None] = staticmethod(lambda keys: None)
    after: Callable[[list[str]], None] = staticmethod(lambda keys: None)

    def delete(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        self.before(listed)
        super().delete(listed)
        self.after(listed)
