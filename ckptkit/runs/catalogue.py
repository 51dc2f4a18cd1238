"""Catalogue: which steps of a run are committed, derived by listing, and which are pinned; nothing else says it.

`committed_roots` and `listed_steps` list the run once, 1,000 files a request; or they look at every step, NUM_AT_ONCE
at once, where that costs less time, where other folders lie in the run, and on a local disk, which reads folders and
stats no file but roots. Where no step is found, what else was named is looked for: a token store, another program's
folder, a file of a step.

A pin is an object beside a step's root: it keeps the step from every retention policy, whatever the object holds.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from ckptkit.format.address import STORE_NAMES
from ckptkit.format.keys import (
    ASIDE_NAME,
    DAMAGED_ROOT_KEY,
    PIN_KEY,
    ROOT_KEY,
    attempt_of,
    parse_step_folder,
    step_folder,
    step_like,
)
from ckptkit.format.saved import utc_text
from ckptkit.loading.roots import NUM_AT_ONCE, absent_step, at_once, root_info, step_folders, steps_of
from threefold.errors import StorageError, UserError
from threefold.storage import ObjectInfo, Storage
from threefold.storage.folders import local_root

LISTED_PER_REQUEST = 1000
MIN_LISTINGS = 8  # so many in a row are never too many
FOREIGN_NAMES = {"config.json": "hf", ".metadata": "dcp"}
MAX_PIN_BYTES, MAX_NOTE_BYTES = 1 << 20, 10_000


@dataclass(slots=True)
class ListedStep:
    """What a listing shows of one step: its root, whether it is pinned, how many files each attempt has, other keys.

    `num_files` counts files of the format; `aside` are the attempts that a rollback set aside; `unknown` are all keys
    that the format does not name.
    """

    step: int
    root: ObjectInfo | None = None
    is_pinned: bool = False
    has_damaged_root: bool = False
    num_files: dict[str, int] = field(default_factory=dict)
    aside: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add(self, key: str) -> None:
        """Count one key of the step."""
        name = key.partition("/")[2]
        if name == PIN_KEY:
            self.is_pinned = True
        elif name == DAMAGED_ROOT_KEY:
            self.has_damaged_root = True
        elif attempt := attempt_of(name):
            self.num_files[attempt] = self.num_files.get(attempt, 0) + 1
            self.aside += [attempt] if name == f"{attempt}/{ASIDE_NAME}" else []
        elif name != ROOT_KEY:
            self.unknown.append(key)


def committed_steps(storage: Storage) -> list[int]:
    """Return the steps whose root exists, ascending."""
    return list(committed_roots(storage))


def committed_roots(storage: Storage) -> dict[int, ObjectInfo]:
    """Return the root of each committed step, ascending by step."""
    folders = list(storage.list_folders())
    steps = steps_of(folders)
    if steps and _is_listed_flat(storage, folders):
        middle = sum(1 for _ in storage.list_keys(f"{step_folder(steps[len(steps) // 2])}/"))
        if middle * len(steps) <= LISTED_PER_REQUEST * max(len(steps) // NUM_AT_ONCE, MIN_LISTINGS):
            return {each.step: each.root for each in _listed_flat(storage) if each.root}
    infos = at_once(lambda step: root_info(storage, step), steps)
    return {step: info for step, info in zip(steps, infos, strict=True) if info}


def counted_steps(storage: Storage) -> tuple[int, bool]:
    """Return how many steps a run has, for a line of a report, and whether all of them are known to be committed.

    Costs one listing of names and NUM_AT_ONCE lookups at most: of many steps it is those that have a folder.
    """
    steps = step_folders(storage)
    if len(steps) > NUM_AT_ONCE:
        return len(steps), False
    return sum(info is not None for info in at_once(lambda step: root_info(storage, step), steps)), True


def listed_steps(storage: Storage) -> list[ListedStep]:
    """Return what is there of every step that has a folder, ascending."""
    folders = list(storage.list_folders())
    if _is_listed_flat(storage, folders):
        return _listed_flat(storage)
    return at_once(lambda step: _listed(storage, step), steps_of(folders))


def look_up(storage: Storage, step: int) -> ListedStep:
    """Return what is there of one step, whatever the run holds besides: its root and its pin."""
    pin = storage.info(f"{step_folder(step)}/{PIN_KEY}")
    return ListedStep(step, root_info(storage, step), is_pinned=pin is not None)


def no_step(storage: Storage, step: int | None = None) -> UserError:
    """Return the error that a run does not hold a step, or any; or a StorageError if the run does not exist."""
    if step is not None and step_folders(storage):
        return absent_step(storage, step)
    if other := not_a_run(storage):
        return other
    if fault := missing_place(storage):
        return StorageError(fault, hint="check the URL: a run's, or RUN/step-000000100")
    what = "no committed step" if step is None else f"no committed step {step}"
    return UserError(f"{storage.url} holds {what}", hint=f"check the URL: ckptkit ls {quote(storage.url)}")


def missing_place(storage: Storage) -> str:
    """Return in words that there is nothing at all where a run is looked for, empty where there is something."""
    folder = local_root(storage)
    if folder is not None:
        return "" if folder.is_dir() else f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}"
    is_empty = not any(storage.list_folders()) and not any(storage.list_keys())
    return f"nothing is stored at {storage.url}" if is_empty else ""


def _is_listed_flat(storage: Storage, folders: Iterable[str]) -> bool:
    """Return whether one listing shows steps alone; other folders may hold anything."""
    return local_root(storage) is None and all(parse_step_folder(name) is not None for name in folders)


def _listed_flat(storage: Storage) -> list[ListedStep]:
    by_step: dict[int, ListedStep] = {}
    for item in storage.list():
        folder, slash, name = item.key.partition("/")
        step = parse_step_folder(folder) if slash else None
        if step is not None:
            listed = by_step.setdefault(step, ListedStep(step))
            listed.add(item.key)
            if name == ROOT_KEY:
                listed.root = item
    return [by_step[step] for step in sorted(by_step)]


def _listed(storage: Storage, step: int) -> ListedStep:
    listed = ListedStep(step)
    for key in storage.list_keys(f"{step_folder(step)}/"):
        listed.add(key)
    listed.root = root_info(storage, step)
    return listed


def not_a_run(storage: Storage) -> UserError | None:
    """Return the error that names what else is at a URL, None if that is not known."""
    url = storage.url
    for folder in ("", "train/", "valid/"):
        if any(storage.info(f"{folder}{name}") for name in STORE_NAMES):
            place = f"{url}/{folder}".rstrip("/")
            return UserError(
                f"{url} is {'a token store' if not folder else 'of token stores'}, not a run of checkpoints",
                hint=f"datakit inspect {quote(place)}",
            )
    for name, kind in FOREIGN_NAMES.items():
        if storage.info(name):
            return UserError(
                f"{url} is a folder of another program, by its {name}, not a run",
                hint=f"ckptkit inspect {quote(f'{kind}:{url}')}",
            )
    root = local_root(storage)
    return None if root is None else _in_a_run(root)


def _in_a_run(path: Path) -> UserError | None:
    """Return the error for a path below a run that is not a step's: a file of one, or its number written otherwise."""
    step = next((each for each in path.parents if parse_step_folder(each.name) is not None), None)
    if step is not None:
        return UserError(f"{path} holds no committed step: it is below one, which is meant", hint=quote(str(step)))
    number = int(path.name) if path.name.isdecimal() and len(path.name) < 16 else step_like(path.name)
    if number is None or path.exists() or not path.parent.is_dir():
        return None
    right = path.with_name(step_folder(number))
    others = [each for each in path.parent.iterdir() if parse_step_folder(each.name) is not None]
    if not others:
        return None
    there = "" if right.is_dir() else f", which is not there either; {len(others)} others are"
    return StorageError(
        f"{path} does not exist: the folder of step {number} is {right.name}{there}",
        hint=quote(str(right)) if right.is_dir() else f"ckptkit ls {quote(str(path.parent))}",
    )


def pin(storage: Storage, step: int, note: str = "") -> None:
    """Pin a committed step, with a reason; a second pin replaces the first. UserError where no such step is committed.

    The root is looked for after the pin is put: a prune that took it looks for pins after that, so that one of both
    sees the other.
    """
    try:
        num_bytes = len(note.encode())
    except UnicodeEncodeError:
        raise UserError(f"the note {note!r} is not UTF-8", hint="--note 'a text in UTF-8'") from None
    if num_bytes > MAX_NOTE_BYTES:
        raise UserError(
            f"a note of {num_bytes:,} bytes is too long, {MAX_NOTE_BYTES:,} fit",
            hint="put the text elsewhere and its address into --note",
        )
    key = pin_key(step)
    was_pinned = storage.info(key) is not None
    document = {"note": note, "pinned_at": utc_text(time.time())}
    storage.write(key, json.dumps(document, ensure_ascii=False).encode() + b"\n")
    if storage.info(f"{step_folder(step)}/{ROOT_KEY}") is None:
        if not was_pinned:
            storage.delete([key])
        raise UserError(f"{storage.url} holds no committed step {step}", hint=f"ckptkit ls {quote(storage.url)}")


def unpin(storage: Storage, step: int) -> bool:
    """Take a step's pin away; whether there was one."""
    was_pinned = storage.info(pin_key(step)) is not None
    storage.delete([pin_key(step)])
    return was_pinned


def refuse_pinned(storage: Storage, listed: Iterable[ListedStep]) -> None:
    """Raise UserError if any of some steps is pinned."""
    if pinned := [each.step for each in listed if each.is_pinned]:
        numbers, urls = ", ".join(map(str, pinned)), [f"{storage.url}/{step_folder(step)}" for step in pinned]
        what = f"step {numbers} of {storage.url} is" if not pinned[1:] else f"steps {numbers} of {storage.url} are"
        raise UserError(f"{what} pinned", hint=f"ckptkit unpin {' '.join(map(quote, urls))}")


def pin_note(storage: Storage, step: int) -> str | None:
    """Return the note of a step's pin, empty where it has none or is damaged; None for a step that is not pinned."""
    info = storage.info(pin_key(step))
    if info is None:
        return None
    if info.size_bytes > MAX_PIN_BYTES:
        return ""
    try:
        data = storage.read(info.key)
    except StorageError:
        if storage.info(info.key) is None:  # unpinned meanwhile
            return None
        raise
    try:
        return str(json.loads(data)["note"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def pin_key(step: int) -> str:
    """Return the key of a step's pin."""
    return f"{step_folder(step)}/{PIN_KEY}"
