"""Dropout of attention's weights by place: which ones are dropped depends on no cut of heads, tokens or passes.

Head n of a layer has a site of its own among the layer's dropouts, and its weights of one row are [queries, keys]: see
`trainer.ops.dropout`, whose position is the query's place in the row, and whose feature is the key's.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.ops.dropout import dropout

FIRST_SITE = 2  # that of head 0; those before are of what attention and the MLP return


@dataclass(frozen=True, slots=True)
class WeightDropout:
    """What fixes which weights of a call of attention are dropped.

    Rows have `length` tokens, and token t of sample n has place n * length + t. `queries` are the places of the call's
    queries, in runs as they lie in memory, and `first_key` is that of its first key, behind which the others follow.
    `first_head` is the number of its first head in the whole layer.
    """

    p: float
    seed: int
    step: int
    layer: int
    length: int
    queries: tuple[range, ...]
    first_key: int
    first_head: int

    def of_heads(self, first: int) -> "WeightDropout":
        """Return that of a call whose first head is the one of this number here."""
        return replace(self, first_head=self.first_head + first)

    def drop(self, x_NML: Tensor, first_query: int, first_key: int) -> Tensor:
        """Zero weights, or their gradients, and scale the others: of M queries and L keys, from these numbers on.

        All are of one row, where they are neighbours.
        """
        sample, position = divmod(self._place(first_query), self.length)
        feature = self.first_key + first_key - sample * self.length
        place = {"step": self.step, "layer": self.layer, "first_sample": sample, "first_position": position}
        parts = []
        for site, x_ML in enumerate(x_NML, FIRST_SITE + self.first_head):
            x_1ML = x_ML.unsqueeze(0)
            parts.append(dropout(x_1ML, self.p, seed=self.seed, site=site, first_feature=feature, **place))
        return torch.cat(parts)

    def _place(self, query: int) -> int:
        for run in self.queries:
            if query < len(run):
                return run[query]
            query -= len(run)
        raise AssertionError(f"query {query} is behind the runs {self.queries}")
