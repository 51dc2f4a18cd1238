"""The tables of foreign names: each name with what it is here, out of the TOML files beside this one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

PROGRAMS = {
    "megatron": "Megatron-LM",
    "hugging_face": "Hugging Face",
    "torchtitan": "torchtitan",
    "deepspeed": "DeepSpeed",
}
OPPOSITES = {"true": "false", "false": "true", "on": "off", "off": "on"}
ASSIGNMENT = re.compile(r"(?P<option>[a-z][a-z0-9_.]*)(?:=(?P<value>\S+)|\*(?P<factor>[0-9.]+)|\[(?P<place>\d+)\])?")
Kind = Literal["sets", "by", "so", "no", "reads"]
KINDS: dict[str, Kind] = {"by": "by", "so": "so", "no": "no", "reads": "reads"}


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name with its value is here.

    It sets options, is worked out `by` a function, is `so` anyway, does not exist: `no`, or names a file that is read.
    Of what a function works out, `why` says what needs nothing here.
    """

    kind: Kind
    text: str
    why: str = ""

    @classmethod
    def of(cls, text: str) -> "Meaning":
        """Return the meaning that a table's text has."""
        word, _, rest = text.partition(": ")
        kind = KINDS.get(word)
        if kind == "by":
            name, _, why = rest.partition(": ")
            return cls(kind, name, why)
        return cls(kind, rest) if kind else cls("sets", text)

    def assignments(self, values: Sequence[str]) -> list[tuple[str, str]]:
        """Return the options it sets, each with its text; ValueError if a value that it needs is not there."""
        pairs = []
        for word in self.text.split():
            match = ASSIGNMENT.fullmatch(word)
            assert match is not None, f"{word} is not OPTION, OPTION=VALUE, OPTION*NUMBER or OPTION[NUMBER]"
            if match["value"] is not None:
                pairs.append((match["option"], match["value"]))
                continue
            place = int(match["place"] or 0)
            if place >= len(values):
                raise ValueError(f"needs {place + 1} values")
            text = values[place]
            if match["factor"]:
                with suppress(ValueError):  # the walker reports the text
                    text = repr(float(text) * float(match["factor"]))
            pairs.append((match["option"], text))
        return pairs


@dataclass(frozen=True, slots=True)
class Entry:
    """A name of another program. `metavar` is empty for a switch, and ends in `...` if there are several values."""

    program: str
    name: str
    metavar: str
    answer: str | Mapping[str, str]

    @property
    def is_family(self) -> bool:
        """Whether it is for all names of a form."""
        return "*" in self.name

    def meaning(self, values: Sequence[str]) -> Meaning:
        """Return what it is with these values: that of the first word that fits each, else its one meaning.

        Several values, as one a layer, have to mean the same.
        """
        if isinstance(self.answer, str):
            return Meaning.of(self.answer)
        texts = {self._text_for(self.answer, value) for value in values or [""]}
        if len(texts) > 1:
            return Meaning.of(f"no: it has one value here, not {', '.join(values)}")
        return Meaning.of(texts.pop())

    @staticmethod
    def _text_for(answer: Mapping[str, str], value: str) -> str:
        exact = (text for word, text in answer.items() if is_same(word, value))
        alike = (text for word, text in answer.items() if "*" in word and fnmatchcase(value, word))
        known = ", ".join(word for word in answer if "*" not in word)
        return next(exact, None) or next(alike, None) or f"no: it is one of {known}"

    @property
    def meanings(self) -> list[Meaning]:
        """All that it can mean."""
        texts = [self.answer] if isinstance(self.answer, str) else self.answer.values()
        return [Meaning.of(text) for text in texts]


def is_same(word: str, value: str) -> bool:
    """Return whether a value is a word, or the same number."""
    if word.lower() == value.lower():
        return True
    with suppress(ValueError):
        return float(word) == float(value)
    return False


def normal(name: str) -> str:
    """Return a flag, or a key, as the table's names are written: with dashes, all of them."""
    return "--" + name.removeprefix("--").replace("_", "-")


@cache
def entries(program: str) -> tuple[Entry, ...]:
    """Return the entries of a program's table, in its order."""
    tables = read(program)
    written = tables.get("flags", tables.get("keys", {}))
    found = []
    for words, said in written.items():
        name, _, metavar = words.partition(" ")
        found.append(Entry(program, name if "keys" in tables else normal(name), metavar, said))
    return tuple(found)


def read(program: str) -> dict[str, dict[str, str | Mapping[str, str]]]:
    """Return the file of a program."""
    import tomllib  # no --help pays for it

    return tomllib.loads((Path(__file__).parent / f"{program}.toml").read_text(encoding="utf-8"))


def flags() -> Iterator[Entry]:
    """Yield the entries that are flags, those of Megatron-LM first."""
    for program in ("megatron", "hugging_face", "torchtitan"):
        yield from entries(program)


def entry_of(name: str) -> Entry | None:
    """Return what is known of a flag, or of a dotted key of a TOML file; an exact name comes before a family."""
    return find(normal(name), list(flags()))


def key_of(name: str) -> Entry | None:
    """Return what is known of a dotted key of DeepSpeed's JSON."""
    return find(name, list(entries("deepspeed")))


def find(name: str, among: Sequence[Entry]) -> Entry | None:
    """Return the entry of a name, else the first family that it belongs to."""
    exact = (entry for entry in among if entry.name == name)
    families = (entry for entry in among if entry.is_family and fnmatchcase(name, entry.name))
    return next(exact, None) or next(families, None)
