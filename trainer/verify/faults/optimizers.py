"""Faults of optimizers that take whole matrices: a matrix that is a part, or several, or of another's numbers."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.store import muon
from trainer.store.matrices import Matrix, MatrixPart
from trainer.verify.faults.fault import DP, TP, Fault
from trainer.verify.faults.planting import wrapping

MUON: dict[str, Any] = {"name": "muon", "muon_lr": 0.02}


def each_part_alone(real: Any, parts: muon.Parts, steps: int) -> muon.Parts:
    alone = {part: replace(part, matrix=replace(part.matrix, shape=part.shape), corner=(0, 0)) for part in parts}
    return {part: real({alone[part]: values}, steps)[alone[part]] for part, values in parts.items()}


def heads_together(real: Any, parts: muon.Parts, steps: int) -> muon.Parts:
    """Make queries, keys and values of a layer orthogonal one below the other."""
    groups: dict[str, list[MatrixPart]] = {}
    for part in parts:
        layer, _, name = part.matrix.name.rpartition(".attn.")
        groups.setdefault(layer if name in ("q.weight", "k.weight", "v.weight") else part.matrix.name, []).append(part)
    orthogonal: muon.Parts = {}
    for name, members in groups.items():
        if len(members) != 3:
            orthogonal |= real({part: parts[part] for part in members}, steps)
            continue
        stacked = torch.cat([parts[part] for part in members])
        shape = len(stacked), stacked.shape[1]
        whole = MatrixPart(Matrix(name, 0, shape), (0, 0), shape)
        made = real({whole: stacked}, steps)[whole].split([part.shape[0] for part in members])
        orthogonal |= dict(zip(members, made, strict=True))
    return orthogonal


def of_the_neighbour(real: Any, arrived: Tensor, spans: Any) -> muon.Parts:
    """Take what came from one of two ranks for what came from the other."""
    parts: muon.Parts = real(arrived.roll(len(arrived) // 2), spans)
    return parts


OPTIMIZER_FAULTS = (
    Fault(
        "newton-schulz-of-a-part",
        "Newton-Schulz makes the part of a tp rank orthogonal",
        TP,
        wrapping(muon, "orthogonal_parts", each_part_alone),
        optim=MUON,
    ),
    Fault(
        "heads-as-one-matrix",
        "Newton-Schulz takes queries, keys and values as one matrix",
        None,
        wrapping(muon, "orthogonal_parts", heads_together),
        optim=MUON,
    ),
    Fault(
        "momentum-of-neighbour",
        "a matrix is put together of the neighbour's momentum",
        DP,
        wrapping(muon, "received_parts", of_the_neighbour),
        optim=MUON,
    ),
)
