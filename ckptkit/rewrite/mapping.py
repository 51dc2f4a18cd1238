"""Mapping: which tensors a checkpoint is to have, made of which of another: the rules of a TOML file. Pure but for it.

Rules apply in this order, each to the names that the one before made: drop, layers, rename, grow. Strict: a rule that
matches nothing, a name that two tensors would have and a tensor without a source are faults, all reported at once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptkit.format.root import Root
from ckptkit.model.tensor import TensorInfo
from ckptkit.rewrite.name_pattern import NamePattern
from threefold.options import Fault, option, raise_faults, read_toml, walk

SAMPLE = "docs/guides/change-the-layout.md"
FLOATS = ("F64", "F32", "F16", "BF16")  # of which a mean is made
Fill = Literal["zeros", "mean"]
LAYER = "layer"
MATCHED = "tensors to match; {a} is one word of a name, {a*} any text"


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Tensors that are left out."""

    tensors: NamePattern = option(..., MATCHED, parse=NamePattern.parse)


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
    rename: tuple[Rename, ...] = ()
    grow: tuple[Grow, ...] = ()


@dataclass(frozen=True, slots=True)
class Mapped:
    """One tensor of the output and the one that it is made of; `fill` is what rows hold that the source has not."""

    info: TensorInfo
    source: TensorInfo
    layer: int | None = None  # of the output, if layers were put into order
    fill: Fill | None = None

    @property
    def is_same(self) -> bool:
        """Whether nothing changes."""
        return self.info == self.source


@dataclass(frozen=True)
class MapReport:
    """What a mapping does: how many tensors each rule matched, and names.

    `new` are those that the source has not, each with what it is made of, `changed` the others that rules changed.
    """

    rules: tuple[tuple[str, int], ...]
    new: dict[str, str]
    changed: tuple[str, ...]
    dropped: tuple[str, ...]
    num_unchanged: int

    def lines(self, *, with_names: bool) -> Iterator[str]:
        """Yield the report for people."""
        if with_names:
            yield from (f"new {name}, made of {source}" for name, source in self.new.items())
            yield from (f"changed {name}" for name in self.changed)
            yield from (f"dropped {name}" for name in self.dropped)
        yield from (f"{rule}: {num_matched} tensors" for rule, num_matched in self.rules)
        counts = (len(self.new), len(self.changed), len(self.dropped), self.num_unchanged)
        yield "tensors: {} new, {} changed, {} dropped, {} as they were".format(*counts)


def read_rules(path: str) -> tuple[Rules, dict[str, Any]]:
    """Return the rules of a file, and the values that it puts into the metadata; UserError lists all faults."""
    tables, faults = read_toml(path, sample=SAMPLE), list[Fault]()
    metadata = tables.pop("metadata", {})
    rules = walk(Rules, tables, faults)
    if not isinstance(metadata, dict):
        faults.append((set(), "metadata: must be a table [metadata]"))
    if not faults:
        faults += [(set(), f"rename.to: {fault}") for each in rules.rename if (fault := _unknown(each))]
        if LAYER not in rules.layers.tensors.words:
            faults.append((set(), f"layers.tensors: must have {{{LAYER}}}, got '{rules.layers.tensors}'"))
    raise_faults(path, faults, hint=f"{SAMPLE} has samples of all rules")
    return rules, metadata


class Mapper:
    """Rules put to a root; what is wrong is collected, and raised at the end."""

    def __init__(self, path: str, root: Root, url: str) -> None:
        self._path, self._root, self._url = path, root, url
        self.rules, metadata = read_rules(path)
        self._faults: list[str] = []
        self._metadata = _merged(root.metadata, metadata, "metadata", self._faults)
        self._counts: list[tuple[str, int]] = []
        self.tensors = self._mapped()
        self.report = self._report()

    @property
    def root(self) -> Root:
        """The root that the output has, with the parts of the source."""
        order, root = self.rules.layers.order, self._root
        is_same = len(self.tensors) == len(root.tensors) and all(each.is_same for each in self.tensors)
        mapped = replace(
            root, tensors={each.info.name: each.info for each in self.tensors}, metadata=self._metadata,
            num_layers=len(order) if order and root.num_layers else root.num_layers,
            certificate=root.certificate if is_same else None,
        )  # fmt: skip
        mapped.check()
        return mapped

    def _mapped(self) -> list[Mapped]:
        tensors = [Mapped(info, info) for info in self._root.tensors.values()]
        dropped = {name for each in self.rules.drop for name in self._matched("drop", each.tensors, tensors)}
        tensors = [each for each in tensors if each.info.name not in dropped]
        if self.rules.layers.order:
            tensors = list(self._ordered(tensors))
        tensors = self._grown(self._retied(self._renamed(tensors)))
        faults: list[Fault] = [(set(), text) for text in self._faults]
        raise_faults(f"{self._path} does not fit {self._url}", faults, hint=f"ckptkit inspect {self._url}")
        return tensors

    def _matched(self, kind: str, pattern: NamePattern, tensors: Iterable[Mapped]) -> list[str]:
        """Return the names that a rule matches; a fault if there are none."""
        found = [each.info.name for each in tensors if pattern.words_of(each.info.name) is not None]
        self._counts.append((f"{kind} '{pattern}'", len(found)))
        if not found:
            self._faults.append(f"{kind} '{pattern}' matches no tensor")
        return found

    def _ordered(self, tensors: list[Mapped]) -> Iterator[Mapped]:
        """Yield each tensor once for each layer of the output that is its layer, others as they are."""
        order, pattern = self.rules.layers.order, self.rules.layers.tensors
        self._matched("layers", pattern, tensors)
        there = set[str]()
        for each in tensors:
            name, stage = each.info.name, each.info.placement.stage
            words = pattern.words_of(name)
            if words is not None and not words[LAYER].isdecimal():
                words = None
            if words is None or str(stage) not in (words[LAYER], "first", "last"):
                if not isinstance(stage, str):
                    self._faults.append(f"{name} is of layer {stage}, its name does not say so to '{pattern}'")
                yield each
                continue
            there.add(words[LAYER])
            for layer in (number for number, source in enumerate(order) if str(source) == words[LAYER]):
                placement = each.info.placement if isinstance(stage, str) else replace(each.info.placement, stage=layer)
                renamed = pattern.filled(words | {LAYER: str(layer)})
                yield replace(each, info=replace(each.info, name=renamed, placement=placement), layer=layer)
        missing = sorted({source for source in order if str(source) not in there})
        self._faults += [f"layers.order has {source}, a layer without tensors" for source in missing]

    def _renamed(self, tensors: list[Mapped]) -> list[Mapped]:
        """Return the tensors under their new names; no two rules may match one, no two tensors have one name."""
        names: dict[str, list[NamePattern]] = {}
        renamed = [each.info.name for each in tensors]
        for rule in self.rules.rename:
            self._matched("rename", rule.tensors, tensors)
            for place, each in enumerate(tensors):
                words = rule.tensors.words_of(each.info.name)
                if words is not None and not _unknown(rule):
                    names.setdefault(each.info.name, []).append(rule.tensors)
                    renamed[place] = rule.to.filled(words)
        for name, rules in names.items():
            if rules[1:]:
                self._faults.append(f"{name} is matched by rename '{rules[0]}' and by rename '{rules[1]}'")
        made: dict[str, Mapped] = {}
        for name, each in zip(renamed, tensors, strict=True):
            if name in made:
                self._faults.append(f"{name} would be made of {made[name].source.name} and of {each.source.name}")
            made.setdefault(name, replace(each, info=replace(each.info, name=name)))
        return list(made.values())

    def _retied(self, tensors: list[Mapped]) -> list[Mapped]:
        """Return the tensors, each tied one to the name that its holder has now; a fault if that is not there."""
        holders: dict[tuple[str, int | None], str] = {}
        for each in tensors:
            for layer in (each.layer, None):
                holders.setdefault((each.source.name, layer), each.info.name)
        found = []
        for each in tensors:
            if (tied_to := each.info.placement.tied_to) is not None:
                holder = holders.get((tied_to, each.layer)) or holders.get((tied_to, None))
                if holder is None:
                    self._faults.append(f"{each.info.name} has no source: it is tied to {tied_to}, which is dropped")
                placement = replace(each.info.placement, tied_to=holder or tied_to)
                each = replace(each, info=replace(each.info, placement=placement))
            found.append(each)
        return found

    def _grown(self, tensors: list[Mapped]) -> list[Mapped]:
        """Return the tensors with their new rows; tied ones have the shape of their holder."""
        grown = {each.info.name: each for each in tensors}
        for rule in self.rules.grow:
            for name in self._matched("grow", rule.tensors, tensors):
                info = grown[name].info
                if fault := _cannot_grow(info, rule, is_grown=grown[name].fill is not None):
                    self._faults.append(f"grow '{rule.tensors}': {name} {info.dtype} {list(info.shape)} {fault}")
                elif info.placement.tied_to is None:
                    info = replace(info, shape=(rule.rows, *info.shape[1:]))
                    grown[name] = replace(grown[name], info=info, fill=rule.fill)
        for name, each in grown.items():
            holder = grown.get(each.info.placement.tied_to or "")
            if holder is not None:
                grown[name] = replace(each, info=replace(each.info, shape=holder.info.shape))
        return list(grown.values())

    def _report(self) -> MapReport:
        before, after = self._root.tensors, {each.info.name: each for each in self.tensors}
        sources = {each.source.name for each in self.tensors}
        changed = [name for name, each in after.items() if name in before and not each.is_same]
        new = {name: each.source.name for name, each in after.items() if name not in before}
        return MapReport(
            tuple(self._counts), new, tuple(changed), tuple(name for name in before if name not in sources),
            len(after) - len(new) - len(changed),
        )  # fmt: skip


def _unknown(rule: Rename) -> str:
    """Return what a new name asks for that the match has not, empty if nothing."""
    unknown = [word for word in rule.to.words if word not in rule.tensors.words]
    return f"'{rule.to}' has {{{unknown[0]}}}, which '{rule.tensors}' has not" if unknown else ""


def _cannot_grow(info: TensorInfo, rule: Grow, *, is_grown: bool) -> str:
    if is_grown:
        return "is matched by two of them"
    if not info.shape or info.shape[0] > rule.rows:
        return f"cannot have {rule.rows} rows"
    if rule.fill == "mean" and (info.dtype not in FLOATS or not info.shape[0]):
        return "has no mean"
    return ""


def _merged(old: Mapping[str, Any], new: Mapping[str, Any], where: str, faults: list[str]) -> dict[str, Any]:
    """Return metadata with some of its values replaced; a fault if one is not there before."""
    merged = dict(old)
    for key, value in new.items():
        if key not in old:
            faults.append(f"{where}.{key} is not in the metadata")
        elif isinstance(value, dict) and isinstance(old[key], Mapping):
            merged[key] = _merged(old[key], value, f"{where}.{key}", faults)
        else:
            merged[key] = value
    return merged
