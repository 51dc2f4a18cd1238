"""Pruning: deletes what a Retention does not keep, and what saves left that never were committed.

A step's root goes first, so that a step is whole or not listed whenever this stops; then the files that the format
names, also those that a killed writer left under a hidden name on a local disk, and nothing else: unknown names stay,
with the folders that hold them. Of a step whose folder is a link the link alone goes. A killed prune leaves attempts
without a root behind, which a later one sweeps.
Two prunes may run at once, and beside saves; pins are looked for before and after a root goes.

One listing of the run, a read of each root that was not read before, and of the steps that fill a place all that their
roots name but data. On object stores many steps go at a time: three requests each, and a few for all of them.
"""

import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from shlex import quote

from ckptkit.format.keys import ASIDE_NAME, DAMAGED_ROOT_KEY, attempt_of, step_folder
from ckptkit.loading.roots import at_once, root_info, root_key
from ckptkit.runs.catalogue import ListedStep, committed_roots, listed_steps, no_step, pin_key, refuse_pinned
from ckptkit.runs.debris import Debris
from ckptkit.runs.record import Records, StepRecord
from ckptkit.runs.retention import Retention, expired, places_filled, reasons_to_keep
from ckptkit.runs.temporaries import Temporary, temporaries
from threefold.errors import StorageError, UserError
from threefold.storage import Storage
from threefold.storage.folders import linked_folder, links_or_keys, local_root
from threefold.storage.local import sync_name

SWEEP_EVERY_S = 3600.0  # while saves go on
STEPS_AT_A_TIME = 128  # on object stores: a prune that is killed leaves the files of so many at most


@dataclass
class PruneReport:
    """What a prune deleted (with dry_run: would delete), why the other steps stay, and which names it left alone.

    `orphans` are attempts, and set-aside roots, of no committed step; `hidden` are files under the names of writes that
    broke off, `empty_folders` those of attempts that came no further, `uploads` the keys of unfinished uploads.
    `num_files` and `num_bytes` count all files that went; those of steps as their roots say.
    """

    url: str
    dry_run: bool = False
    deleted: list[int] = field(default_factory=list)
    kept: dict[int, list[str]] = field(default_factory=dict)
    orphans: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    empty_folders: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0


def prune(
    storage: Storage,
    policy: Retention,
    *,
    listed: Sequence[ListedStep] | None = None,
    records: Records | None = None,
    needed: Collection[int] = (),
    orphans_older_than_s: float | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Delete the steps of a run that a policy does not keep, and what saves left that never were committed.

    An attempt is an orphan if no root names it; its age is that of its youngest file. Without orphans_older_than_s
    those go that are a day old, of steps that are not newer than the newest committed one. With it, all of that age go:
    with 0 also those of a save that is running. `listed` and `records` are what the caller has of the run; `needed` are
    steps that stay for a reason of the caller's.
    """
    listed = listed_steps(storage) if listed is None else listed
    pruning = _Pruning(storage, PruneReport(storage.url, dry_run))
    found = pruning.expire(listed, records or Records(storage), policy, needed)
    pruning.sweep(listed, found, orphans_older_than_s)
    return pruning.report


def remove(storage: Storage, steps: Collection[int], *, newest_too: bool = False, dry_run: bool = False) -> PruneReport:
    """Delete committed steps of a run as a prune does; UserError, before any goes, if one is pinned or not committed.

    So is the newest good step, or the newest where none is good, unless `newest_too`. The report's `kept` are the
    steps that stay because the run changed meanwhile. Of a step whose root cannot be read the root alone goes: the next
    sweep takes its files.
    """
    listed, records = listed_steps(storage), Records(storage)
    judged_steps = judged(records.of(listed), records, Retention(keep_last=1))
    committed = [record.step for record in judged_steps]
    if unknown := sorted(set(steps) - set(committed)):
        raise no_step(storage, unknown[0])
    refuse_pinned(storage, [each for each in listed if each.step in steps])
    newest: int | None = max([record.step for record in judged_steps if record.is_good] or committed, default=None)
    if newest is not None and newest in steps:
        if not newest_too:
            what = "the only step" if len(committed) == 1 else "the newest good step"
            raise UserError(
                f"step {newest} is {what} of {storage.url}",
                hint=f"to lose it: ckptkit rm {quote(storage.url)}/{step_folder(newest)} --newest-too",
            )
        newest = None
    pruning = _Pruning(storage, PruneReport(storage.url, dry_run))
    pruning.delete([record for record in judged_steps if record.step in steps], listed, newest)
    return pruning.report


class Pruner:
    """Prunes a run after its saves and for want of room; it keeps what it read, so that no save reads older roots.

    One thread at a time uses it.
    """

    def __init__(self) -> None:
        self._records: dict[str, Records] = {}
        self._swept_at: dict[str, float] = {}

    def after_save(
        self, storage: Storage, step: int, policy: Retention, *, needed: Collection[int] = (),
        elsewhere: Sequence[StepRecord] = (),
    ) -> str:  # fmt: skip
        """Prune once a step that was just committed is seen to be whole, but not the steps that are still `needed`.

        Good steps `elsewhere`, in a slower tier, fill places too. Return a warning, raise no error.
        """

        def work() -> str:
            sweeps = time.monotonic() - self._swept_at.get(storage.url, -SWEEP_EVERY_S) >= SWEEP_EVERY_S
            listed, records = self._listed(storage, whole=sweeps)
            new = next((record for record in records.of(listed) if record.step == step), None)
            if problem := f"step {step} is not listed" if new is None else records.checked(new).problem:
                return problem
            pruning = _Pruning(storage, PruneReport(storage.url))
            found = pruning.expire(listed, records, policy, needed, elsewhere)
            if sweeps:
                pruning.sweep(listed, found, None)
                self._swept_at[storage.url] = time.monotonic()
            return ""

        return _warning_of(work) if policy.has_rules else ""

    def make_room(
        self, storage: Storage, policy: Retention, *, needed: Collection[int] = (),
        elsewhere: Sequence[StepRecord] = (), debris_older_than_s: float | None = None,
    ) -> str:  # fmt: skip
        """Prune although no new step is there, and what broke off so long ago; else as `after_save`."""

        def work() -> str:
            listed, records = self._listed(storage, whole=debris_older_than_s is not None)
            pruning = _Pruning(storage, PruneReport(storage.url))
            found = pruning.expire(listed, records, policy, needed, elsewhere)
            if debris_older_than_s is not None:
                pruning.sweep(listed, found, debris_older_than_s)
            return ""

        return _warning_of(work) if policy.has_rules else ""

    def _listed(self, storage: Storage, *, whole: bool) -> tuple[Sequence[ListedStep], Records]:
        """Return the steps that are there, `whole` with all that their folders hold, and what was read of them."""
        records = self._records.setdefault(storage.url, Records(storage))
        if whole:
            return listed_steps(storage), records
        return [ListedStep(step, root) for step, root in committed_roots(storage).items()], records


def _warning_of(prune_run: Callable[[], str]) -> str:
    """Return in words what went wrong with a prune, or what it says; a fault of ours fails no committed save."""
    try:
        problem = prune_run()
    except (UserError, OSError) as error:
        problem = str(error)
    except Exception as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    return f"older steps were not pruned: {problem}" if problem else ""


class _Pruning:
    """One prune of a run: its acts and their report."""

    def __init__(self, storage: Storage, report: PruneReport) -> None:
        self._storage, self.report = storage, report

    def expire(
        self, listed: Sequence[ListedStep], records: Records, policy: Retention, needed: Collection[int],
        elsewhere: Sequence[StepRecord] = (),
    ) -> list[StepRecord]:  # fmt: skip
        """Delete the steps that a policy does not keep; return the records of all that were committed.

        Steps `elsewhere` fill places of the policy; the newest good step here stays all the same.
        """
        committed = judged(records.of(listed), records, policy)
        here = {record.step for record in committed}
        of_run = [*committed, *(record for record in elsewhere if record.step not in here)]
        self.report.kept = {step: why for step, why in reasons_to_keep(of_run, policy).items() if why and step in here}
        newest_good = max((record.step for record in committed if record.is_good), default=-1)
        going = set(expired(of_run, policy)) - set(needed) - {newest_good}
        self.delete([record for record in committed if record.step in going], listed, newest_good)
        return committed

    def delete(self, doomed: Sequence[StepRecord], listed: Sequence[ListedStep], needed: int | None) -> None:
        """Delete steps as long as another one, which is needed then, is committed; or report that they would go."""
        if self.report.dry_run:
            by_step = {each.step: each for each in listed}
            for record in doomed:
                self._foretell(record, by_step[record.step])
            return
        at_a_time = STEPS_AT_A_TIME if local_root(self._storage) is None else 1
        for at in range(0, len(doomed), at_a_time):
            self._delete_steps(doomed[at : at + at_a_time], needed)

    def sweep(self, listed: Sequence[ListedStep], committed: Sequence[StepRecord], older_than_s: float | None) -> None:
        """Delete what uncommitted saves left, given what was listed and what of it was committed."""
        report = self.report
        gone = set() if report.dry_run else set(report.deleted)
        debris = Debris(self._storage, committed, gone, older_than_s, dry_run=report.dry_run)
        for orphan in debris.orphans(listed):
            report.orphans.append(orphan.name)
            report.num_files += len(orphan.items)
            report.num_bytes += sum(item.size_bytes for item in orphan.items)
            report.left_alone += orphan.left_alone
        self._add_hidden(debris.hidden())
        report.empty_folders += [folder.key for folder in debris.empty_folders()]

    def _foretell(self, record: StepRecord, listed: ListedStep) -> None:
        """Report what would go with a step."""
        self.report.deleted.append(record.step)
        if not linked_folder(self._storage, step_folder(record.step)):
            self._count_step(record, 1 + listed.num_files.get(record.attempt, 0) + listed.has_damaged_root)
            self.report.left_alone += listed.unknown
            self._add_hidden(self._hidden_of(record))

    def _delete_steps(self, batch: Sequence[StepRecord], newest_good: int | None) -> None:
        """Delete steps, their roots first, unless the run changed since it was read.

        The last look for pins comes after the deletion, as that of `pin` for the root comes after the pin is put. So
        does that for the newest step: a rollback, which sets it aside, looks for the step that it goes back to.
        """
        storage, report = self._storage, self.report
        went = f"step {newest_good}, the newest good one, went away meanwhile"
        if newest_good is not None and root_info(storage, newest_good) is None:
            report.kept |= {record.step: [went] for record in batch}
            return
        if newest_good is not None:
            sync_name(storage, root_key(newest_good))  # nothing goes before what replaces it is durable
        doomed = [step for step in at_once(self._look, batch) if step is not None]
        if half_aside := [key for step in doomed for key in step.own if key.endswith(f"/{ASIDE_NAME}")]:
            storage.delete(half_aside)  # left by killed rollbacks: no undoing brings back what goes here
        storage.delete([root_key(step.record.step) for step in doomed if not step.is_link])
        has_newest = newest_good is None or root_info(storage, newest_good) is not None
        going = []
        for step, pin in zip(
            doomed, at_once(lambda step: storage.info(pin_key(step.record.step)), doomed), strict=True
        ):
            if has_newest and (pin is None or step.is_link):
                going.append(step)
                continue
            if not step.is_link:
                storage.write(root_key(step.record.step), step.root, if_absent=True)
            report.kept[step.record.step] = ["pinned meanwhile" if has_newest else went]
        storage.delete([key for step in going for key in step.own])
        for step in going:
            report.deleted.append(step.record.step)
            if not step.is_link:
                self._count_step(step.record, 1 + len(step.own))
                report.left_alone += step.unknown
                hidden = self._hidden_of(step.record)
                storage.delete([file.hidden_key for file in hidden])
                self._add_hidden(hidden)

    def _look(self, record: StepRecord) -> "_Doomed | None":
        """Return what to delete of a step; None if it stays, or if another prune was first."""
        listed = ListedStep(record.step)
        folder, own = f"{step_folder(record.step)}/", list[str]()
        for key in self._storage.list_keys(folder):
            listed.add(key)
            name = key.removeprefix(folder)
            if name == DAMAGED_ROOT_KEY or attempt_of(name) == record.attempt:
                own.append(key)
        if listed.is_pinned:
            self.report.kept[record.step] = ["pinned meanwhile"]
            return None
        if link := linked_folder(self._storage, step_folder(record.step)):
            return _Doomed(record, own=[link], is_link=True)
        try:
            root = self._storage.read(root_key(record.step))
        except StorageError:
            if root_info(self._storage, record.step) is None:
                return None
            raise
        return _Doomed(record, root, links_or_keys(self._storage, own), listed.unknown)

    def _hidden_of(self, record: StepRecord) -> list[Temporary]:
        """Return the hidden files of a step's attempt."""
        return [each for each in temporaries(self._storage, record.step) if attempt_of(each.key) == record.attempt]

    def _count_step(self, record: StepRecord, num_files: int) -> None:
        self.report.num_files += num_files
        self.report.num_bytes += record.file_bytes + (record.root.size_bytes if record.root else 0)

    def _add_hidden(self, files: Iterable[Temporary]) -> None:
        """Report hidden files."""
        for each in files:
            self.report.hidden.append(each.hidden_key)
            self.report.num_files += 1
            self.report.num_bytes += each.size_bytes


@dataclass(frozen=True, slots=True)
class _Doomed:
    """A step that goes: its root's bytes, the keys that go with it, and those that stay; or the link to its
    folder.
    """

    record: StepRecord
    root: bytes = b""
    own: Sequence[str] = ()
    unknown: Sequence[str] = ()
    is_link: bool = False


def judged(committed: Sequence[StepRecord], records: Records, policy: Retention) -> list[StepRecord]:
    """Return the records, those that fill a place checked: until none fills one unchecked."""
    by_step, checked = {record.step: record for record in committed}, set[int]()
    while policy.has_rules and (due := places_filled([*by_step.values()], policy).keys() - checked):
        by_step |= {record.step: record for record in at_once(records.checked, [by_step[step] for step in due])}
        checked |= due
    return [*by_step.values()]
