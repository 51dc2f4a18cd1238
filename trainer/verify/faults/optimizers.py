"""Faults of optimizers that take whole matrices: a matrix that is a part, or several, or of another's numbers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from trainer.store import muon
from trainer.store.matrices import Matrix, MatrixPart, MatrixSpan
from trainer.verify.faults.fault import DP, TP, Fault
from trainer.verify.faults.planting import wrapping

MUON: dict[str, Any] = {"name": "muon", "muon_lr": 0.02}
Spans = Sequence[MatrixSpan]


def of_other_parts(
    real: Any, arrived: Tensor, spans: tuple[Spans, Spans], steps: int, other: Callable[..., Any]
) -> Tensor:
    """Make spans orthogonal as if they were of other parts."""
    some = ([replace(span, part=other(span.part)) for span in each] for each in spans)
    made: Tensor = real(arrived, *some, steps)
    return made


def each_part_alone(real: Any, arrived: Tensor, arriving: Spans, returned: Spans, steps: int) -> Tensor:
    def alone(part: MatrixPart) -> MatrixPart:
        name = f"{part.matrix.name} from {part.corner}"
        return MatrixPart(Matrix(name, part.matrix.expert, part.shape), (0, 0), part.shape)

    return of_other_parts(real, arrived, (arriving, returned), steps, alone)


def heads_together(real: Any, arrived: Tensor, arriving: Spans, returned: Spans, steps: int) -> Tensor:
    """Make queries, keys and values of a layer orthogonal one below the other, if a rank takes all three."""
    layers: dict[str, dict[str, Matrix]] = {}
    for span in arriving:
        layer, _, name = span.part.matrix.name.rpartition(".attn.")
        if name in ("q.weight", "k.weight", "v.weight"):
            layers.setdefault(layer, {})[name] = span.part.matrix

    def together(part: MatrixPart) -> MatrixPart:
        layer, _, name = part.matrix.name.rpartition(".attn.")
        matrices = layers.get(layer, {})
        if len(matrices) < 3 or name not in matrices:
            return part
        names, (top, left) = list(matrices), part.corner
        tops = [sum(matrices[each].shape[0] for each in names[:number]) for number in range(4)]
        whole = Matrix(layer, 0, (tops[3], part.matrix.shape[1]))
        return replace(part, matrix=whole, corner=(tops[names.index(name)] + top, left))

    return of_other_parts(real, arrived, (arriving, returned), steps, together)


def of_the_neighbour(real: Any, arrived: Tensor, *others: Any) -> Tensor:
    """Take what came from one of two ranks for what came from the other."""
    made: Tensor = real(arrived.roll(len(arrived) // 2), *others)
    return made


OPTIMIZER_FAULTS = (
    Fault(
        "newton-schulz-of-a-part",
        "Newton-Schulz makes the part of a tp rank orthogonal",
        TP,
        wrapping(muon, "orthogonal_spans", each_part_alone),
        optim=MUON,
    ),
    Fault(
        "heads-as-one-matrix",
        "Newton-Schulz takes queries, keys and values as one matrix",
        None,
        wrapping(muon, "orthogonal_spans", heads_together),
        optim=MUON,
    ),
    Fault(
        "momentum-of-neighbour",
        "a matrix is put together of the neighbour's momentum",
        DP,
        wrapping(muon, "orthogonal_spans", of_the_neighbour),
        optim=MUON,
    ),
)
