"""Tree: what a PyTorch program keeps beside its tensors, as JSON that keeps types, order and keys; no torch.

None, booleans, numbers, strings and lists are JSON as they are. All else is an object of one tag: `dict` (of pairs, so
that the key 3 stays an int), `tuple`, `groups` (of an optimizer), `bytes`, `complex`, `scalar` (of numpy). What is
stored beside the tree, under its path, is `tensor` or `array`. A path joins keys by "/": loader/workers/#0/seed.

A root's metadata has the keys of a state under `torch_state`. The trees that rank 3 wrote, by key, are JSON in the
tensor of bytes `@state/@3`.
"""

import base64
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import numpy as np

from threefold.errors import UserError

METADATA, STATE_NAME, VERSION = "torch_state", "@state/@", 1
Node = Any  # JSON
Tree = dict[str, Node]  # what one rank wrote, by key of the state
Arrays = dict[str, Any]  # tensors and arrays by path
MAX_INT_BITS = 14_284  # of 4,300 digits, the most that Python reads as an int by default
KEYS = (str, int, float, bool, type(None))
HINTS = {
    "set": "a set has no order: pass sorted(...) of it",
    "frozenset": "a set has no order: pass sorted(...) of it",
    "function": "leave it out, or save what it is made of",
    "builtin_function_or_method": "leave it out, or save what it is made of",
    "method": "leave it out, or save what it is made of",
    "BytesIO": "pass its getvalue()",
    "Generator": "pass its get_state() or bit_generator.state",
    "PosixPath": "pass str(path)",
    "DataLoader": "pass what has state_dict(), such as torchdata's StatefulDataLoader or datakit.torch.StreamDataset",
    "device": "pass str(device)",
    "dtype": "pass str(dtype)",
}
ANY_HINT = "pass numbers, strings, lists, dicts and tensors, or an object with state_dict() and load_state_dict()"


def part(key: object) -> str:
    """Return a key as a part of a path: text as it is, but for "/" and "%"; another key as # and JSON."""
    if type(key) is not str:
        return f"#{json.dumps(key)}"
    text = key.replace("%", "%25").replace("/", "%2F")
    return f"%{ord(text[0]):02X}{text[1:]}" if text[:1] in ("#", "@") else text


def key_of(text: str) -> Any:
    """Return the key that a part of a path is; ValueError if it is none."""
    key = json.loads(text[1:]) if text[:1] == "#" else unquote(text)
    if part(key) != text:
        raise ValueError(f"{text!r} is not a part of a path")
    return key


def base_of(key: str, owner: int | None) -> str:
    """Return what the names of a key's tensors begin with; `owner` is the rank that they are of, None for all."""
    return part(key) if owner is None else f"{part(key)}/@{owner}"


class Encoder:
    """Encodes values; collects tensors and arrays by path.

    `dtype_of` returns torch's name of a tensor's dtype, None for anything else. `expand` replaces objects that it knows
    by what they hold.
    """

    def __init__(
        self,
        dtype_of: Callable[[Any], str | None],
        expand: Callable[[str, Any], tuple[bool, Any]] = lambda path, value: (False, None),
    ) -> None:
        self.arrays: Arrays = {}
        self._dtype_of, self._expand = dtype_of, expand

    def node(self, path: str, value: Any) -> Node:
        """Return the tree of a value; UserError names the path of what cannot be stored."""
        kind = type(value)
        if kind is int:
            _check_int(path, value)
        if value is None or kind in (bool, int, float, str):
            return value
        if (dtype := self._dtype_of(value)) is not None:
            self.arrays[path] = value
            return {"tensor": dtype}
        was_known, found = self._expand(path, value)
        if was_known:
            return self.node(path, found)
        if kind is list:
            return self._items(path, value)
        if kind is tuple or (kind.__module__, kind.__qualname__) == ("torch", "Size"):
            return {"tuple": self._items(path, value)}
        if isinstance(value, dict):
            return self._dict(path, value)
        if isinstance(value, bytes | bytearray):
            return {"bytes": base64.b64encode(value).decode()}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if _is_plain_array(value):
            if isinstance(value, np.generic):
                return {"scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
            self.arrays[path] = value
            return {"array": value.dtype.str}
        raise self._refusal(path, value)

    def _items(self, path: str, values: Any) -> list[Node]:
        return [self.node(f"{path}/#{number}", value) for number, value in enumerate(values)]

    def _dict(self, path: str, value: dict[Any, Any]) -> Node:
        pairs = []
        groups = groups_of(value)
        for key, item in value.items():
            if type(key) not in KEYS:
                text = f"{path} has the key {key!r} of type {type(key).__name__}"
                raise UserError(text, hint="let keys be strings or numbers")
            if type(key) is int:
                _check_int(f"a key of {path}", key)
            if groups is not None and key == "param_groups":
                node: Node = {"groups": [self._group(f"{path}/param_groups", group) for group in groups]}
            else:
                node = self.node(f"{path}/{part(key)}", item)
            pairs.append([key, node])
        return {"dict": pairs}

    def _group(self, path: str, group: dict[str, Any]) -> list[Node]:
        names = list(group["params"])
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        return [names, self._dict(f"{path}/{part(names[0] if names else '')}", options)]

    def _refusal(self, path: str, value: Any) -> UserError:
        kind = type(value)
        hint = HINTS.get(kind.__name__, ANY_HINT)
        match value:
            case tuple():
                hint = "pass tuple(...) of it, or its _asdict()"
            case int() | float() | str():
                hint = f"pass it as a plain {next(b.__name__ for b in (int, float, str) if isinstance(value, b))}"
            case _ if hasattr(kind, "__dataclass_fields__"):
                hint = "pass dataclasses.asdict(...) of it"
            case np.ma.MaskedArray():
                hint = "pass its data and its mask as two arrays"
            case object(dtype=_):
                hint = "an array of objects or of fields is not stored: pass its columns, or a list"
        return UserError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint holds", hint=hint)


def _check_int(what: str, value: int) -> None:
    if value.bit_length() > MAX_INT_BITS:
        text = f"{what} is an int of {value.bit_length():,} bits, a checkpoint holds {MAX_INT_BITS:,}"
        raise UserError(text, hint="pass it as text, hex(value), or as an array of its digits")


def _is_plain_array(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.ma.MaskedArray)
    return is_array and not value.dtype.hasobject and value.dtype.names is None


def groups_of(value: dict[Any, Any]) -> list[dict[str, Any]] | None:
    """Return the parameter groups of a dict that is an optimizer's state, else None."""
    groups = value.get("param_groups")
    if value.keys() != {"state", "param_groups"} or type(groups) is not list:
        return None
    named = (isinstance(group, dict) and {*map(type, group.get("params", [0.0]))} <= {str, int} for group in groups)
    return groups if all(named) else None


def decoded(path: str, node: Node, array: Callable[[str, Node], Any]) -> Any:
    """Return the value of a tree; `array` returns what is stored under a path."""
    if isinstance(node, list):
        return [decoded(f"{path}/#{number}", each, array) for number, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    [(tag, body)] = node.items()
    match tag:
        case "dict":
            return {key: decoded(f"{path}/{part(key)}", item, array) for key, item in body}
        case "tuple":
            return tuple(decoded(path, body, array))
        case "groups":
            return [
                {**decoded(f"{path}/{part(names[0] if names else '')}", options, array), "params": list(names)}
                for names, options in body
            ]
        case "bytes":
            return base64.b64decode(body)
        case "complex":
            return complex(*body)
        case "scalar":
            dtype = np.dtype(body[0])
            return np.frombuffer(base64.b64decode(body[1]), dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]
        case _:
            return array(path, node)


def resolved(value: Any) -> Any:
    """Return a decoded value with what its functions make in their places."""
    if isinstance(value, dict):
        return {key: resolved(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(resolved(each) for each in value)
    return value() if callable(value) else value


def fields(node: Node) -> dict[Any, Node] | None:
    """Return the items of a tree that is a dict, else None."""
    return dict(map(tuple, node["dict"])) if isinstance(node, dict) and "dict" in node else None


def items_of(node: Node) -> list[Node] | None:
    """Return the items of a tree that is a list or tuple, else None."""
    if isinstance(node, dict):
        node = node.get("tuple")
    return node if isinstance(node, list) else None


def leaves(path: str, node: Node) -> list[str]:
    """Return the paths at which a tree has values, dicts alone opened."""
    items = fields(node)
    if items is None:
        return [path]
    return [leaf for key, item in items.items() for leaf in leaves(f"{path}/{part(key)}", item)]


def merged(path: str, nodes: list[Node], conflicts: list[str]) -> Node:
    """Return the union of trees of several ranks: of a value that they do not agree on the first one's.

    The paths of those are added to `conflicts`.
    """
    first, *others = nodes
    if all(each == first for each in others):
        return first
    opened = [fields(each) for each in nodes]
    dicts = [each for each in opened if each is not None]
    if len(dicts) == len(nodes):
        keys = dict.fromkeys((type(key), key) for each in dicts for key in each)
        return {
            "dict": [
                [key, merged(f"{path}/{part(key)}", [each[key] for each in dicts if key in each], conflicts)]
                for _, key in keys
            ]
        }
    if all(isinstance(each, dict) and "groups" in each for each in nodes):
        found = {json.dumps(names): [names, options] for each in reversed(nodes) for names, options in each["groups"]}
        return {"groups": list(reversed(found.values()))}
    conflicts.append(path)
    return first
