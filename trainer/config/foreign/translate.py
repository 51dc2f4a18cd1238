"""Flags of other programs in our words: what `threefold.rewording` asks for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from threefold.options import FlagText
from threefold.rewording import NEEDS_VALUE, Taken
from trainer.config.foreign.derived import MARK
from trainer.config.foreign.table import OPPOSITES, Entry, Meaning, entry_of, key_of

NO_DEEPSPEED = "DeepSpeed does not run here; the optimizer state is cut as its ZeRO stage 1 does"
SWITCHED = ("true", "false")


def translated(flag: str, value: str | None, following: Sequence[str]) -> Taken | None:
    """Return what another program's flag is here; None if no table has it."""
    return Translator().take(flag, value, following)


class Translator:
    """Reads flags of other programs, and notes those that need nothing here."""

    def __init__(self) -> None:
        self.left: list[tuple[str, str]] = []  # each with the sentence on why

    def take(self, flag: str, value: str | None, following: Sequence[str]) -> Taken | None:
        """Return what a flag is here, with the arguments behind it that are its values; None if no table has it."""
        entry, is_negated = entry_of(flag), False
        if entry is None and flag.startswith("--no-"):
            entry, is_negated = entry_of("--" + flag.removeprefix("--no-")), True
            entry = None if entry is None or entry.metavar else entry
        if entry is None:
            return None
        values = ([value] if value is not None else []) + list(values_behind(entry, value, following))
        num_values = len(values) - (value is not None)
        if entry.meaning(values).kind == "no" and entry.metavar:
            num_values = max(num_values, len(list(open_values(following))))
        answer = Taken(num_values)
        is_switch = not entry.metavar and not entry.is_family
        if is_switch and values and values[0].lower() not in SWITCHED:
            answer.faults.append(f"{flag} {values[0]}: it is a switch, without a value")
            return answer
        if is_switch and values:
            is_negated = is_negated != (values.pop().lower() == "false")
        meaning = entry.meaning(values)
        if entry.metavar and not values and not entry.metavar.endswith("?"):
            answer.faults.append(f"{flag}: {NEEDS_VALUE}")
        elif is_negated:
            self._add_negated(answer, flag, meaning)
        elif meaning.kind == "reads":
            self._add_file(answer, flag, values)
        else:
            self._add_meaning(answer, with_value(flag, entry, values), meaning, values, flag)
        return answer

    def _add_meaning(self, answer: Taken, shown: str, meaning: Meaning, values: Sequence[str], flag: str) -> None:
        if meaning.kind == "no":
            answer.faults.append(f"{shown}: {meaning.text}")
        elif meaning.kind == "so":
            self.left.append((shown, meaning.text))
        elif meaning.kind == "by":
            answer.settings[MARK + meaning.text] = FlagText(values[0] if values else "", flag, tuple(values[1:]))
            if meaning.why:
                self.left.append((shown, meaning.why))
        else:
            try:
                pairs = meaning.assignments(values)
            except ValueError as error:
                answer.faults.append(f"{shown}: {error}")
                return
            answer.words += [f"--{option.replace('_', '-')}={text}" for option, text in pairs]
            answer.options += [option for option, _ in pairs]

    def _add_negated(self, answer: Taken, flag: str, meaning: Meaning) -> None:
        if meaning.kind == "no":
            self.left.append((flag, meaning.text))
            return
        pairs = meaning.assignments([]) if meaning.kind == "sets" else []
        if not pairs or not all(text in OPPOSITES for _, text in pairs):
            said = ", ".join(f"{option} = {text}" for option, text in pairs) or meaning.text
            answer.faults.append(f"{flag}: without it, it is so all the same: {said}")
            return
        answer.words += [f"--{option.replace('_', '-')}={OPPOSITES[text]}" for option, text in pairs]
        answer.options += [option for option, _ in pairs]

    def _add_file(self, answer: Taken, flag: str, values: Sequence[str]) -> None:
        """Add what the keys of a file of DeepSpeed are; DeepSpeed itself is answered where no file is named."""
        if not values:
            answer.faults.append(f"{flag}: {NO_DEEPSPEED}")
            return
        path = values[0]
        try:
            with open(path, encoding="utf-8") as file:
                tables = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            cause = error.strerror if isinstance(error, OSError) else f"it is not JSON: {error}"
            answer.faults.append(f"{flag}: cannot read {path}: {cause}; {NO_DEEPSPEED}")
            return
        if not isinstance(tables, Mapping):
            answer.faults.append(f"{flag}: {path} has no keys; {NO_DEEPSPEED}")
            return
        for key, said in keys_of(tables):
            entry, name = key_of(key), f"{path}: {key}"
            if entry is None:
                answer.faults.append(f"{name}: this key is not known")
            else:
                self._add_meaning(answer, with_value(name, entry, said), entry.meaning(said), said, name)


def with_value(name: str, entry: Entry, values: Sequence[str]) -> str:
    """Return a name as an answer begins, with its value where that matters."""
    return name if isinstance(entry.answer, str) else f"{name} {' '.join(values)}"


def values_behind(entry: Entry, value: str | None, following: Sequence[str]) -> Iterator[str]:
    """Yield the arguments behind a flag that are its values, and never one that may be the configuration."""
    metavar, is_open = entry.metavar, entry.metavar.endswith("...") or (entry.is_family and not entry.metavar)
    if not metavar and not entry.is_family:
        if value is None and following and following[0].lower() in SWITCHED:
            yield following[0]
    elif is_open:
        yield from open_values(following)
    elif value is None:
        may_be_missing = metavar.endswith("?")
        yield from islice(open_values(following) if may_be_missing else closed_values(following), 1)


def closed_values(following: Sequence[str]) -> Iterator[str]:
    """Yield arguments up to the next flag."""
    return takewhile(lambda text: not text.startswith("--"), following)


def open_values(following: Sequence[str]) -> Iterator[str]:
    """Yield arguments up to the next flag, or what may be the configuration."""
    return takewhile(lambda text: not text.endswith(".toml"), closed_values(following))


def keys_of(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the dotted keys of JSON, each with its values; blocks that are not enabled, and "auto", say nothing."""
    if tables.get("enabled") is False:
        return
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{key}.")
        elif value not in (None, "auto"):
            values = value if isinstance(value, list) else [value]
            yield prefix + key, [str(each).lower() if isinstance(each, bool) else str(each) for each in values]


def answers(tables: Mapping[str, Any], known: set[str]) -> tuple[dict[str, Any], list[tuple[set[str], str]]]:
    """Return tables without the keys of other programs, and what each of those is here.

    `known` are our dotted names, and those of our tables.
    """
    own: dict[str, Any] = {}
    faults: list[tuple[set[str], str]] = []
    for name, value in tables.items():
        if not isinstance(value, Mapping) or not value:
            if name in known or not add_answer(faults, name, value):
                own[name] = value
            continue
        inner = {key: each for key, each in value.items() if f"{name}.{key}" in known}
        inner |= {
            key: each
            for key, each in value.items()
            if key not in inner and not add_answer(faults, f"{name}.{key}", each)
        }
        if inner or name in known:
            own[name] = inner
    return own, faults


def add_answer(faults: list[tuple[set[str], str]], name: str, value: Any) -> bool:
    """Add what another program's key of a TOML file is here; return whether a table has it."""
    entry = entry_of(name)
    if entry is None or entry.program != "torchtitan":
        return False
    meaning = entry.meaning([str(value)])
    said = {"sets": f"here it is {meaning.text}", "by": f"as a flag, {entry.name}, it is understood"}
    answer = said.get(meaning.kind) or (meaning.text if meaning.kind == "no" else f"leave it out, {meaning.text}")
    faults.append((set(), f"{name}: {answer}"))
    return True
