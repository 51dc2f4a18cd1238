"""What a step reads, and what one pass of a micro-batch of it does."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.ops.attention.seam import Mask
from trainer.ops.dropout import dropout


@dataclass(frozen=True, slots=True)
class Batch:
    """A data-parallel rank's share of one step on its device: [num_microbatches, micro_batch_size, seq_length] each.

    `first_sample` is the global number of the step's first sample, over all ranks. `documents` has, for each
    micro-batch, the bounds of its documents and the tokens of the longest, if attention is not to cross them.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    first_sample: int
    documents: tuple[tuple[Tensor, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """What fixes the dropout masks of a micro-batch, whatever the layout: see `trainer.ops.dropout`."""

    p: float
    seed: int
    step: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """All tokens of one micro-batch, [S] each: its sequences one behind the other.

    The first of them is sample `first_sample` of the training stream; `positions_S` are what the model is shown, which
    may restart with each document. `weights_S` are the token losses' factors in the step's loss, in the wide dtype; an
    evaluation has none. `dropout` is None if nothing is dropped; `turns_SH` are the angles of rotary positions, which
    the layers share. `documents` are the int32 bounds of documents that attention does not cross, [0, ..., S], and the
    tokens of the longest one. `first_token` is the first that this rank has of an activation whose tokens are cut.
    """

    tokens_S: Tensor
    labels_S: Tensor
    positions_S: Tensor
    loss_mask_S: Tensor
    seq_length: int
    first_sample: int
    dropout: DropoutKey | None
    weights_S: Tensor | None = None
    turns_SH: Tensor | None = None
    documents: tuple[Tensor, int] | None = None
    first_token: int = 0

    @property
    def mask(self) -> Mask:
        """Return which keys a query sees: those of its own row, or of its own document, up to its own place."""
        return Mask.of_rows(self.seq_length) if self.documents is None else Mask.of_documents(*self.documents)

    def drop(self, x_TD: Tensor, *, layer: int, site: int) -> Tensor:
        """Drop elements of what this rank has of an activation: the tokens from `first_token` on."""
        key = self.dropout
        if key is None:
            return x_TD
        parts, start = [], 0
        for row, position, num_tokens in boxes(self.first_token, len(x_TD), self.seq_length):
            box_BLD = x_TD[start : start + num_tokens].unflatten(0, (-1, min(num_tokens, self.seq_length)))
            dropped_BLD = dropout(
                box_BLD, key.p, seed=key.seed, step=key.step, layer=layer, site=site,
                first_sample=self.first_sample + row, first_position=position,
            )  # fmt: skip
            parts.append(dropped_BLD.flatten(0, 1))
            start += num_tokens
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def boxes(first: int, num_tokens: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield a run of tokens as boxes of rows of `length` tokens: the first row, the place in it, the number of tokens.

    >>> list(boxes(2, 13, 4))
    [(0, 2, 2), (1, 0, 8), (3, 0, 3)]
    """
    stop = first + num_tokens
    while first < stop:
        row, position = divmod(first, length)
        whole = (stop - first) // length * length
        size = whole if not position and whole else min(length - position, stop - first)
        yield row, position, size
        first += size
