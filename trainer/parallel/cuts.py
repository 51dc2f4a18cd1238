"""Cuts: what cuts the work of a layer over ranks, as its parts take it."""

from dataclasses import dataclass

from trainer.parallel.context import ContextParallel
from trainer.parallel.expert import ExpertParallel
from trainer.parallel.tensor import TensorParallel


@dataclass(frozen=True, slots=True)
class Cuts:
    """The ranks that share linears, rows of tokens, and experts."""

    tensor: TensorParallel
    context: ContextParallel
    experts: ExpertParallel
