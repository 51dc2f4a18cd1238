"""Rollback: makes an older step the newest one; the newer steps are set aside, and can be brought back.

To set a step aside, its root is copied into the folder of its attempt, as `rolled-back.json`, and then deleted: the
step is not committed any more, for any reader, and may be saved again. The data files stay where they are. For a sweep
the attempt is an orphan as young as the rollback, since an attempt is as old as its youngest file.

Steps go newest first and come back oldest first, so that a killed call leaves a run that it could have stopped at, and
the same call goes on. Pins are looked for before and after a root goes, as a prune does. The step that the run goes
back to is looked for after it too: a prune may have taken that meanwhile. Per step five small requests.
"""

from dataclasses import dataclass, field
from shlex import quote

from ckptkit.format.keys import DAMAGED_ROOT_KEY, aside_key, step_folder
from ckptkit.loading.roots import at_once, attempt_seen, committed_attempt, is_medium_error, root_info, root_key
from ckptkit.runs.catalogue import ListedStep, listed_steps, no_step, pin_key, refuse_pinned
from ckptkit.runs.record import check_step, what_is_wrong
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Storage
from threefold.storage.folders import linked_folder
from threefold.storage.local import sync_name


@dataclass
class RollbackReport:
    """Which steps after `step` a rollback set aside, or put in quarantine as they are damaged; or which ones its
    undoing brought back, and why it left others where they are. With `dry_run`: what would be.
    """

    url: str
    step: int
    dry_run: bool = False
    set_aside: list[int] = field(default_factory=list)
    quarantined: list[int] = field(default_factory=list)
    brought_back: list[int] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)


def rollback(storage: Storage, step: int, *, dry_run: bool = False) -> RollbackReport:
    """Make a committed step the newest: set all newer ones aside, once the step was seen to be whole.

    UserError, before anything changes, if the step is not committed, if this program cannot read its format, or if a
    newer one is pinned; CheckFailed if the step is damaged.
    """
    info = root_info(storage, step)
    if info is None:
        raise no_step(storage, step)
    sync_name(storage, root_key(step))
    try:
        check_step(storage, step, info)
    except CheckFailed as damage:
        text = f"step {step} of {storage.url} is damaged: {' '.join(damage.message.split())}"
        raise CheckFailed(text, hint=f"ckptkit ls {quote(storage.url)}") from damage
    return set_aside_after(storage, step, dry_run=dry_run, is_needed=True)


def set_aside_after(storage: Storage, step: int, *, dry_run: bool = False, is_needed: bool = False) -> RollbackReport:
    """Set the committed steps after one aside, newest first, whether that one is committed or not.

    UserError, before anything changes, if one of them is pinned or in a folder that is a link. If the step `is_needed`
    and goes away meanwhile, StorageError, and the last one that was to be set aside stays.
    """
    newer = [listed for listed in listed_steps(storage) if listed.step > step and listed.root][::-1]
    refuse_pinned(storage, newer[::-1])
    attempts = at_once(lambda listed: _attempt_named(storage, listed.step), newer)
    for listed, attempt in zip(newer, attempts, strict=True):
        if link := linked_folder(storage, f"{step_folder(listed.step)}/{attempt}"):
            raise UserError(
                f"{storage.url}/{link} is a link, and nothing is changed through one",
                hint=f"ckptkit rm {quote(storage.url)}/{step_folder(listed.step)}",
            )
    report = RollbackReport(storage.url, step, dry_run)
    for listed, attempt in zip(newer, attempts, strict=True):
        if not dry_run:
            _set_aside(storage, listed.step, attempt, step if is_needed else None)
        (report.set_aside if attempt else report.quarantined).append(listed.step)
    return report


def undo_rollback(storage: Storage, step: int, *, dry_run: bool = False) -> RollbackReport:
    """Bring the steps after one back that were set aside, oldest first; of two tries at a step the one set aside last.

    A step that is not whole any more is left, and the report says why. UserError, before anything changes, if one of
    them was saved again since.
    """
    report = RollbackReport(storage.url, step, dry_run)
    aside = [listed for listed in listed_steps(storage) if listed.step > step and listed.aside]
    attempts = [_attempt_to_return(storage, listed) for listed in aside]
    for listed, attempt in zip(aside, attempts, strict=True):
        key = aside_key(listed.step, attempt)
        is_back = listed.root is not None  # an earlier call was killed before it was done with the step
        root = b"" if is_back else storage.read(key)
        if not is_back and (problem := what_is_wrong(storage, listed.step, None, aside=root)):
            report.left[listed.step] = problem
            continue
        report.brought_back.append(listed.step)
        if not dry_run:
            if is_back:
                sync_name(storage, root_key(listed.step))
            else:
                _bring_back(storage, listed.step, key, root)
            storage.delete([key])
    return report


def _attempt_named(storage: Storage, step: int) -> str:
    """Return the attempt that a root names, empty where the root is damaged."""
    try:
        return committed_attempt(storage, step) or ""
    except (CheckFailed, StorageError) as error:
        if isinstance(error, StorageError) and not is_medium_error(error):
            raise
        return ""


def _set_aside(storage: Storage, step: int, attempt: str, needed: int | None) -> None:
    """Set one step aside, unless it was pinned or the step that is needed then was pruned; UserError then.

    One with a damaged root goes into quarantine. The last look for the pin comes after the root is gone, as that of
    `pin` for the root comes after the pin is put; a prune looks for the newest step after it deleted another.
    """
    if not attempt:
        quarantine(storage, step)
        return
    aside = aside_key(step, attempt)
    storage.copy(root_key(step), aside)
    storage.delete([root_key(step)])
    is_pinned = storage.info(pin_key(step)) is not None
    has_needed = needed is None or root_info(storage, needed) is not None
    if is_pinned or not has_needed:
        storage.write(root_key(step), storage.read(aside), if_absent=True)
        storage.delete([aside])
        refuse_pinned(storage, [ListedStep(step, is_pinned=is_pinned)])
        raise StorageError(
            f"step {needed} of {storage.url} was pruned meanwhile, so step {step} stays",
            hint=f"ckptkit ls {quote(storage.url)}",
        )


def _attempt_to_return(storage: Storage, listed: ListedStep) -> str:
    """Return which attempt of a step comes back: the one set aside last; UserError if the step was saved again."""
    committed = committed_attempt(storage, listed.step) if listed.root else None
    if committed in listed.aside:
        return committed
    if committed is not None:
        url = f"{storage.url}/{step_folder(listed.step)}"
        raise UserError(
            f"step {listed.step} of {storage.url} was saved again since it was set aside",
            hint=f"to lose that save: ckptkit rm {quote(url)} --newest-too",
        )
    infos = [(storage.info(aside_key(listed.step, attempt)), attempt) for attempt in listed.aside]
    return max((info.modified_s if info else 0.0, attempt) for info, attempt in infos)[1]


def _bring_back(storage: Storage, step: int, key: str, root: bytes) -> None:
    """Put a root back, unless a sweep, which looks for roots later, takes what was set aside meanwhile."""
    storage.write(root_key(step), root, if_absent=True)
    if storage.info(key) is None:
        storage.write(key, root)
        storage.delete([root_key(step)])
        raise StorageError(
            f"step {step} of {storage.url} was swept or brought back meanwhile", hint="run the same command again"
        )


def quarantine(storage: Storage, step: int, attempt: str | None = None) -> bool:
    """Keep the root of a step as damaged-root.json, so that the step is not committed; return False if it was not.

    With an attempt, as `attempt_seen` returned it, False too if the step is another one's by now.
    """
    key, damaged_key = root_key(step), f"{step_folder(step)}/{DAMAGED_ROOT_KEY}"
    if root_info(storage, step) is None or (attempt is not None and attempt_seen(storage, step) != attempt):
        return False
    try:
        storage.copy(key, damaged_key)
    except StorageError as error:
        if not is_medium_error(error):
            raise
        storage.write(damaged_key, b"")  # the disk cannot return this root
    storage.delete([key])
    return True
