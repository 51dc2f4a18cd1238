"""A universal checkpoint of DeepSpeed, with the face of a run of one step: `ucp:FOLDER`.

`zero/NAME/fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt` hold a parameter's master weight and moments, whole: in a dict
beside what says how tensor parallelism cut it, or alone and flat as ZeRO-3 has them, with shapes in `*model_states.pt`.
They become `optim.master/NAME` and so on. A buffer or frozen weight has `fp32.pt` alone, and is a master alone.
Nothing is unpickled; the folder has no checksums. Neither torch nor DeepSpeed is needed.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptkit.foreign.checks import FETCH, checked
from ckptkit.foreign.folder import FolderSource, ForeignFolder
from ckptkit.foreign.stored_parts import Found, stored_source, table_of
from ckptkit.foreign.torch_files.archive import Ints, StoredTensor, description, read_archive
from ckptkit.format.root import Root
from ckptkit.io.blocks import shown_names
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Box
from threefold.cli import log
from threefold.errors import CheckFailed, UserError, listed

NUM_THREADS, METADATA = 8, "deepspeed"
STATE = re.compile(r"zero/(.+)/([^/]+)\.pt")
KINDS = {"fp32": "master"}  # others are named as DeepSpeed names them
SHAPES = "_model_states.pt"
# what such files name beside tensors; nothing here needs it
OTHERS = frozenset([
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape", "argparse.Namespace", "numpy.ndarray", "numpy.dtype",
    *(f"{module}.set" for module in ("__builtin__", "builtins")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
])  # fmt: skip


@dataclass(frozen=True)
class Contents:
    """What a folder holds: tensors, the sizes of the files they are in, and the steps of parameters."""

    tensors: tuple[Found, ...]
    sizes: Mapping[str, int]
    steps: Mapping[str, int]


class UcpFolder(ForeignFolder):
    """One folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    scheme = "ucp:"

    @cached_property
    def contents(self) -> Contents:
        """Return what the folder holds; CheckFailed or UserError if it is not sound or not understood."""
        sizes = {info.key: info.size_bytes for info in self.storage.list()}
        files = {name: match for name in sorted(sizes) if (match := STATE.fullmatch(name))}
        if not files:
            hint = "name a folder that DeepSpeed's ds_to_universal.py made"
            raise CheckFailed(f"{self.storage.url} has no zero/NAME/fp32.pt", hint=hint)
        stateless, optimized = _stateless(files.values()), self._optimized(sizes)
        missing = _missing([match for match in files.values() if match[1] not in stateless])
        missing += [f"zero/{name}: all but fp32.pt, and the optimizer has it" for name in sorted(stateless & optimized)]
        lost = sorted(optimized - {match[1] for match in files.values()})
        missing += [f"zero/{name}: all, and the optimizer has it" for name in lost]
        if missing:
            raise CheckFailed(f"{self.storage.url} lacks files of parameters:{listed(missing)}", hint=FETCH)
        if stateless:
            log(f"warning: {self.url} has weights without optimizer state: {shown_names(sorted(stateless))}")
        if others := sorted(sizes.keys() - files.keys()):
            log(f"warning: {self.url} holds what is not read: {shown_names(others)}")
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            values = list(pool.map(lambda name: read_archive(self.storage, name, OTHERS), files))
        has_flat = any(isinstance(value, StoredTensor) and value.shape for value in values)
        shapes = self._shapes(sizes) if has_flat else {}
        tensors, steps, faults = list[Found](), dict[str, int](), list[str]()
        for (name, match), value in zip(files.items(), values, strict=True):
            tensor = value.get("param") if isinstance(value, dict) else value
            if match[2] == "step" and type(tensor) is int:
                steps[match[1]] = tensor
            elif not isinstance(tensor, StoredTensor):
                faults.append(f"{name}: not a tensor")
            else:
                if tensor is value and tensor.shape:
                    tensor = _shaped(tensor, shapes.get(match[1]), f"{self.storage.url}/{name}")
                own = f"optim.{KINDS.get(match[2], match[2])}/{match[1]}"
                tensors.append(Found(own, Box.whole(tensor.shape), name, tensor))
        if faults:
            raise UserError(f"{self.url} holds what is not read:{listed(faults)}")
        _check_states(self.storage.url, tensors)
        return Contents(tuple(tensors), {name: sizes[name] for name in files}, steps)

    def _shapes(self, sizes: Mapping[str, int]) -> dict[str, Ints]:
        """Return the shape of each parameter, as the first file of the module's state has them."""
        if self._module_file(sizes) is None:
            text = f"{self.storage.url} has tensors of ZeRO-3, which are flat, and no *{SHAPES} with their shapes"
            raise CheckFailed(text, hint=FETCH)
        with self._described(sizes) as described:
            return {name: tuple(size.args[0]) for group in described["param_shapes"] for name, size in group.items()}

    def _optimized(self, sizes: Mapping[str, int]) -> set[str]:
        """Return the parameters that the optimizer has, as the module's state says; none if nothing says it."""
        if self._module_file(sizes) is None:
            return set()
        try:
            with self._described(sizes) as described:
                others = {*(described.get("buffer_names") or ()), *(described.get("frozen_param_shapes") or ())}
                return {name for group in described.get("param_shapes") or () for name in group} - others
        except UserError:  # it holds what its program put there; flat tensors need it, others do not
            return set()

    @contextmanager
    def _described(self, sizes: Mapping[str, int]) -> Iterator[Any]:
        """Yield the module's state for a look at it, in which what is not as DeepSpeed writes it is a CheckFailed."""
        file = self._module_file(sizes)
        assert file is not None, "there is one"
        with checked(f"{self.storage.url}/{file} has no shapes of parameters as DeepSpeed writes them", FETCH):
            yield description(self.storage, file, OTHERS)

    def _module_file(self, sizes: Mapping[str, int]) -> str | None:
        return min((name for name in sizes if name.endswith(SHAPES)), default=None)

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        return self.contents.sizes

    def open(self, step: int, exchange: object = None) -> FolderSource:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        contents = self.contents
        return stored_source(self.storage, self.root(step), self.url, contents.sizes, contents.tensors, {})

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        contents = self.contents
        tensors = table_of(self.url, {each.name: (each.place.dtype, each.place.shape) for each in contents.tensors}, {})
        return Root(step, self.attempt, ParallelLayout(), 1, tensors, (), {METADATA: {"steps": dict(contents.steps)}})


def _stateless(files: Collection[re.Match[str]]) -> set[str]:
    """Return the names that have a master and nothing of an optimizer."""
    return {match[1] for match in files if match[2] == "fp32"} - {match[1] for match in files if match[2] != "fp32"}


def _missing(files: Collection[re.Match[str]]) -> list[str]:
    """Return the files that are not there: masters, and states that another parameter has beside all of this one's."""
    states: dict[str, set[str]] = {}
    for name, state in (match.groups() for match in files):
        states.setdefault(name, {"fp32"}).update({state} - {"step"})
    found = {f"zero/{match[1]}/{match[2]}.pt" for match in files}
    kinds = {frozenset(own) for own in states.values()}
    fullest = {own: max(filter(own.issubset, kinds), key=len) for own in kinds}
    wanted = ((name, fullest[frozenset(own)]) for name, own in states.items())
    return sorted({f"zero/{name}/{state}.pt" for name, own in wanted for state in own} - found)


def _check_states(url: str, tensors: Iterable[Found]) -> None:
    """Raise CheckFailed for moments of another shape or dtype than their master."""
    masters, faults = dict[str, StoredTensor](), list[str]()
    states = [(*each.name.partition("/")[::2], each) for each in tensors if not each.name.startswith("optim.step/")]
    for _, name, each in sorted(states, key=lambda state: state[0] != f"optim.{KINDS['fp32']}"):
        own, master = each.place, masters.setdefault(name, each.place)
        if (own.dtype, own.shape) != (master.dtype, master.shape):
            there = f"{own.dtype} {list(own.shape)}, fp32.pt beside it {master.dtype} {list(master.shape)}"
            faults.append(f"{each.file}: {there}")
    if faults:
        hint = "convert the save again with DeepSpeed's ds_to_universal.py"
        raise CheckFailed(f"{url} has states that are not those of their parameters:{listed(faults)}", hint=hint)


def _shaped(flat: StoredTensor, shape: Any, where: str) -> StoredTensor:
    """Return a flat tensor with its true shape; CheckFailed if that has another number of elements."""
    if shape is None or len(flat.shape) != 1 or not flat.is_row_major or math.prod(shape) != flat.shape[0]:
        raise CheckFailed(f"{where} has a tensor {list(flat.shape)}, the parameter is {shape and list(shape)}")
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return StoredTensor(flat.dtype, tuple(shape), tuple(stride), flat.offset, flat.end)
