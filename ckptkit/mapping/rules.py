"""The rules of a mapping file, which is TOML: what becomes of tensors whose names match."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from threefold.options import Fault, option, raise_faults, read_toml, walk

SAMPLE = "docs/guides/change-the-layout.md"
Fill = Literal["zeros", "mean"]
LAYER = "layer"
_WORD = re.compile(r"\{([a-z][a-z0-9_]*)(\*?)\}")
MATCHED = "tensors to match; {a} is one word of a name, {a*} any text"


class NamePattern:
    """A name in which {a} is a word without dots and slashes, {a*} any text, none too; the same again if it repeats."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "NamePattern":
        """Return the pattern that a text is; ValueError if it is none."""
        if not text or set(_WORD.sub("", text)) & set("{}"):
            raise ValueError("a name, with words like {n} or {rest*} in it")
        return cls(text)

    @cached_property
    def words(self) -> frozenset[str]:
        """The words that it takes out."""
        return frozenset(match[1] for match in _WORD.finditer(self.text))

    def words_of(self, name: str) -> dict[str, str] | None:
        """Return the words of a name that fits, None of one that does not."""
        match = self._regex.fullmatch(name)
        return None if match is None else match.groupdict()

    def filled(self, words: Mapping[str, str]) -> str:
        """Return the name with these words."""
        return _WORD.sub(lambda match: words[match[1]], self.text)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, at, seen = [], 0, set[str]()
        for match in _WORD.finditer(self.text):
            word, is_any = match[1], bool(match[2])
            group = f"(?P={word})" if word in seen else f"(?P<{word}>{'.*' if is_any else '[^./]+'})"
            parts += [re.escape(self.text[at : match.start()]), group]
            at = match.end()
            seen.add(word)
        return re.compile("".join(parts) + re.escape(self.text[at:]), re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Tensors that are left out."""

    tensors: NamePattern = option(..., MATCHED, parse=NamePattern.parse)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Tensors whose rows become several tensors."""

    tensors: NamePattern = option(..., MATCHED, parse=NamePattern.parse)
    to: tuple[NamePattern, ...] = option(..., "the names of the parts", parse=NamePattern.parse, repeats=True)
    rows: tuple[int, ...] = option((), "rows of each part; equal parts if left out", minimum=1)
    groups: int = option(1, "equal groups of rows of the source, each of which has rows of every part", minimum=1)

    def sizes(self, num_rows: int) -> tuple[int, ...]:
        """Return the rows of each part of a tensor with so many."""
        return self.rows or (num_rows // len(self.to),) * len(self.to)


@dataclass(frozen=True, kw_only=True)
class Fuse:
    """Several tensors whose rows become one."""

    tensors: tuple[NamePattern, ...] = option(..., f"the parts: {MATCHED}", parse=NamePattern.parse, repeats=True)
    to: NamePattern = option(..., "the name of the whole", parse=NamePattern.parse)
    groups: int = option(1, "equal groups of rows of the output, each of which has rows of every part", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Rename:
    """Tensors that get another name."""

    tensors: NamePattern = option(..., MATCHED, parse=NamePattern.parse)
    to: NamePattern = option(..., "the new name, with what {a} matched", parse=NamePattern.parse)


@dataclass(frozen=True, kw_only=True)
class Grow:
    """Tensors that get more rows at their end."""

    tensors: NamePattern = option(..., MATCHED, parse=NamePattern.parse)
    rows: int = option(..., "rows of the output", minimum=1)
    fill: Fill = option(..., "what the new rows hold: zeros, or the mean of the old ones")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Which layer of the source each layer of the output is."""

    order: tuple[int, ...] = option((), "the source's layer of each; one that is left out is dropped")
    tensors: NamePattern = option(
        NamePattern.parse("{kind*}layers.{layer}.{rest*}"), "names of layers", parse=NamePattern.parse
    )


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A mapping file."""

    drop: tuple[Drop, ...] = ()
    layers: Layers = Layers()
    split: tuple[Split, ...] = ()
    fuse: tuple[Fuse, ...] = ()
    rename: tuple[Rename, ...] = ()
    grow: tuple[Grow, ...] = ()


def read_rules(path: str) -> tuple[Rules, dict[str, Any]]:
    """Return the rules of a file, and the values that it puts into the metadata; UserError lists all faults."""
    tables, faults = read_toml(path, sample=SAMPLE), list[Fault]()
    metadata = tables.pop("metadata", {})
    rules = walk(Rules, tables, faults)
    if not isinstance(metadata, dict):
        faults.append((set(), "metadata: must be a table [metadata]"))
    if not faults:
        faults += [(set(), fault) for fault in _unknown_words(rules)]
        if LAYER not in rules.layers.tensors.words:
            faults.append((set(), f"layers.tensors: must have {{{LAYER}}}, got '{rules.layers.tensors}'"))
    raise_faults(path, faults, hint=f"{SAMPLE} has samples of all rules")
    return rules, metadata


def _unknown_words(rules: Rules) -> Iterator[str]:
    """Yield what new names ask for that no match has."""
    made = [("rename", each.tensors, each.to) for each in rules.rename]
    made += [("split", each.tensors, to) for each in rules.split for to in each.to]
    made += [("fuse", part, each.to) for each in rules.fuse for part in each.tensors]
    for kind, pattern, to in made:
        if unknown := sorted(to.words - pattern.words):
            yield f"{kind}.to: '{to}' has {{{unknown[0]}}}, which '{pattern}' has not"
