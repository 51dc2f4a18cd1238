"""Debris: what saves left that never were committed, whatever ended them.

Attempts that no root names, and roots in quarantine, on any storage; on a local disk also hidden files of writes that
broke off and empty folders of attempts; on S3 unfinished uploads. Names that are not of the format stay. A step that a
rollback set aside is an attempt too, as young as the rollback.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptkit.format.keys import ASIDE_NAME, DAMAGED_ROOT_KEY, attempt_of, is_of_step, parse_step_folder, step_folder
from ckptkit.loading.roots import at_once, read_root, root_info, root_key
from ckptkit.runs.catalogue import ListedStep, pin_key
from ckptkit.runs.record import StepRecord
from ckptkit.runs.temporaries import EmptyFolder, Temporary, empty_folders, remove_folder, steps_on_disk, temporaries
from threefold.storage import ObjectInfo, Storage
from threefold.storage.folders import linked_folder, links_or_keys
from threefold.storage.stale_uploads import SAFE_AGE_S, abort_stale_uploads

T = TypeVar("T", Temporary, EmptyFolder)


@dataclass(frozen=True, slots=True)
class Orphan:
    """Files of an attempt of no committed step, or a root in quarantine; `left_alone` are other keys beside them."""

    name: str
    items: Sequence[ObjectInfo]
    left_alone: Sequence[str] = ()


class Debris:
    """The debris of a run, given the records of its committed steps and which of them are `gone` by now.

    What is older than `older_than_s` is removed as it is returned, unless `dry_run`. None: what is older than a day, of
    steps that are not newer than the newest committed one, which a save may be writing.
    """

    def __init__(
        self, storage: Storage, records: Sequence[StepRecord], deleted: Collection[int], older_than_s: float | None,
        *, dry_run: bool,
    ) -> None:  # fmt: skip
        self._storage, self._gone, self._dry_run = storage, deleted, dry_run
        self._records = {record.step: record for record in records}
        self._newest = max(self._records, default=-1) if older_than_s is None else None
        self._before_s = time.time() - (SAFE_AGE_S if older_than_s is None else older_than_s)

    def orphans(self, listed: Sequence[ListedStep]) -> list[Orphan]:
        """Remove the orphans of listed steps, and return them."""
        chosen = [each for each in listed if self._is_in_reach(each.step) and self._may_hold_orphans(each)]
        return [orphan for found in at_once(self._orphans_of, chosen) for orphan in found]

    def hidden(self) -> list[Temporary]:
        """Remove hidden files, and return them."""
        found = self._old_on_disk(temporaries)
        if not self._dry_run:
            self._storage.delete([each.hidden_key for each in found])
        return found

    def empty_folders(self) -> list[EmptyFolder]:
        """Remove folders in which nothing is, and return them."""
        found = self._old_on_disk(empty_folders)
        for each in found if not self._dry_run else ():
            remove_folder(self._storage, each)
        return found

    def _is_in_reach(self, step: int) -> bool:
        return self._newest is None or step <= self._newest

    def _is_old(self, modified_s: float) -> bool:
        """Return whether something was last changed long ago; what has no time was not."""
        return 0 < modified_s <= self._before_s

    def _may_hold_orphans(self, listed: ListedStep) -> bool:
        record = self._records.get(listed.step)
        if linked_folder(self._storage, step_folder(listed.step)) or (record is not None and not record.is_readable):
            return False  # another run's, or nobody knows which attempt its root names
        if record is None:
            return not listed.is_pinned and bool(listed.num_files or listed.has_damaged_root)
        return any(attempt != record.attempt for attempt in listed.num_files)

    def _orphans_of(self, listed: ListedStep) -> list[Orphan]:
        step, folder = listed.step, step_folder(listed.step)
        record, orphans = self._records.get(step), list[Orphan]()
        if record is None and any(map(self._storage.info, (root_key(step), pin_key(step)))):
            return []  # committed meanwhile, or somebody wants what is left of it
        for attempt in sorted(listed.num_files):
            items = list(self._storage.list(f"{folder}/{attempt}/"))
            own = [item for item in items if attempt_of(item.key.removeprefix(f"{folder}/"))]
            is_named = record is not None and attempt == record.attempt
            if is_named or not own or not all(self._is_old(item.modified_s) for item in items):
                continue
            if not self._names_still(step, record):
                return orphans
            orphans.append(Orphan(f"{folder}/{attempt}", own, [item.key for item in items if item not in own]))
            self._delete([item for item in own if item.key.endswith(f"/{ASIDE_NAME}")])
            if not self._names_still(step, record):  # a rollback was undone meanwhile
                return orphans
            self._delete(own)
        damaged = self._storage.info(f"{folder}/{DAMAGED_ROOT_KEY}") if record is None else None
        if damaged is not None and self._is_old(damaged.modified_s):
            orphans.append(Orphan(damaged.key, [damaged]))
            self._delete([damaged])
        return orphans

    def _names_still(self, step: int, record: StepRecord | None) -> bool:
        """Whether a step's root names the attempt that it named when it was read, or is as absent as it then was.

        A step that was found damaged may have been saved again, by an attempt that looks like an orphan.
        """
        is_gone = record is None or step in self._gone
        if root_info(self._storage, step) is None:
            return is_gone
        return record is not None and not is_gone and read_root(self._storage, step).attempt == record.attempt

    def _delete(self, items: Sequence[ObjectInfo]) -> None:
        if not self._dry_run:
            self._storage.delete(links_or_keys(self._storage, [item.key for item in items]))

    def _old_on_disk(self, find: Callable[[Storage, int], Sequence[T]]) -> list[T]:
        """Return what is found in the steps on a local disk, and is old enough."""
        steps = [step for step in steps_on_disk(self._storage) if self._is_in_reach(step)]
        return [each for step in steps for each in find(self._storage, step) if self._is_old(each.modified_s)]


def abort_uploads(storage: Storage, older_than_s: float | None = None, *, dry_run: bool = False) -> list[str]:
    """Abort unfinished uploads of files of the format that began so long ago, None: a day; return their keys."""
    age_s = SAFE_AGE_S if older_than_s is None else older_than_s
    return abort_stale_uploads(storage, older_than_s=age_s, is_wanted=_is_of_format, dry_run=dry_run)


def _is_of_format(key: str) -> bool:
    """Return whether a key of a run is one that a file of the format has."""
    folder, _, name = key.partition("/")
    return is_of_step(name) and parse_step_folder(folder) is not None
