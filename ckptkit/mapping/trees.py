"""Mapped trees: the record of a PyTorch program's state, brought after the tensors that a mapping moves. Pure.

A tensor `model/old.weight` is the value of the key `old.weight` in the dict `model`. If a mapping makes `new.weight` of
it, the key follows, with what is beside it: numbers of an optimizer's state go where its tensors go, and the names in
its groups are those of its states, or of the parameters if it has none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.format.state_tree import Node, Tree, base_of, fields, items_of, key_of, merged, part

Path = tuple[str, ...]  # the parts of a path
NO_PLACE = "the recorded state has no place for it"


@dataclass(frozen=True, slots=True)
class _Move:
    """A tensor's path and one that it gets; None if it is left out there."""

    old: Path
    new: Path | None


class MappedTrees:
    """The trees and their description after a mapping: `trees`, `described`; `faults` say what no tree can hold.

    `becomes` are the names that are made of each tensor, by its old name.
    """

    def __init__(
        self, described: Mapping[str, Any], trees: Mapping[int, Tree], becomes: Mapping[str, list[str]]
    ) -> None:
        self.faults: list[str] = []
        self._own, self._varied = set(described["own"]), set(described["owners"])
        by_owner: dict[int | None, list[_Move]] = {}
        for name, names in becomes.items():
            for owner, move in [self._move(name, new) for new in names] or [self._move(name, None)]:
                by_owner.setdefault(owner, []).append(move)
        self._parameters = _parameters(by_owner.get(None, []))
        self.trees = {
            rank: self._tree(tree, [*by_owner.get(None, ()), *by_owner.get(rank, ())]) for rank, tree in trees.items()
        }
        present = dict.fromkeys(key for tree in self.trees.values() for key in tree)
        keys = [key for key in described["keys"] if key in present]
        self.described = {
            **described, "keys": [*keys, *(key for key in present if key not in described["keys"])],
            "owners": {key: ranks for key, ranks in described["owners"].items() if key in present},
            "own": [key for key in described["own"] if key in present],
        }  # fmt: skip
        self._check({name for names in becomes.values() for name in names})

    def _move(self, name: str, new: str | None) -> tuple[int | None, _Move]:
        """Return whose tree has a tensor, None for all, and how its path changes; a fault if it leaves that tree."""
        owner, old = self._parted(name)
        other, path = (owner, None) if new is None else self._parted(new)
        if path is not None and (other != owner or (old[0] != path[0] and {old[0], path[0]} & self._varied)):
            self.faults.append(f"{new}, made of {name}: each rank has its own {old[0]}, which keeps its key")
            path = None
        return owner, _Move(old, path)

    def _parted(self, name: str) -> tuple[int | None, Path]:
        """Return the rank that a tensor is of, None if of all, and the parts of its path."""
        first, *rest = name.split("/")
        if first in self._own and rest and rest[0].startswith("@"):
            return int(rest[0][1:]), (first, *rest[1:])
        return None, (first, *rest)

    def _tree(self, tree: Tree, moves: list[_Move]) -> Tree:
        root: Node = {"dict": [[key, node] for key, node in tree.items()]}
        tensors = dict(_tensors((), root))
        moves = [move for move in moves if move.old in tensors]
        in_place = [move for move in moves if move.new is None or len(move.new) == len(move.old)]
        elsewhere = [move for move in moves if move.new is not None and len(move.new) != len(move.old)]
        edited = self._edited(root, 0, [*in_place, *(_Move(move.old, None) for move in elsewhere)])
        root = edited if edited is not None else {"dict": []}
        for move in elsewhere:
            self._insert(root, move.new or (), tensors[move.old])
        tree_after = fields(root) or {}
        self.faults += [f"{key!r} is not the name of a key of a state" for key in tree_after if type(key) is not str]
        return tree_after

    def _edited(self, node: Node, depth: int, moves: list[_Move]) -> Node | None:
        """Return a tree with its tensors moved, None if nothing is left; moves are those of the tensors in it."""
        its = fields(node)
        if its is not None:
            groups = its["param_groups"] if its.keys() == {"state", "param_groups"} else None
            is_optimizer = isinstance(groups, dict) and "groups" in groups
            found = self._optimizer(its, depth, moves) if is_optimizer else self._dict(its, depth, moves)
            return {"dict": [[key, each] for key, each in found.items()]} if found or not its else None
        if (items := items_of(node)) is not None and moves:
            return self._list(node, items, depth, moves)
        return node if all(each.new is not None for each in moves) else None

    def _dict(
        self, its: dict[Any, Node], depth: int, moves: list[_Move],
        renamed: Callable[[Any], list[Any]] = lambda key: [key],
    ) -> dict[Any, Node]:  # fmt: skip
        """Return the items of a dict; `renamed` returns the keys that one without tensors gets."""
        items: dict[Any, Node] = {}
        by_key: dict[str, list[_Move]] = {}
        for move in moves:
            by_key.setdefault(move.old[depth], []).append(move)
        for key, node in its.items():
            inside = by_key.get(part(key), [])
            targets = dict.fromkeys(move.new[depth] for move in inside if move.new is not None)
            made = [(self._key(text), _at(inside, depth, text)) for text in targets]
            for name, some in made or [(name, inside) for name in renamed(key)]:
                edited = self._edited(node, depth + 1, some)
                if edited is None and node is not None:
                    continue
                items[name] = merged("", [items[name], edited], []) if name in items else edited
        return items

    def _list(self, node: Node, items: list[Node], depth: int, moves: list[_Move]) -> Node | None:
        """Return a list with what its items became; None if all its tensors are gone, a fault if one is elsewhere."""
        if all(move.new is None for move in moves):
            return None
        edited_items = []
        for number, item in enumerate(items):
            inside = [move for move in moves if move.old[depth] == f"#{number}"]
            if any(move.new is not None and move.new[depth] != f"#{number}" for move in inside):
                self.faults.append(f"{'/'.join(inside[0].old)} is an item of a list, which keeps its place")
            edited = self._edited(item, depth + 1, inside)
            if edited is None and item is not None:
                self.faults.append(f"{'/'.join(inside[0].old)} is an item of a list, which is dropped whole or not")
            edited_items.append(edited)
        return {"tuple": edited_items} if isinstance(node, dict) else edited_items

    def _optimizer(self, its: dict[Any, Node], depth: int, moves: list[_Move]) -> dict[Any, Node]:
        """Return the state and groups of an optimizer."""
        inside = [each for each in moves if each.old[depth] == "state"]
        names: dict[str, dict[str, set[Path]]] = {}  # by old name, by new name: the parts of the state that go there
        parts: dict[str, set[Path]] = {}  # by old name: all parts that are tensors
        for each in inside:
            parts.setdefault(each.old[depth + 1], set()).add(each.old[depth + 2 :])
            if each.new is not None:
                here = names.setdefault(each.old[depth + 1], {})
                here.setdefault(each.new[depth + 1], set()).add(each.old[depth + 2 :])
        for name, targets in names.items():
            if any(gone != parts[name] for gone in targets.values()):
                ways = [*targets.items(), ("no name", parts[name].difference(*targets.values()))]
                shown = "; ".join(f"{', '.join(sorted(map('/'.join, some)))} to {new}" for new, some in ways if some)
                self.faults.append(f"{'/'.join(inside[0].old[: depth + 1])}/{name} does not go as one: {shown}; "
                                   "let the rule match all of it: '{kind*}NAME{rest*}'")  # fmt: skip

        def renamed(key: Any) -> list[Any]:
            new = names.get(part(key))
            return self._parameters.get(key, [key]) if new is None else list(map(self._key, new))

        states = {key: each for key, each in (fields(its["state"]) or {}).items()
                  if part(key) in names or part(key) not in parts}  # fmt: skip
        groups = []
        for members, options in its["param_groups"]["groups"]:
            kept = [new for name in members for new in renamed(name)]
            first = part(members[0] if members else "")
            of_options = [e for e in moves if e.old[depth] == "param_groups" and e.old[depth + 1] == first]
            edited = self._edited(options, depth + 2, of_options)
            if kept or not members:
                groups.append([kept, {"dict": []} if edited is None else edited])
        state = self._dict(states, depth + 1, inside, renamed)
        return {"state": {"dict": [[key, each] for key, each in state.items()]}, "param_groups": {"groups": groups}}

    def _insert(self, root: Node, path: Path, leaf: Node) -> None:
        """Put a tensor at a path, with the dicts that lead to it."""
        node = root
        for text in path[:-1]:
            key, items = self._key(text), fields(node)
            if items is None:
                break
            if key not in items:
                node["dict"].append([key, {"dict": []}])
            node = (fields(node) or {})[key]
        items = fields(node)
        if items is None or "param_groups" in items:
            self.faults.append(f"{'/'.join(path)}: {NO_PLACE}")
        elif (key := self._key(path[-1])) not in items:
            node["dict"].append([key, leaf])

    def _key(self, text: str) -> Any:
        try:
            return key_of(text)
        except ValueError:
            self.faults.append(
                f"{text!r} is not a part of a name: '%' is '%25', '#' and '@' in front are '%23' and '%40'"
            )
            return text

    def _check(self, names: set[str]) -> None:
        """Add faults if trees and tensors are not of the same names."""
        held_names: set[str] = set()
        for rank, tree in self.trees.items():
            for key, node in tree.items():
                base = base_of(key, rank if key in self._own else None)
                held_names |= {"/".join((base, *path)) for path, _ in _tensors((), node)}
        if not self.faults:
            self.faults += [f"{name}: {NO_PLACE}" for name in sorted(names - held_names)]
            self.faults += [
                f"{name}: the recorded state needs it, and no rule makes it" for name in sorted(held_names - names)
            ]


def _at(moves: Iterable[_Move], depth: int, text: str) -> list[_Move]:
    """Return moves as one target of several sees them: what goes to another is left out."""
    here = [each for each in moves if each.new is not None and each.new[depth] == text]
    there = {each.old for each in here}
    return here + [_Move(old, None) for old in dict.fromkeys(each.old for each in moves) if old not in there]


def _tensors(path: Path, node: Node) -> Iterator[tuple[Path, Node]]:
    """Yield the tensors and arrays of a tree, with their paths."""
    inner: dict[str, Node] = {}
    match node:
        case {"tensor": _} | {"array": _}:
            yield path, node
        case list(items) | {"tuple": items}:
            inner = {f"#{number}": item for number, item in enumerate(items)}
        case {"groups": groups}:
            inner = {part(names[0] if names else ""): options for names, options in groups}
        case {"dict": pairs}:
            inner = {part(key): item for key, item in pairs}
    for text, item in inner.items():
        yield from _tensors((*path, text), item)


def _parameters(moves: Iterable[_Move]) -> dict[str, list[str]]:
    """Return the names that parameters get, by their names in an optimizer: of a module, or of all modules."""
    new_names: dict[str, tuple[Path, dict[str, None]]] = {}
    for move in moves:
        for name, new in ((move.old[-1:], (move.new or ())[-1:]), (move.old, move.new or ())):
            of, names = new_names.setdefault(".".join(name), (move.old, {}))
            if of == move.old and new:
                names[".".join(new)] = None
    return {name: list(names) for name, (_, names) in new_names.items()}
