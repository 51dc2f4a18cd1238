"""Objects: what modules, optimizers and others with a state_dict hold, under names that no wrapper changes.

The names are those of torch.distributed.checkpoint.state_dict: of a module inside DDP, torch.compile or a checkpoint
wrapper they are the module's own; an optimizer's state is by the names of the parameters. With several modules in the
state an optimizer takes the names of the first that has all its parameters, else those of all, `key.name`.
"""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ckptkit.format.state_tree import part
from ckptkit.torch.state.boxes import local_of
from ckptkit.torch.state.shards import is_shard, shard_like
from threefold.errors import UserError

RNG = "rng"
EXTRA_STATE = "_extra_state"  # what torch names the extra state of a module
# options that learning rate schedulers add to an optimizer's groups
OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def is_stateful(value: Any) -> bool:
    """Return whether an object saves and loads itself by state_dict and load_state_dict."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def holds_objects(values: Iterable[Any]) -> bool:
    """Return whether values have what is filled in place: tensors, modules and the like, at any depth."""
    return any(
        isinstance(each, torch.Tensor | nn.Module | Optimizer)
        or is_stateful(each)
        or (isinstance(each, dict) and holds_objects(each.values()))
        or (isinstance(each, list | tuple) and holds_objects(each))
        for each in values
    )


def own_name(module: nn.Module, name: str) -> str:
    """Return the name of a parameter without the parts that wrappers put into it."""
    words, current = [], module
    for word in name.split("."):
        is_ddp = isinstance(current, nn.parallel.DistributedDataParallel) and word == "module"
        if not is_ddp and word not in WRAPPERS:
            words.append(word)
        current = getattr(current, word, None)  # type: ignore[assignment]
    return ".".join(words)


def own_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the own names of parameters: the same ones if the module has no wrapper."""
    is_wrapped = any(
        isinstance(each, nn.parallel.DistributedDataParallel) or any(word in each._modules for word in WRAPPERS)
        or "_orig_mod" in vars(each)
        for each in module.modules()
    )  # fmt: skip
    return {name: own_name(module, name) if is_wrapped else name for name in names}


def module_state(path: str, module: nn.Module) -> dict[str, Any]:
    """Return a module's parameters, buffers and extra states by name: the live tensors themselves."""
    if any(type(each).__name__ == "FullyShardedDataParallel" for each in module.modules()):
        raise UserError(
            f"{path} is sharded by FullyShardedDataParallel, whose flat parameters have no names",
            hint="shard it by torch.distributed.fsdp.fully_shard",
        )
    state = module.state_dict(keep_vars=True)
    if lazy := next((name for name, value in state.items() if is_lazy(value)), None):
        raise UserError(f"{path}/{lazy} has no shape yet", hint="run the module on a batch first")
    own = own_names(module, state)
    return {own[name]: value for name, value in state.items()}


def extra_state_owner(module: nn.Module, name: str) -> nn.Module | None:
    """Return whose extra state a name of a module's state is, None if it is not one."""
    owner, _, last = name.rpartition(".")
    if last != EXTRA_STATE:
        return None
    return next((each for inner, each in module.named_modules() if own_name(module, inner) == owner), None)


def made_on_request(path: str, module: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return which names of a module's state are not its memory but what it or a hook makes at each `state_dict()`."""
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    others = {name: value for name, value in state.items() if id(value) not in own}
    again = module_state(path, module) if others else {}
    return {name for name, value in others.items() if not _is_same_memory(value, again.get(name))}


def give_state(path: str, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Have a module take a state by load_state_dict; UserError if it does not take all of it."""
    names = {own_name(module, name): name for name in module.state_dict(keep_vars=True)}
    try:
        left = module.load_state_dict({names[name]: value for name, value in state.items()}, strict=False)
    except RuntimeError as error:
        raise UserError(f"{path} does not load the state that it made: {error}") from None
    if left.unexpected_keys:
        raise UserError(
            f"{path} does not load what its state_dict has: {', '.join(left.unexpected_keys)}",
            hint="let load_state_dict take the names that state_dict makes",
        )


def _is_same_memory(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    first, second = local_of(one), local_of(other)
    return first.numel() == 0 or first.data_ptr() == second.data_ptr()


class ParameterNames:
    """The names of all parameters that the modules and tensors of a program's state hold."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._modules: list[tuple[str, dict[int, str]]] = []
        self._loose: dict[int, str] = {}
        for path, value in _objects("", state):
            if isinstance(value, nn.Module):
                parameters = dict(value.named_parameters())
                own = own_names(value, parameters)
                self._modules.append((path, {id(each): own[name] for name, each in parameters.items()}))
            elif isinstance(value, torch.Tensor):
                self._loose[id(value)] = path

    def of(self, path: str, optimizer: Optimizer) -> dict[int, str]:
        """Return the name of each of an optimizer's parameters, by id; UserError if one is in no module.

        UserError too if the optimizer has others keep its states, as ZeroRedundancyOptimizer does on each rank.
        """
        if any(isinstance(each, Optimizer) and each.state is not optimizer.state for each in vars(optimizer).values()):
            raise UserError(
                f"{path} is a {type(optimizer).__name__}, whose states are those of another optimizer inside it",
                hint="shard by torch.distributed.fsdp.fully_shard, with an optimizer of torch.optim",
            )
        parameters = {id(each): each for group in optimizer.param_groups for each in group["params"]}
        for _, named in self._modules:
            if parameters.keys() <= named.keys():
                return {key: named[key] for key in parameters}
        names = dict(self._loose)
        for module, named in reversed(self._modules):
            names |= {key: f"{module}.{name}" for key, name in named.items()}
        unknown = [tuple(each.shape) for key, each in parameters.items() if key not in names]
        if unknown:
            raise UserError(
                f"{path}: {len(unknown)} of its {len(parameters)} parameters are in no module of the state, one of "
                f"shape {list(unknown[0])}",
                hint='pass the module beside it: {"model": model, "optimizer": optimizer}; make the optimizer after '
                "fully_shard and parallelize_module",
            )
        return {key: names[key] for key in parameters}


def optimizer_state(path: str, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state and groups by the names of its parameters: the live tensors themselves.

    What is kept of a shard is shown as the slices that the shard is.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    groups = [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]
    state: dict[Any, Any] = {key: each for key, each in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    for each in parameters:
        if kept := optimizer.state.get(each):
            inner = f"{path}/state/{part(names[id(each)])}"
            state[names[id(each)]] = _of_shard(inner, kept, each) if is_shard(each) else dict(kept)
    return {"state": state, "param_groups": groups}


def _of_shard(path: str, state: Mapping[Any, Any], parameter: torch.Tensor) -> dict[Any, Any]:
    return {
        key: shard_like(f"{path}/{part(key)}", value, parameter) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def is_of_kind(optimizer: Optimizer, saved: Mapping[Any, Any]) -> bool:
    """Return whether a group's options may be of this kind of optimizer: other versions of it have more or fewer."""
    here = optimizer.defaults.keys()
    return not here - saved.keys() or not saved.keys() - here - OF_SCHEDULERS


def probed_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[Any, Any]:
    """Return the state that an optimizer makes of a parameter in its first step; neither of them changes.

    A scheduler puts a `step` on the optimizer that is bound to it, so the one of the class is called.
    """
    optimizer = innermost(optimizer)
    probe = torch.zeros_like(parameter).requires_grad_()
    probe.grad = torch.zeros_like(parameter)
    copied: Any = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    copied.state, copied.param_groups = defaultdict(dict), [{**group, "params": [probe]}]
    copied._optimizer_step_pre_hooks, copied._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    type(optimizer).step(copied)
    return dict(copied.state[probe])


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose states and groups another one shows as its own, as AcceleratedOptimizer does."""
    inner = (each for each in vars(optimizer).values() if isinstance(each, Optimizer) and each.state is optimizer.state)
    return next(map(innermost, inner), optimizer)


def optimizers_in(state: Mapping[str, Any]) -> list[Optimizer]:
    """Return the optimizers of a program's state."""
    return [value for _, value in _objects("", state) if isinstance(value, Optimizer)]


def rng_state() -> dict[str, Any]:
    """Return the state of this process's random generators: Python's, numpy's, torch's, and of each GPU in use."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": [version, np.array(words, np.int64), gauss],
        "numpy": [name, np.array(keys, np.int64), *(int(each) for each in rest[:2]), float(rest[2])],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
        others = [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number)]
        state["cuda_by_number"] = {number: torch.cuda.get_rng_state(number) for number in others}
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the random generators of this process; a GPU's only where there is one of its number."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for number, kept in state.get("cuda_by_number", {}).items():
            if number < torch.cuda.device_count():
                torch.cuda.set_rng_state(kept, number)
        torch.cuda.set_rng_state(state["cuda"])


def _objects(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what dicts, lists and tuples hold, with its dotted path."""
    if not isinstance(value, Mapping | list | tuple):
        yield path, value
        return
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _objects(f"{path}.{key}" if path else str(key), each)
