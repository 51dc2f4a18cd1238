"""Capture: a program's state taken apart: a tree of values for each key, and the tensors by path; nothing is copied."""

import contextlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckptkit.format.state_tree import Encoder, Node, decoded, part
from ckptkit.io.blocks import xxh3_64
from ckptkit.io.torch_tensors import STORED
from ckptkit.torch.state.boxes import HeldParts, dtype_of, held_of, inner_tensors, is_cut, local_of
from ckptkit.torch.state.late import owned_by, swaps_weights, version_of
from ckptkit.torch.state.objects import (
    RNG,
    ParameterNames,
    is_stateful,
    module_state,
    optimizer_state,
    optimizers_in,
    rng_state,
)
from threefold.errors import UserError

SEEN_BYTES = 1 << 20  # a CPU tensor of a loader up to this size is compared between ranks


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor: the live one, its memory here, how it is stored.

    `is_equal`: all ranks that hold a part have the same values in it. `is_late`: it changes in steps of the state's
    optimizers alone. `same_as` is the path of an earlier tensor that is this one, "" for none, None where it cannot be
    seen.
    """

    tensor: torch.Tensor
    local: torch.Tensor
    stored: HeldParts
    is_equal: bool
    is_late: bool
    same_as: str | None


@dataclass(frozen=True, slots=True)
class Entry:
    """What is under one key of the state. `is_own`: each rank's may be another, as that of a data loader."""

    tree: bytes
    leaves: dict[str, Leaf]
    is_own: bool
    digest: str


@dataclass
class _SeenTensors:
    """The tensors of all keys that were seen so far, by object and by the address of their memory."""

    objects: dict[int, list[tuple[str, HeldParts]]] = field(default_factory=dict)
    memory: dict[int, list[tuple[str, HeldParts, torch.Tensor]]] = field(default_factory=dict)

    def same_as(self, path: str, tensor: torch.Tensor, local: torch.Tensor, stored: HeldParts) -> str | None:
        """Return the path of an earlier tensor that is this one, and note it."""
        seen = self.objects.setdefault(id(tensor), [])
        same = next((earlier for earlier, known in seen if known.shape == stored.shape), "")
        seen.append((path, stored))
        if not local.numel():
            return same or None
        there = self.memory.setdefault(local.data_ptr(), [])
        if there and not same:
            same = next((earlier for earlier, known, memory in there if _is_one(known, memory, local, stored)), "")
        there.append((path, stored, local))
        return same


def _is_one(known: HeldParts, memory: torch.Tensor, local: torch.Tensor, stored: HeldParts) -> bool:
    return known == stored and memory.stride() == local.stride() and memory.device == local.device


def check_keys(state: Any) -> None:
    """Raise UserError if a state is not a dict by names."""
    if not isinstance(state, Mapping) or not all(type(key) is str and key for key in state):
        raise UserError(
            f"a state is a dict of names, not {type(state).__name__}" if not isinstance(state, Mapping)
            else f"the names in a state are strings, not {next(k for k in state if type(k) is not str or not k)!r}",
            hint='pass {"model": model, "optimizer": optimizer}',
        )  # fmt: skip
    if RNG in state and state[RNG] is not True:
        raise UserError(f"state[{RNG!r}] is {state[RNG]!r}", hint='"rng": True keeps the random states of all ranks')


def capture(state: Mapping[str, Any]) -> dict[str, Entry]:
    """Return what each key of a state holds; UserError names the path of what no checkpoint can hold."""
    check_keys(state)
    try:
        names, seen, owned = ParameterNames(state), _SeenTensors(), owned_by(optimizers_in(state))
        return {key: _entry(key, value, names, seen, owned) for key, value in state.items()}
    except RecursionError:
        raise UserError("a state is nested too deep, or holds itself", hint="let no dict or list hold itself") from None


def _entry(key: str, value: Any, names: ParameterNames, seen: _SeenTensors, owned: Set[int]) -> Entry:
    optimizers: list[str] = []
    wrapped: list[str] = []  # their version counters are not raised
    late: list[str] = []  # paths that begin so are states of an optimizer's parameters

    def expand(path: str, item: Any) -> tuple[bool, Any]:
        if isinstance(item, nn.Module):
            return True, module_state(path, item)
        if isinstance(item, Optimizer):
            optimizers.append(f"{path}/")
            if not swaps_weights(item):
                late.append(f"{path}/state/")
            return True, optimizer_state(path, item, names.of(path, item))
        if (parts := inner_tensors(item)) is not None:
            wrapped.append(f"{path}/")
            return True, parts
        return (True, item.state_dict()) if is_stateful(item) else (False, None)

    is_rng = key == RNG
    is_own = is_rng or (is_stateful(value) and not isinstance(value, nn.Module | Optimizer))
    encoder = Encoder(dtype_of, expand)
    node: Node = encoder.node(part(key), rng_state() if is_rng else value)
    tree = json.dumps(node, separators=(",", ":")).encode()
    leaves, seen_bytes = {}, [tree]
    for path, array in encoder.arrays.items():
        tensor = tensor_of(array)
        local = local_of(tensor)
        stored = held_of(path, tensor, local)
        is_equal = is_cut(tensor) or isinstance(tensor, nn.Parameter) or path.startswith(tuple(optimizers))
        same_as = "" if is_own or array is not tensor else seen.same_as(path, tensor, local, stored)
        is_late = id(array) in owned or path.startswith(tuple(late))
        is_late = is_late and not path.startswith(tuple(wrapped)) and version_of(tensor) is not None
        leaves[path] = Leaf(tensor, local, stored, is_equal and not is_own, is_late, same_as)
        if is_own and not is_cut(tensor) and tensor.is_cpu and tensor.nbytes <= SEEN_BYTES:
            seen_bytes.append(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return Entry(tree, leaves, is_own, f"{xxh3_64(b''.join(seen_bytes)):016x}")


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor as it is, a copy of an array as one: of bytes if no stored dtype is the array's."""
    if isinstance(array, torch.Tensor):
        return array
    copied = np.array(array, order="C")
    if copied.dtype.isnative and copied.dtype.name in STORED:
        return torch.from_numpy(copied)
    raw = np.frombuffer(copied.tobytes(), np.uint8).copy()
    return torch.from_numpy(raw.reshape(*copied.shape, copied.dtype.itemsize))


def shown_tensors(path: str, target: Any, node: Node) -> Mapping[str, Any]:
    """Return the tensors that an object shows in its state, by path; none if the checkpoint has none of it."""
    found: list[str] = []
    decoded(path, node, lambda inner, _: found.append(inner))
    encoder = Encoder(dtype_of)
    if found:
        with contextlib.suppress(UserError):  # of what else the state has
            encoder.node(path, target.state_dict())
    return {inner: each for inner, each in encoder.arrays.items() if isinstance(each, torch.Tensor)}
