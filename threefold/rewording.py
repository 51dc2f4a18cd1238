"""Command lines as people write them, before argparse reads them: flags without their value, words of other programs.

A flag that may do without its value gets one here, so that it never takes the argument behind it; `--no-FLAG` is its
other value. A flag that is not ours may be another program's, which says what it is in our words. All that is neither
is reported at once.
"""

import argparse
import difflib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from threefold.flags import PREFIX, BareAction
from threefold.options import FlagText

NEEDS_VALUE = "needs a value"


@dataclass(slots=True)
class Taken:
    """What another program's flag is here: our words, settings that no flag has, sentences on what does not exist.

    `num_values` counts the arguments behind the flag that belong to it, `options` the names of what it sets.
    """

    num_values: int
    words: list[str] = field(default_factory=list)
    settings: dict[str, FlagText] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)


Foreign = Callable[[str, str | None, Sequence[str]], Taken | None]  # a flag, its =VALUE, and what comes behind it


class Rewording:
    """A command line in our words; owned by the parser of a verb."""

    def __init__(
        self, actions: Mapping[str, argparse.Action], foreign: Foreign | None, *, is_flags_alone: bool = False
    ) -> None:
        """Take the flags of a parser, what knows those of other programs, and whether there is nothing but flags."""
        self._actions, self._foreign, self._is_flags_alone = actions, foreign, is_flags_alone
        self.arguments: list[str] = []
        self.settings: dict[str, FlagText] = {}
        self.spelled: dict[str, str] = {}  # a setting's dotted name, and the flag as it was typed
        self.faults: list[str] = []

    def read(self, arguments: Sequence[str]) -> None:
        """Add what a command line says."""
        rest = deque(arguments)
        while rest:
            word = rest.popleft()
            if word == "--":
                self.arguments += [word, *rest]
                return
            if not word.startswith("--"):
                (self.faults if self._is_flags_alone else self.arguments).append(word)
                continue
            flag, sign, text = word.partition("=")
            value = text if sign else None
            if not (self._read_own(flag, value, rest) or self._read_foreign(flag, value, rest)):
                self.faults.append(unknown(flag, self._actions))
                while rest and not rest[0].startswith("--") and not rest[0].endswith(".toml"):
                    rest.popleft()  # its values, or it is an error all the same

    def _read_own(self, flag: str, value: str | None, rest: deque[str]) -> bool:
        """Add a flag of ours, written with any dashes, with the value that follows it; return whether it is one."""
        name = flag if flag in self._actions else flag.replace("_", "-")
        action = self._actions.get(name)
        if action is not None and action.dest.startswith(PREFIX):
            self.spelled[action.dest.removeprefix(PREFIX)] = flag
        if action is None:
            base = self._actions.get("--" + name.removeprefix("--no-"))
            if not (name.startswith("--no-") and isinstance(base, BareAction)) or value is not None:
                return False
            self.arguments.append(f"--{name.removeprefix('--no-')}={base.bare[1]}")
        elif isinstance(action, BareAction):
            if value is None:
                value = rest.popleft() if rest and is_value(rest[0], action) else action.bare[0]
            self.arguments.append(f"{name}={action.words.get(value.lower(), value)}")
        elif action.nargs == 0:
            if value is None and rest and rest[0].lower() in ("true", "false"):
                value = rest.popleft()
            if (value or "true").lower() == "true":
                self.arguments.append(name)
            else:
                self.faults.append(f"{flag} {value}: it is a switch, leave it out")
        elif isinstance(action.metavar, tuple):
            self._read_words(flag, name, action.metavar, value, rest)
        elif value is not None:
            self.arguments.append(f"{name}={value}")
        elif rest and (not rest[0].startswith("--") or " " in rest[0]):
            self.arguments += [name, rest.popleft()]
        else:
            self.faults.append(f"{flag}: {NEEDS_VALUE}")
        return True

    def _read_words(self, flag: str, name: str, metavar: tuple[str, ...], value: str | None, rest: deque[str]) -> None:
        """Add a flag of several words, which may be one text of commas or blanks too."""
        words = [] if value is None else value.replace(",", " ").split()
        while value is None and len(words) < len(metavar) and rest and not rest[0].startswith("--"):
            words += rest.popleft().replace(",", " ").split()
        if len(words) == len(metavar):
            self.arguments += [name, *words]
        else:
            self.faults.append(f"{flag} {' '.join(metavar)}: each {NEEDS_VALUE}")

    def _read_foreign(self, flag: str, value: str | None, rest: deque[str]) -> bool:
        """Add what a flag of another program is here; return whether it is known."""
        meaning = self._foreign(flag, value, list(rest)) if self._foreign else None
        if meaning is None:
            return False
        for _ in range(meaning.num_values):
            rest.popleft()
        self.arguments += meaning.words
        self.settings.update(meaning.settings)
        self.spelled.update(dict.fromkeys(meaning.options, flag))
        self.faults += meaning.faults
        return True

    def put(self, arguments: argparse.Namespace) -> None:
        """Put what no flag of ours says into what argparse read, for `threefold.flags.settings_of`."""
        for name, setting in self.settings.items():
            setattr(arguments, PREFIX + name, setting)
        for name, flag in self.spelled.items():
            text = getattr(arguments, PREFIX + name, None)
            if text is not None and not isinstance(text, FlagText):
                first, *more = text if isinstance(text, list) else [str(text)]
                setattr(arguments, PREFIX + name, FlagText(first, flag, tuple(more)))


def is_value(text: str, action: BareAction) -> bool:
    """Return whether what follows a flag is its value, if a wrong one: not a path, a URL or another flag."""
    return text.lower() in action.words or (text.isalnum() and not os.path.exists(text))


def unknown(flag: str, actions: Mapping[str, argparse.Action]) -> str:
    """Return the sentence on a flag that nobody knows, with the one that may have been meant."""
    names = {name.removeprefix("--"): name for name in actions}
    close = difflib.get_close_matches(flag.removeprefix("--"), names, 1, 0.7)  # step is not like tp
    return f"unknown argument {flag}" + (f", did you mean {names[close[0]]}?" if close else "")
