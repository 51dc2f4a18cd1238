"""A universal checkpoint of DeepSpeed, with the face of a run of one step: `ucp:FOLDER`.

`zero/NAME/fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt` hold a parameter's master weight and moments, whole: in a dict
beside what says how tensor parallelism cut it, or alone and flat as ZeRO-3 has them, with shapes in `*model_states.pt`.
They become `optim.master/NAME` and so on. Nothing is unpickled; the folder has no checksums. Neither torch nor
DeepSpeed is needed.
"""

import math
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptkit.foreign.folder import ForeignFolder
from ckptkit.foreign.stored_reader import Found, StoredReader, table_of
from ckptkit.foreign.torch_archive import description, read_archive
from ckptkit.foreign.torch_zip import Ints, StoredTensor
from ckptkit.format.root import Root
from ckptkit.io.blocks import shown_names
from ckptkit.model.box import Box
from ckptkit.model.layout import ParallelLayout
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
        if missing := _missing(files.values()):
            text = f"{self.storage.url} lacks files of parameters:{listed(missing)}"
            raise CheckFailed(text, hint="fetch the folder again")
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
                whole = Box((0,) * len(tensor.shape), tensor.shape)
                tensors.append(Found(f"optim.{KINDS.get(match[2], match[2])}/{match[1]}", whole, name, tensor))
        if faults:
            raise UserError(f"{self.url} holds what is not read:{listed(faults)}")
        return Contents(tuple(tensors), {name: sizes[name] for name in files}, steps)

    def _shapes(self, sizes: Mapping[str, int]) -> dict[str, Ints]:
        """Return the shape of each parameter, as the first file of the module's state has them."""
        found = min((name for name in sizes if name.endswith(SHAPES)), default=None)
        if found is None:
            text = f"{self.storage.url} has tensors of ZeRO-3, which are flat, and no *{SHAPES} with their shapes"
            raise CheckFailed(text, hint="fetch the folder again")
        described = description(self.storage, found, OTHERS)
        try:
            return {name: tuple(size.args[0]) for group in described["param_shapes"] for name, size in group.items()}
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            where = f"{self.storage.url}/{found}"
            raise CheckFailed(f"{where} has no shapes of parameters as DeepSpeed writes them: {error!r}") from None

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        return self.contents.sizes

    def open(self, step: int, exchange: object = None) -> StoredReader:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        contents = self.contents
        return StoredReader(self.storage, self.root(step), self.url, contents.sizes, contents.tensors, {})

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        contents = self.contents
        tensors = table_of(self.url, {each.name: (each.place.dtype, each.place.shape) for each in contents.tensors}, {})
        metadata = {METADATA: {"steps": dict(contents.steps)}}
        return Root(step, self.attempt, ParallelLayout(), 1, tensors, (), metadata)


def _missing(files: Collection[re.Match[str]]) -> list[str]:
    """Return the files that are not there: masters, and states that another parameter has beside all of this one's."""
    states: dict[str, set[str]] = {}
    for name, state in (match.groups() for match in files):
        states.setdefault(name, {"fp32"}).update({state} - {"step"})
    found = {f"zero/{match[1]}/{match[2]}.pt" for match in files}
    wanted = ((name, max(filter(own.issubset, states.values()), key=len)) for name, own in states.items())
    return sorted({f"zero/{name}/{state}.pt" for name, own in wanted for state in own} - found)


def _shaped(flat: StoredTensor, shape: Any, where: str) -> StoredTensor:
    """Return a flat tensor with its true shape; CheckFailed if that has another number of elements."""
    if shape is None or len(flat.shape) != 1 or not flat.is_row_major or math.prod(shape) != flat.shape[0]:
        raise CheckFailed(f"{where} has a tensor {list(flat.shape)}, the parameter is {shape and list(shape)}")
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return StoredTensor(flat.dtype, tuple(shape), tuple(stride), flat.offset, flat.end)
