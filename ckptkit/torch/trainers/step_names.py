"""StepNames: the names that another program has for the steps of a run, kept in the run as `names.json`.

A name means a step, and what of the step's state is another under this name. While a save runs, a name that it takes
over means the step before it too: if the save fails, or the process dies, that one counts. One process writes them.
"""

import json
from collections.abc import Callable
from shlex import quote
from typing import Any

from threefold.errors import CheckFailed, UserError
from threefold.installing import NEWER
from threefold.storage import Storage
from threefold.storage.folders import local_root
from threefold.storage.second_look import read_checked

NAMES_KEY, VERSION = "names.json", 1
Parts = dict[str, Any]  # JSON by key of the state; None for a key that is not there
Meaning = tuple[int, Parts]


class StepNames:
    """The names of a run's steps, read once; `write` keeps changes."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._meanings: dict[str, list[Meaning]] = {}  # oldest first
        self._dropped: dict[str, int | None] = {}  # names that end, and the step whose commit they wait for
        self._written = self._read()

    def add(self, name: str, step: int, parts: Parts) -> None:
        """Let a name mean a step from the step's commit on."""
        others = [meaning for meaning in self._meanings.get(name, []) if meaning[0] != step]
        self._meanings[name] = [*others, (step, parts)]
        self._dropped.pop(name, None)

    def drop(self, name: str, after: int | None) -> bool:
        """End a name once a step is committed, None for at once; return False if it is none."""
        if name not in self._meanings:
            return False
        self._dropped[name] = after
        return True

    def meaning(self, name: str, is_committed: Callable[[int], bool]) -> Meaning | None:
        """Return what a name means, None if it is none."""
        return next((each for each in reversed(self._meanings.get(name, [])) if is_committed(each[0])), None)

    def steps(self) -> set[int]:
        """Return the steps that have names."""
        return {step for meanings in self._meanings.values() for step, _ in meanings}

    def settle(self, is_committed: Callable[[int], bool], running: int | None) -> tuple[list[int], list[str]]:
        """Forget what is over, but for the step that a save runs for.

        Return the steps that lost their last name, and the names that stay although they were dropped: the save that
        was to take their place failed.
        """
        before, staying = self.steps(), list[str]()
        for name, after in [*self._dropped.items()]:
            if after is not None and after == running:
                continue
            del self._dropped[name]
            if after is None or is_committed(after):
                del self._meanings[name]
            else:
                staying.append(name)
        for name, meanings in [*self._meanings.items()]:
            past = [meaning for meaning in meanings if meaning[0] != running and is_committed(meaning[0])]
            left = [*past[-1:], *(meaning for meaning in meanings if meaning[0] == running)]
            self._meanings[name] = left
            if not left:
                del self._meanings[name]
                self._dropped.pop(name, None)
        return sorted(before - self.steps()), staying

    def write(self) -> None:
        """Keep the names in the run, if they changed."""
        text = json.dumps({"version": VERSION, "names": self._meanings, "dropped": self._dropped}).encode() + b"\n"
        if text != self._written:
            self._storage.write(NAMES_KEY, text)
            self._written = text

    def _read(self) -> bytes:
        if self._storage.info(NAMES_KEY) is None:
            return b""
        return read_checked(self._storage, f"{self._storage.url}/{NAMES_KEY}", self._parsed)

    def _parsed(self, storage: Storage) -> bytes:
        text, place = storage.read(NAMES_KEY), f"{self._storage.url}/{NAMES_KEY}"
        try:
            document = json.loads(text)
            version = document["version"]
            if version == VERSION:
                names = document["names"].items()
                self._meanings = {str(name): [(int(step), dict(parts)) for step, parts in of] for name, of in names}
                self._dropped = {str(name): after for name, after in document["dropped"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            hint = f"rm {quote(place)}" if local_root(storage) else f"remove {place}"
            raise CheckFailed(f"{place} is damaged, and no step with it", hint=hint) from None
        if version != VERSION:
            raise UserError(f"{place} is of version {version!r}, this program reads {VERSION}", hint=NEWER)
        return text
