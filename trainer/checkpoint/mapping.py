"""Which tensors a checkpoint has, and which part of each is where in this rank's store."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ckptkit import Piece, TensorInfo
from trainer.ops.dtypes import wide_dtype
from trainer.store.optimizers import OPTIMIZERS, states_of
from trainer.store.parameter import Parameter
from trainer.store.store import ParameterStore

# dtypes of the arithmetic's state; moments may be of bf16
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32"}
READ_DTYPES = DTYPE_NAMES | {torch.bfloat16: "BF16", torch.float16: "F16"}  # of parameters that are converted
FILES = "files/"  # how names of tensors begin that hold the files of an imported model
MASTER = "optim.master/"


def tensor_table(
    table: Mapping[str, Parameter], dtype: torch.dtype, moments: torch.dtype | None = None
) -> list[TensorInfo]:
    """Return the global tensors of a run in `dtype`, the same on every rank: parameters and states of optimizers.

    For 16 bits the parameters are their fp32 masters. Without `moments` the states are of the masters' dtype.
    """
    master, wide = _master_prefix(dtype), DTYPE_NAMES[wide_dtype(dtype)]
    infos = []
    for state in (None, *states_of(table.values())):
        prefix = master if state is None else _prefix(state)
        for name, row in table.items():
            placement = row.placement
            if state is not None and (placement.tied_to or state not in OPTIMIZERS[row.optimizer].states):
                continue
            if placement.tied_to is not None:
                placement = replace(placement, tied_to=prefix + placement.tied_to)
            kind = "BF16" if moments == torch.bfloat16 and state is not None else wide
            infos.append(TensorInfo(prefix + name, kind, row.shape, placement))
    return infos


def saved_pieces(store: ParameterStore) -> list[Piece]:
    """Return what this rank saves, as views of the live state: each element is saved by the rank that owns it."""
    return list(_pieces(store, _master_prefix(store.options.dtype), of_owned=True))


def restored_pieces(
    store: ParameterStore, stored: Mapping[str, TensorInfo], *, with_moments: bool = True
) -> list[Piece]:
    """Return what this rank reads from a checkpoint with the tensors `stored`, as views of the live state.

    A parameter comes from `<name>` or, if the checkpoint has none, from its fp32 master. Publish the store afterwards.
    """
    from_master = "embed.weight" not in stored and MASTER + "embed.weight" in stored
    return list(_pieces(store, MASTER if from_master else "", with_moments=with_moments))


def _pieces(
    store: ParameterStore, master: str, *, of_owned: bool = False, with_moments: bool = True
) -> Iterator[Piece]:
    mesh = store.mesh
    for bucket in store.buckets:
        states = [(master, bucket.master)]
        if with_moments and store.options.with_optimizer:
            states += [(_prefix(name), state) for name, state in bucket.states.items()]
        shift = bucket.owned[0] - bucket.updated[0] if of_owned else 0
        for segment in bucket.owned_segments if of_owned else bucket.updated_segments:
            row, first = store.table[segment.name], segment.offset + shift
            box = row.placement.local_box(segment.name, row.shape, mesh.layout, mesh.coords)
            stop = min(segment.stop, box.numel)  # vocabulary padding is behind the box's rows
            for prefix, state in states if segment.start < stop else ():
                part = state[first : first + stop - segment.start]
                yield Piece(prefix + segment.name, box, segment.start, stop, part)


def _prefix(state: str) -> str:
    return f"optim.{state}/"


def _master_prefix(dtype: torch.dtype) -> str:
    return MASTER if dtype != wide_dtype(dtype) else ""
