"""Which trees are one: those in which no reader sees a difference, of several recordings of one program as well.

Names that are drawn at random, and times and checksums that differ with them, are of one recording. So a tree is known
by what was done to it: each path without what is random in it, which file is there, and which of that file's writes
show. Of the temporary files in a folder it shows only that there are any: they are listed, and swept, and not read.
"""

import hashlib
import re

from tools.power_loss.disk import ROOT, Recording
from tools.power_loss.states import State

RANDOM = re.compile(r"[0-9a-f]{16}")
TEMPORARY = re.compile(r"\..*\.tmp")
KEY_BYTES = 16


class Equivalence:
    """The trees of one recording, by keys that are those of equal trees of another."""

    def __init__(self, recording: Recording, of: str) -> None:
        self._recording, self._of = recording, of
        self._titles = {ROOT: ""}  # what each file and folder is called first, by whom, and which of those
        self._ordinals: dict[int, int] = {}  # of the changes of each file
        self._lines: dict[tuple[str, int, tuple[int, ...]], str] = {}
        counts, num_changes = dict[str, int](), dict[int, int]()
        began = [(entry, "") for entry in sorted(recording.entries.items(), key=lambda item: item[1])]
        made = [(entry, change.host) for change in recording.changes for entry in change.entries]
        for ((folder, name), value), host in (*began, *made):
            if value is not None and value not in self._titles:
                maker = "" if value in recording.folders else host  # who is first to make a folder differs
                title = f"{self._titles[folder]}/{RANDOM.sub('#', name)}{maker}"
                counts[title] = counts.get(title, 0) + 1
                self._titles[value] = f"{title}+{counts[title]}"
        for number, change in enumerate(recording.changes):
            self._ordinals[number] = num_changes.get(change.file, 0)
            num_changes[change.file] = self._ordinals[number] + 1

    def key(self, state: State) -> bytes:
        """Return the key of what is there in a state, and was promised by then."""
        digest = hashlib.blake2b(repr((self._of, state.promises)).encode(), digest_size=KEY_BYTES)
        lines = {self._line(*item) for item in self._recording.files(state.changes)}
        digest.update("\n".join(sorted(lines)).encode())
        return digest.digest()

    def _line(self, path: str, value: int, changed: tuple[int, ...]) -> str:
        item = path, value, changed
        if item not in self._lines:
            folder, _, name = path.rpartition("/")
            is_temporary = TEMPORARY.fullmatch(name) and value not in self._recording.folders
            shown = "*" if is_temporary else f"{name} {self._titles[value]} {self._content(value, changed)}"
            self._lines[item] = RANDOM.sub("#", f"{folder}/") + RANDOM.sub("#", shown)
        return self._lines[item]

    def _content(self, value: int, changed: tuple[int, ...]) -> str:
        if value in self._recording.folders:
            return ""
        shown = dict[int, int]()  # by offset, the last write there
        for number in changed:
            change = self._recording.changes[number]
            if change.is_cut:
                shown = {offset: ordinal for offset, ordinal in shown.items() if offset < change.length}
            if change.data:
                shown[change.offset] = self._ordinals[number]
        return f"{len(self._recording.content(value, changed))} {sorted(shown.values())}"


def kinds(recording: Recording) -> dict[int, str]:
    """Return which kind of call begins or ends at each moment."""
    calls = dict[int, str]()
    for change in recording.changes:
        kind = "name" if change.entries else "data" if change.data else "length"
        calls |= {change.began: kind, change.ended: kind}
    for sync in recording.syncs:
        calls |= {sync.began: "fsync", sync.ended: "fsync"}
    return calls | {moment: "promise" for moment, *_ in recording.promises}
