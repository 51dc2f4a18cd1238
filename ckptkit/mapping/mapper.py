"""Mapping: which tensors a checkpoint is to have, made of which of another, by the rules of a file. Pure but for it.

Rules apply in this order, each to the names that the one before made: drop, layers, split, fuse, rename, grow. Strict:
a rule that matches nothing, a name that two tensors would have and a tensor without a source are faults, all reported
at once. The trees of a PyTorch program's state are no tensors to the rules: they follow the tensors.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

from ckptkit.format.root import Root
from ckptkit.format.state_tree import METADATA, STATE_NAME
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.loading.restore import is_tree, read_trees
from ckptkit.mapping.mapped import (
    Mapped,
    RowRange,
    fused,
    parts_of,
    shown,
    why_not_fused,
    why_not_grown,
    why_not_split,
)
from ckptkit.mapping.rules import LAYER, NamePattern, read_rules
from ckptkit.mapping.trees import MappedTrees
from ckptkit.model.tensor import TensorInfo
from threefold.options import Fault, raise_faults


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


class Mapper:
    """Rules put to the root of a checkpoint; what is wrong is collected, and raised at the end."""

    def __init__(self, path: str, source: ChunkSource) -> None:
        self._path, self._root, self._url = path, source.root, source.url
        self._trees = read_trees(source) if METADATA in source.root.metadata else {}
        self.rules, metadata = read_rules(path)
        self._faults: list[str] = []
        self._metadata = _merged(source.root.metadata, metadata, "metadata", self._faults)
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
        everything = [Mapped(info, (RowRange.whole(info),)) for info in self._root.tensors.values()]
        tensors = [each for each in everything if not self._is_tree(each.info)]
        dropped = {name for each in self.rules.drop for name in self._matched("drop", each.tensors, tensors)}
        tensors = [each for each in tensors if each.info.name not in dropped]
        if self.rules.layers.order:
            tensors = list(self._ordered(tensors))
        tensors = self._grown(self._retied(self._renamed(self._fused(self._split(tensors)))))
        trees = [(place, each) for place, each in enumerate(everything) if self._is_tree(each.info)]
        if trees and not self._faults:
            for place, each in self._with_state(trees, tensors):
                tensors.insert(place, each)
        faults: list[Fault] = [(set(), text) for text in self._faults]
        raise_faults(f"{self._path} does not fit {self._url}", faults, hint=f"ckptkit inspect {quote(self._url)}")
        return tensors

    def _is_tree(self, info: TensorInfo) -> bool:
        return bool(self._trees) and is_tree(info.name)

    def _with_state(self, trees: list[tuple[int, Mapped]], tensors: list[Mapped]) -> list[tuple[int, Mapped]]:
        """Return the trees of a PyTorch program's state as they are after the rules."""
        becomes: dict[str, list[str]] = {name: [] for name in self._root.tensors if not is_tree(name)}
        for tensor in tensors:
            for name in dict.fromkeys(part.source.name for part in tensor.ranges):
                becomes[name].append(tensor.info.name)
        after = MappedTrees(self._metadata[METADATA], self._trees, becomes)
        self._faults += after.faults
        self._metadata[METADATA] = after.described
        placed = []
        for place, tensor in trees:
            rank = int(tensor.info.name.removeprefix(STATE_NAME))
            if after.trees[rank] != self._trees[rank]:
                text = json.dumps(after.trees[rank], separators=(",", ":")).encode()
                tensor = Mapped(replace(tensor.info, shape=(len(text),)), (), fill=text)
            placed.append((place, tensor))
        return placed

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
        present = set[str]()
        for tensor in tensors:
            info, stage = tensor.info, tensor.info.placement.stage
            words = pattern.words_of(info.name)
            if words is not None and not words[LAYER].isdecimal():
                words = None
            if words is None or str(stage) not in (words[LAYER], "first", "last"):
                if not isinstance(stage, str):
                    self._faults.append(f"{info.name} is of layer {stage}, its name does not say so to '{pattern}'")
                yield tensor
                continue
            present.add(words[LAYER])
            for layer in (number for number, source in enumerate(order) if str(source) == words[LAYER]):
                placement = info.placement if isinstance(stage, str) else replace(info.placement, stage=layer)
                renamed = pattern.filled(words | {LAYER: str(layer)})
                yield replace(tensor, info=replace(info, name=renamed, placement=placement), layer=layer)
        missing = sorted({source for source in order if str(source) not in present})
        self._faults += [f"layers.order has {source}, a layer without tensors" for source in missing]

    def _split(self, tensors: list[Mapped]) -> list[Mapped]:
        """Return the tensors with parts in the places of those that are split."""
        for rule in self.rules.split:
            names, parted = set(self._matched("split", rule.tensors, tensors)), list[Mapped]()
            for tensor in tensors:
                if tensor.info.name not in names:
                    parted.append(tensor)
                elif fault := why_not_split(tensor.info, rule):
                    self._faults.append(f"split '{rule.tensors}': {shown(tensor.info)} {fault}")
                else:
                    parted += parts_of(tensor, rule)
            tensors = parted
        return tensors

    def _fused(self, tensors: list[Mapped]) -> list[Mapped]:
        """Return the tensors with a whole in the place of its first part, for each set of parts that is fused."""
        for rule in self.rules.fuse:
            parts_by_name: dict[str, list[tuple[NamePattern, Mapped]]] = {}
            for pattern in rule.tensors:
                names = set(self._matched("fuse", pattern, tensors))
                for tensor in (tensor for tensor in tensors if tensor.info.name in names):
                    words = pattern.words_of(tensor.info.name) or {}
                    parts_by_name.setdefault(rule.to.filled(words), []).append((pattern, tensor))
            becomes: dict[str, Mapped | None] = {}
            for name, matches in parts_by_name.items():
                patterns, parts = zip(*matches, strict=True)
                fault = why_not_fused(parts, rule) if patterns == rule.tensors else "each part is wanted once"
                if not becomes.keys().isdisjoint(tensor.info.name for tensor in parts):
                    fault = "a part of it is one of another"
                if fault:
                    listed = ", ".join(shown(tensor.info) for tensor in parts)
                    self._faults.append(f"fuse '{rule.to}': {name} cannot be made of {listed}: {fault}")
                else:
                    becomes |= {tensor.info.name: None for tensor in parts}
                    becomes[parts[0].info.name] = fused(name, parts, rule.groups)
            made = (becomes.get(tensor.info.name, tensor) for tensor in tensors)
            tensors = [tensor for tensor in made if tensor is not None]
        return tensors

    def _renamed(self, tensors: list[Mapped]) -> list[Mapped]:
        """Return the tensors under their new names; no two rules may match one, no two tensors have one name."""
        names: dict[str, list[NamePattern]] = {}
        renamed = [tensor.info.name for tensor in tensors]
        for rule in self.rules.rename:
            self._matched("rename", rule.tensors, tensors)
            for place, tensor in enumerate(tensors):
                words = rule.tensors.words_of(tensor.info.name)
                if words is not None:
                    names.setdefault(tensor.info.name, []).append(rule.tensors)
                    renamed[place] = rule.to.filled(words)
        for name, rules in names.items():
            if rules[1:]:
                self._faults.append(f"{name} is matched by rename '{rules[0]}' and by rename '{rules[1]}'")
        by_name: dict[str, Mapped] = {}
        for name, tensor in zip(renamed, tensors, strict=True):
            if name in by_name:
                self._faults.append(f"{name} would be made of {by_name[name].made_of} and of {tensor.made_of}")
            by_name.setdefault(name, replace(tensor, info=replace(tensor.info, name=name)))
        return list(by_name.values())

    def _retied(self, tensors: list[Mapped]) -> list[Mapped]:
        """Return the tensors, each tied one to the name that its holder has now; a fault if that is not there."""
        holders: dict[tuple[str, int | None], str] = {}
        for tensor in tensors:
            for layer in (tensor.layer, None):
                holders.setdefault((tensor.made_of, layer), tensor.info.name)
        retied = []
        for tensor in tensors:
            if (tied_to := tensor.info.placement.tied_to) is not None:
                holder = holders.get((tied_to, tensor.layer)) or holders.get((tied_to, None))
                if holder is None:
                    why = f"it is tied to {tied_to}, which is gone or in parts"
                    self._faults.append(f"{tensor.info.name} has no source: {why}")
                placement = replace(tensor.info.placement, tied_to=holder or tied_to)
                tensor = replace(tensor, info=replace(tensor.info, placement=placement))
            retied.append(tensor)
        return retied

    def _grown(self, tensors: list[Mapped]) -> list[Mapped]:
        """Return the tensors with their new rows; tied ones have the shape of their holder."""
        grown = {tensor.info.name: tensor for tensor in tensors}
        for rule in self.rules.grow:
            for name in self._matched("grow", rule.tensors, tensors):
                info = grown[name].info
                if fault := why_not_grown(grown[name], rule):
                    self._faults.append(f"grow '{rule.tensors}': {shown(info)} {fault}")
                elif info.placement.tied_to is None:
                    info = replace(info, shape=(rule.rows, *info.shape[1:]))
                    grown[name] = replace(grown[name], info=info, fill=rule.fill)
        for name, tensor in grown.items():
            holder = grown.get(tensor.info.placement.tied_to or "")
            if holder is not None:
                grown[name] = replace(tensor, info=replace(tensor.info, shape=holder.info.shape))
        return list(grown.values())

    def _report(self) -> MapReport:
        before = {name for name, info in self._root.tensors.items() if not self._is_tree(info)}
        after = {each.info.name: each for each in self.tensors if not self._is_tree(each.info)}
        sources = {part.source.name for each in self.tensors for part in each.ranges}
        changed = [name for name, each in after.items() if name in before and not each.is_same]
        new = {name: each.made_of for name, each in after.items() if name not in before}
        return MapReport(
            tuple(self._counts), new, tuple(changed), tuple(name for name in before if name not in sources),
            len(after) - len(new) - len(changed),
        )  # fmt: skip


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
