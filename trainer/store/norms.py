"""LayerNorms: norms of the gradients and of the weights of each layer, every so many steps.

Both are sums over what ranks own, in float64, so they do not depend on the layout. The squares of gradients are those
of the gradient norm; those of weights are summed over ranks by a call of their own. The host reads them with the step.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.store.store import ParameterStore


class LayerNorms:
    """The norms of a store's layers; on the training thread, every rank makes the same calls."""

    def __init__(self, store: ParameterStore, interval: int) -> None:
        """Take them at each step that `interval` divides; never if it is 0."""
        self._store, self._interval = store, interval
        self._layers = [None if row.placement.tied_to else layer_of(name) for name, row in store.table.items()]

    def of_step(self, step: int, squares_P: Tensor, loss_scale: Tensor | float) -> Tensor:
        """Return squared norms, of gradients and then of weights by parameter; nothing if the step has none.

        `squares_P` are those of gradients that `loss_scale` multiplied. The weights are those that made them.
        """
        if not self._interval or step % self._interval:
            return squares_P[:0]
        return torch.cat([squares_P / loss_scale**2, self._store.mesh.world.all_reduce(squares_of(self._store))])

    def by_layer(self, squares: Sequence[float]) -> dict[str, dict[str, float]]:
        """Return the fields of a step's line that the squares of a step make, none if there are none."""
        size = len(self._layers)
        return {
            name: self._folded(squares[first : first + size])
            for name, first in (("grad_norms", 0), ("weight_norms", size))
            if squares
        }

    def _folded(self, squares: Sequence[float]) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for layer, square in zip(self._layers, squares, strict=True):
            if layer is not None:
                sums[layer] += square
        return {layer: math.sqrt(square) for layer, square in sums.items()}


def layer_of(name: str) -> str:
    """Return the layer of a parameter: layers.3.mlp.up.weight is of layers.3, head.weight of head."""
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


@torch.no_grad()
def squares_of(store: ParameterStore) -> Tensor:
    """Return the squared norm of what this rank owns of each parameter, in the compute dtype; float64, by row."""
    store.join()
    numbers = {name: number for number, name in enumerate(store.table)}
    squares = torch.zeros(len(numbers), dtype=torch.float64, device=store.mesh.device)
    for bucket in store.buckets:
        for segment in bucket.owned_segments:
            part = bucket.owned_parameters[segment.offset :][: segment.stop - segment.start]
            squares[numbers[segment.name]] += torch.linalg.vector_norm(part, dtype=torch.float64) ** 2
    return squares
