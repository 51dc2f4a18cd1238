"""Pruning: deletes what a Retention does not keep, and attempts that no root names.

A step's root goes first, so that a step is whole or not listed whenever this stops; then the files that the format
names, also those that a killed writer left under a hidden name on a local disk, and nothing else: unknown names stay,
with the folders that hold them. What a killed prune leaves behind are attempts without a root, which a later one sweeps
once they are old. Two prunes may run at once, and beside saves: steps newer than the newest committed one are not
looked at, and pins are looked for before and after a root goes.
"""

import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ckptkit.format.root import DAMAGED_ROOT_KEY, ROOT_KEY, attempt_of, step_folder
from ckptkit.loading.reader import read_root
from ckptkit.runs.catalogue import step_folders
from ckptkit.runs.pins import pin_key
from ckptkit.runs.record import Records, StepRecord
from ckptkit.runs.retention import Retention, expired, reasons_to_keep
from ckptkit.runs.temporaries import Temporary, steps_on_disk, temporaries
from threefold.errors import StorageError, UserError
from threefold.storage import ObjectInfo, Storage

ORPHANS_OLDER_THAN_S = 24 * 3600.0


@dataclass
class PruneReport:
    """What a prune deleted (with dry_run: would delete), why the other steps stay, and which names it left alone.

    `orphans` are the attempts that no root named; `num_files` and `num_bytes` count all that went, roots included.
    """

    url: str
    dry_run: bool = False
    deleted: list[int] = field(default_factory=list)
    kept: dict[int, list[str]] = field(default_factory=dict)
    orphans: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0


def prune(
    storage: Storage,
    policy: Retention,
    *,
    found: Sequence[StepRecord] | None = None,
    needed: Collection[int] = (),
    orphans_older_than_s: float = ORPHANS_OLDER_THAN_S,
    dry_run: bool = False,
) -> PruneReport:
    """Delete the steps of a run that a policy does not keep, and orphans of at least that age.

    An attempt is an orphan when no root names it and its step is not newer than the newest committed one; its age is
    that of its youngest file. `found` are the run's records, parts checked, where the caller has read them already;
    `needed` are steps that stay for a reason of the caller's.
    """
    if found is None:
        found = Records(storage, check_parts=True).read()
    kept = {step: reasons for step, reasons in reasons_to_keep(found, policy).items() if reasons}
    pruning = _Pruning(storage, PruneReport(storage.url, dry_run, kept=kept))
    newest_good = max((record.step for record in found if record.is_good), default=-1)
    doomed = set(expired(found, policy)) - set(needed)
    for record in found:
        if record.step in doomed:
            pruning.delete_step(record, newest_good)
    pruning.sweep(found, orphans_older_than_s)
    return pruning.report


class Pruner:
    """Prunes runs after their saves; it keeps what it read of them, so that a save costs no reading of older roots."""

    def __init__(self) -> None:
        self._records: dict[str, Records] = {}

    def after_save(self, storage: Storage, step: int, policy: Retention, *, needed: Collection[int] = ()) -> str:
        """Prune once a step that was just committed is seen to be whole, but not the steps that are still `needed`.

        Gives a warning, raises no error.
        """
        if not policy.has_rules:
            return ""
        try:
            found = self._records.setdefault(storage.url, Records(storage, check_parts=True)).read()
            problem = next((record.problem for record in found if record.step == step), f"step {step} is not listed")
            if not problem:
                prune(storage, policy, found=found, needed=needed)
        except (UserError, OSError) as error:
            problem = str(error)
        except Exception as error:  # a fault of ours must not make a committed save a failed one
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        return f"older steps were not pruned: {problem}" if problem else ""


class _Pruning:
    """One prune of a run: its acts and their report."""

    def __init__(self, storage: Storage, report: PruneReport) -> None:
        self._storage, self.report = storage, report

    def delete_step(self, record: StepRecord, newest_good: int) -> None:
        """Delete a step, its root first, unless the run changed since it was read."""
        folder = step_folder(record.step)
        items = list(self._storage.list(f"{folder}/"))
        if not self.report.dry_run:
            spared = self._delete_root(record.step, newest_good)
            if spared is not None:
                if spared:
                    self.report.kept[record.step] = [spared]
                return
        self.report.deleted.append(record.step)
        names = [(item, item.key.removeprefix(f"{folder}/")) for item in items]
        own = [item for item, name in names if name == DAMAGED_ROOT_KEY or attempt_of(name) == record.attempt]
        self._delete(own)
        self._count(item for item, name in names if name == ROOT_KEY)
        hidden = temporaries(self._storage, record.step)
        self._remove([each for each in hidden if attempt_of(each.key) == record.attempt])
        known = {ROOT_KEY, DAMAGED_ROOT_KEY}
        self.report.left_alone += [item.key for item, name in names if name not in known and not attempt_of(name)]

    def _delete_root(self, step: int, newest_good: int) -> str | None:
        """Delete a step's root; else why it stays, empty where another prune was first.

        The last look for a pin comes after the deletion, as that of `pin` for the root comes after the pin is put.
        """
        root, pin = f"{step_folder(step)}/{ROOT_KEY}", pin_key(step)
        if self._storage.info(f"{step_folder(newest_good)}/{ROOT_KEY}") is None:
            return f"step {newest_good}, the newest good one, went away meanwhile"
        if self._storage.info(pin) is not None:
            return "pinned meanwhile"
        try:
            data = self._storage.read(root)
        except StorageError:
            if self._storage.info(root) is None:
                return ""
            raise
        self._storage.delete([root])
        if self._storage.info(pin) is None:
            return None
        self._storage.write(root, data, if_absent=True)
        return "pinned meanwhile"

    def sweep(self, found: Sequence[StepRecord], older_than_s: float) -> None:
        """Delete orphans of at least an age, given what was committed."""
        records = {record.step: record for record in found}
        newest, before_s = max(records, default=-1), time.time() - older_than_s
        for step in step_folders(self._storage):
            if step <= newest:
                self._sweep_step(step, records.get(step), before_s)
        for step in steps_on_disk(self._storage):
            if step <= newest:
                self._remove([each for each in temporaries(self._storage, step) if _is_older(each, before_s)])

    def _sweep_step(self, step: int, record: StepRecord | None, before_s: float) -> None:
        folder = step_folder(step)
        if record is None and any(self._storage.info(key) for key in (f"{folder}/{ROOT_KEY}", pin_key(step))):
            return  # committed meanwhile, or somebody wants what is left of it
        if record is not None and not record.is_readable:
            return  # nobody knows which attempt its root names
        for attempt in self._storage.list_folders(folder):
            if record is not None and attempt == record.attempt:
                continue
            items = list(self._storage.list(f"{folder}/{attempt}/"))
            orphans = [item for item in items if attempt_of(item.key.removeprefix(f"{folder}/"))]
            if orphans and all(_is_older(item, before_s) for item in items):
                if not self._names_still(step, record):
                    return
                self._delete(orphans)
                self.report.orphans.append(f"{folder}/{attempt}")
                self.report.left_alone += [item.key for item in items if item not in orphans]
        damaged = None if record is not None else self._storage.info(f"{folder}/{DAMAGED_ROOT_KEY}")
        if damaged is not None and _is_older(damaged, before_s):
            self._delete([damaged])

    def _names_still(self, step: int, record: StepRecord | None) -> bool:
        """Whether a step's root names the attempt that it named when it was read, or is as absent as it then was.

        A step that was found damaged may have been saved anew, by an attempt that looks like an orphan.
        """
        is_gone = record is None or (step in self.report.deleted and not self.report.dry_run)
        if self._storage.info(f"{step_folder(step)}/{ROOT_KEY}") is None:
            return is_gone
        return record is not None and not is_gone and read_root(self._storage, step).attempt == record.attempt

    def _delete(self, items: Sequence[ObjectInfo]) -> None:
        """Delete objects (unless it is a dry run) and count them."""
        if not self.report.dry_run:
            self._storage.delete([item.key for item in items])
        self._count(items)

    def _remove(self, found: Sequence[Temporary]) -> None:
        """The same for hidden files."""
        if not self.report.dry_run:
            for each in found:
                each.remove()
        self._count(found)

    def _count(self, items: Iterable[ObjectInfo | Temporary]) -> None:
        for item in items:
            self.report.num_files += 1
            self.report.num_bytes += item.size_bytes


def _is_older(item: ObjectInfo | Temporary, before_s: float) -> bool:
    """Whether an object was last written before a time; one whose time the storage does not tell was not."""
    return 0 < item.modified_s <= before_s
