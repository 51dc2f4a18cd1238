"""Loading: match a program's state with a saved one, path by path, then fill it in place.

All is compared first, and refused in one report before anything of the program changes: `Match` notes which memory is
filled from which tensor, and what is to be done once it is.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckptkit.format.state_tree import Node, decoded, fields, items_of, leaves, part, resolved
from ckptkit.io.torch_tensors import NAMES, STORED
from ckptkit.model.mesh_cut import MeshPart
from ckptkit.model.tensor import Box, Piece
from ckptkit.torch.state.boxes import (
    HeldParts,
    as_stored,
    held_of,
    inner_tensors,
    local_of,
    name_of,
    region,
    stored_dtype,
)
from ckptkit.torch.state.capture import shown_tensors
from ckptkit.torch.state.objects import (
    RNG,
    ParameterNames,
    extra_state_owner,
    give_state,
    holds_objects,
    is_of_kind,
    is_stateful,
    made_on_request,
    module_state,
    probed_state,
    set_rng_state,
)
from ckptkit.torch.state.saved import SavedKey, SavedKeys, Tie
from ckptkit.torch.state.shards import shard_like, whole_shape

TORCH_DTYPES = {stored: getattr(torch, name) for stored, name in NAMES.items()}
OTHER_KIND = "another kind of optimizer in the checkpoint"


class Match:
    """What one rank of a load fills: `pieces`, then `finish`. `missing`, `faults` and `wanted` are paths.

    `wanted` is what the program asked for, among it what the checkpoint lacks.
    """

    def __init__(self, saved: SavedKeys, state: Mapping[str, Any]) -> None:
        self.pieces: list[Piece] = []
        self.missing: list[str] = []
        self.faults: list[str] = []
        self.wanted: set[str] = set()
        self.held_back: list[str] = []  # of other ranks alone: an error unless the load is not strict
        self.lacks_rng = False
        self._saved, self._names = saved, ParameterNames(state)
        self._state: Any = state
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._after: list[Callable[[], object]] = []
        self._filled: dict[object, tuple[str, str]] = {}  # by memory: the path and name that it is filled from
        self.ties, self.untied = list[Tie](), list[str]()  # of one tensor here; those that differ in the checkpoint
        self.available: set[str] = set()  # what the checkpoint has under the keys that are asked for
        for key, target in state.items():
            saved_key = saved.key(key)
            if key == RNG:
                self._match_rng(saved_key)
            elif saved_key is None:
                self.missing.append(part(key))
            else:
                self._match_key(key, target, saved_key)

    def finish(self) -> None:
        """Bring what was read to where it belongs, once all pieces are filled."""
        with torch.no_grad():
            for live, read in self._copies:
                live.copy_(read)
            for act in self._after:
                act()

    def _match_key(self, key: str, target: Any, saved_key: SavedKey) -> None:
        self._base, self._path = saved_key.base, (path := part(key))
        if saved_key.fault:
            self.held_back.append(saved_key.fault)
        self.available.update(leaves(path, saved_key.node))
        self._put(path, self._state, key, saved_key.node, target)

    def _match_rng(self, saved_key: SavedKey | None) -> None:
        self.lacks_rng = saved_key is None
        if saved_key is not None:
            self._base, self._path = saved_key.base, RNG
            self._then(set_rng_state, decoded(RNG, saved_key.node, self._new))

    def _fill(self, path: str, target: Any, node: Node) -> Any:
        """Return the target if it is filled in place, else a function that makes what takes its place."""
        match target:
            case torch.Tensor():
                self._fill_tensor(path, target, node)
            case nn.Module():
                self._fill_module(path, target, node)
            case Optimizer():
                self._fill_optimizer(path, target, node)
            case _ if is_stateful(target):
                self._fill_stateful(path, target, node)
            case dict() if target:
                self._fill_dict(path, target, node)
            case list() | tuple() if (items := items_of(node)) is not None and holds_objects(target):
                return self._fill_items(path, target, items)
            case _:
                self.wanted |= {path, *leaves(path, node)}
                value = decoded(path, node, self._new)
                return lambda: resolved(value)
        return target

    def _fill_items(self, path: str, target: Any, nodes: list[Node]) -> Any:
        """Fill a list in place, and what a tuple holds; return a function that makes the tuple if it has values."""
        if len(target) != len(nodes):
            self.faults.append(f"{path}: {len(nodes)} items in the checkpoint, {len(target)} here")
        self.wanted.add(path)
        filled = {n: self._fill(f"{path}/#{n}", *pair) for n, pair in enumerate(zip(target, nodes, strict=False))}
        values = {number: value for number, value in filled.items() if value is not target[number]}
        if isinstance(target, tuple):
            return partial(_tuple_with, target, values) if values else target
        for number, value in values.items():
            self._then(partial(target.__setitem__, number), value)
        return target

    def _then(self, act: Callable[[Any], object], value: Any) -> None:
        """Call something with a value once the value's tensors are read."""
        self._after.append(lambda: act(resolved(value)))

    def _put(self, path: str, parent: Any, key: Any, node: Node, target: Any) -> None:
        value = self._fill(path, target, node)
        if value is not target:
            self._then(partial(parent.__setitem__, key), value)

    def _fill_dict(self, path: str, target: dict[Any, Any], node: Node) -> None:
        items = fields(node)
        if items is None:
            self.faults.append(f"{path}: not a dict in the checkpoint")
            return
        for key, each in target.items():
            inner = f"{path}/{part(key)}"
            if key in items:
                self._put(inner, target, key, items[key], each)
            else:
                self.missing.append(inner)

    def _fill_module(self, path: str, module: nn.Module, node: Node) -> None:
        items = fields(node) or {}
        live = module_state(path, module)
        computed = made_on_request(path, module, live)
        to_load: dict[str, Any] = {}
        for name, current in live.items():
            inner = f"{path}/{part(name)}"
            if name not in items:
                self.missing.append(inner)
                continue
            owner = extra_state_owner(module, name)
            if isinstance(current, torch.Tensor) and (owner is None or self._fits(inner, current, items[name])):
                self._fill_tensor(inner, current, items[name])
                value = current
            else:
                self.wanted |= {inner, *leaves(inner, items[name])}
                value = decoded(inner, items[name], self._new)
            if owner is not None:
                self._then(owner.set_extra_state, value)
            else:
                to_load[name] = value
        if computed & to_load.keys():  # filling what a state_dict made does not change the module
            self._then(partial(give_state, path, module), to_load)

    def _fill_optimizer(self, path: str, optimizer: Optimizer, node: Node) -> None:
        items = fields(node) or {}
        states = fields(items.get("state")) or {}
        groups = items.get("param_groups")
        saved_groups = groups["groups"] if isinstance(groups, dict) and "groups" in groups else []
        group_of = {name: number for number, (members, _) in enumerate(saved_groups) for name in members}
        names: dict[int, Any] = self._names.of(path, optimizer)
        if group_of and all(type(name) is int for name in group_of):  # of a plain state_dict: by place
            names = {id(each): n for n, each in enumerate(e for g in optimizer.param_groups for e in g["params"])}
        self.wanted.add(f"{path}/param_groups")
        for group in optimizer.param_groups:
            own = [names[id(each)] for each in group["params"]]
            absent = [name for name in own if name not in group_of]
            self.missing += [f"{path}/state/{part(name)}" for name in absent]
            found = {group_of[name] for name in own if name in group_of}
            if len(found) > 1:
                self.faults.append(f"{path}: {own[0]} and others of its group were in {len(found)} groups")
            if found and not absent:
                members, options = saved_groups[found.pop()]
                inner = f"{path}/param_groups/{part(members[0])}"
                if not is_of_kind(optimizer, fields(options) or {}):
                    kept = [f"/{part(key)}" for key in fields(states.get(own[0])) or {} if key != "step"][:1]
                    what = f"{path}/state/{part(own[0])}{''.join(kept)}"
                    self.faults.append(f"{what}: {type(optimizer).__name__} here, {OTHER_KIND}")
                    continue
                self._fill_options(inner, group, options)
            for name, parameter in zip(own, group["params"], strict=True):
                if name in group_of:
                    self._fill_state(f"{path}/state/{part(name)}", optimizer, group, parameter, states.get(name))
        for key, each in states.items() if group_of else ():
            if key not in group_of:  # of no parameter
                inner = f"{path}/state/{part(key)}"
                self.wanted |= set(leaves(inner, each))
                self._then(partial(optimizer.state.__setitem__, key), decoded(inner, each, self._new))

    def _fill_options(self, path: str, group: dict[str, Any], node: Node) -> None:
        for key, each in (fields(node) or {}).items():
            inner, live = f"{path}/{part(key)}", group.get(key)
            if isinstance(live, torch.Tensor) and isinstance(each, dict) and "tensor" in each:
                self._fill_tensor(inner, live, each)
            else:
                self._then(partial(group.__setitem__, key), decoded(inner, each, self._new))

    def _fill_state(
        self, path: str, optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, node: Node
    ) -> None:
        """Fill the state of one parameter; make what it does not have yet, drop what the checkpoint has not."""
        live = optimizer.state.get(parameter) or {}
        self.wanted |= set(leaves(path, node)) if node is not None else set()
        if node is None:
            self._after.append(lambda: optimizer.state.pop(parameter, None))
            return
        on_device = bool(group.get("capturable") or group.get("fused"))
        state: dict[Any, Any] = {}
        if not live and any(fields(leaf) for leaf in (fields(node) or {}).values()):
            live = probed_state(optimizer, group, parameter)
        for key, leaf in (fields(node) or {}).items():
            inner, old = f"{path}/{part(key)}", live.get(key)
            if isinstance(leaf, dict) and "tensor" in leaf:
                shape = self._shape(inner, leaf["tensor"])
                dtype = getattr(torch, leaf["tensor"])
                if not isinstance(old, torch.Tensor) or old.dtype != dtype:
                    if shape == whole_shape(parameter):
                        old = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    else:
                        device = parameter.device if shape or on_device else torch.device("cpu")
                        old = torch.zeros(shape or (), dtype=dtype, device=device)
                self._fill_tensor(inner, shard_like(inner, old, parameter), leaf)
                state[key] = old
            elif isinstance(old, torch.Tensor) and inner_tensors(old) is not None:
                self._fill_tensor(inner, old, leaf)
                state[key] = old
            else:
                state[key] = decoded(inner, leaf, self._new)
        self._then(partial(optimizer.state.__setitem__, parameter), state)

    def _fill_stateful(self, path: str, target: Any, node: Node) -> None:
        """Have an object load its own state: in its own tensors where it shows some, else in new ones."""
        self.wanted |= {path, *leaves(path, node)}
        live = shown_tensors(path, target, node)

        def array(inner: str, leaf: Node) -> Any:
            tensor = live.get(inner)
            if tensor is None or not self._fits(inner, tensor, leaf):
                return self._new(inner, leaf)
            self._fill_tensor(inner, tensor, leaf)
            return tensor

        self._then(target.load_state_dict, decoded(path, node, array))

    def _name(self, path: str) -> str:
        return self._base + path[len(self._path) :]

    def _shape(self, path: str, dtype: str) -> tuple[int, ...] | None:
        info = self._saved.root.tensors.get(self._name(path))
        if info is None:
            return None
        return info.shape if dtype in STORED else info.shape[:-1]

    def _fits(self, path: str, tensor: torch.Tensor, node: Node) -> bool:
        dtype = node.get("tensor") if isinstance(node, dict) else None
        return dtype == name_of(tensor.dtype) and self._shape(path, str(dtype)) == whole_shape(tensor)

    def _fill_tensor(self, path: str, tensor: torch.Tensor, node: Node) -> None:
        """Note what of a tensor is here to be filled; one that is tied to another is filled once."""
        if (parts := inner_tensors(tensor)) is not None:
            self._fill_dict(path, parts, node)
            return
        self.wanted.add(path)
        if isinstance(node, dict) and "dict" in node:
            self.wanted.update(leaves(path, node))
        local = local_of(tensor)
        stored = held_of(path, tensor, local)
        strides = local.stride()
        if 0 in strides and any(size > 1 and not by for size, by in zip(local.shape, strides, strict=True)):
            self.faults.append(f"{path}: its elements here share memory, as those of an expanded tensor; clone() it")
            return
        if not self._fits(path, tensor, node):
            dtype = node.get("tensor") if isinstance(node, dict) else None
            shape = dtype and self._shape(path, dtype)
            found = "not a tensor" if shape is None else f"{dtype} {list(shape)}"
            wanted = f"{name_of(tensor.dtype)} {list(whole_shape(tensor))}"
            self.faults.append(f"{path}: {found} in the checkpoint, {wanted} here")
            return
        memory = (local.data_ptr(), strides, stored) if local.numel() else id(tensor)
        first, name = self._filled.setdefault(memory, (path, self._name(path)))
        if first == path:
            self._read(name, local, stored)
        else:
            self.ties.append(Tie((path, first), (name, self._name(path)), [each.box for each in stored.parts]))

    def _read(self, name: str, local: torch.Tensor, stored: HeldParts) -> None:
        for box_part in stored.parts:
            if stored_dtype(local.dtype) is not None:
                live = region(local, box_part)
                data = live if live.is_contiguous() else torch.empty_like(live, memory_format=torch.contiguous_format)
                if data is not live:
                    self._copies.append((live, data))
            else:
                shown = as_stored(torch.empty_like(local, memory_format=torch.contiguous_format))
                data = torch.empty_like(region(shown, box_part), memory_format=torch.contiguous_format)
                narrow = region(local.unsqueeze(-1), _but_last(box_part))
                self._copies.append((narrow, data.view(local.dtype)))
            self.pieces.append(Piece(name, box_part.box, 0, data.numel(), data))

    def _new(self, path: str, node: Node) -> Callable[[], Any]:
        """Return a function that makes the tensor or array that a path holds, once it is read."""
        name = self._name(path)
        info = self._saved.root.tensors[name]
        data = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="cpu")
        self.pieces.append(Piece.whole(name, Box((0,) * len(info.shape), info.shape), data.view(-1)))
        [(tag, dtype)] = node.items()
        if tag == "tensor":
            kind = getattr(torch, dtype)
            return lambda: data if data.dtype == kind else data.view(kind).squeeze(-1)
        kind = np.dtype(dtype)
        if kind.isnative and kind.name in STORED:
            return lambda: data.numpy()
        shape = info.shape[:-1]
        return lambda: np.frombuffer(data.numpy().tobytes(), kind, math.prod(shape)).reshape(shape).copy()


def _tuple_with(items: tuple[Any, ...], values: Mapping[int, Callable[[], Any]]) -> tuple[Any, ...]:
    return tuple(values[number]() if number in values else each for number, each in enumerate(items))


def _but_last(box_part: MeshPart) -> MeshPart:
    """Return a part of bytes as that of its elements, with a last dim of one."""
    box = Box((*box_part.box.offset[:-1], 0), (*box_part.box.shape[:-1], 1))
    return MeshPart(box, (*box_part.at[:-1], 0))
