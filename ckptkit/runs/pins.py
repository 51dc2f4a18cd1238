"""Pins: an object beside a step's root keeps the step from every retention policy, whatever the object holds."""

import json
import time
from collections.abc import Iterable
from shlex import quote

from ckptkit.format.keys import PIN_KEY, ROOT_KEY, step_folder
from ckptkit.format.saved import utc_text
from ckptkit.runs.catalogue import ListedStep
from threefold.errors import StorageError, UserError
from threefold.storage import Storage

MAX_PIN_BYTES, MAX_NOTE_BYTES = 1 << 20, 10_000


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
