"""What a step reads, and what one pass of a micro-batch of it does."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.ops.attention.seam import Mask
from trainer.ops.attention.weights import WeightDropout
from trainer.ops.dropout import dropout
from trainer.parallel.places import Runs, boxes, rows_of

Scale = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """A data-parallel rank's share of one step on its device: [num_microbatches, micro_batch_size, seq_length] each.

    `first_sample` is the global number of the step's first sample, over all ranks. `documents` has, for each
    micro-batch, the bounds of its documents and the tokens of the longest, if attention is not to cross them.
    `groups` are numbers below `num_groups`, one a token, by which an evaluation sums losses apart.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    first_sample: int
    documents: tuple[tuple[Tensor, int], ...] | None = None
    groups: Tensor | None = None
    num_groups: int = 0


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """What fixes the dropout masks of a micro-batch, whatever the layout: see `trainer.ops.dropout`.

    `weights` is the probability for weights of attention, p that for all else.
    """

    p: float
    seed: int
    step: int
    weights: float = 0.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of one micro-batch, [S] each: its sequences one behind the other, or what context parallel leaves here.

    `runs` are their places in the training stream: token t of sample n has place n * seq_length + t. `own_runs` are
    those of the T tokens that this rank has of an activation whose tokens are cut; None if they are not.
    `positions_S` are what the model is shown, which may restart with each document. `dropout` is None if nothing is
    dropped; `scale` returns the factor of a token's loss in the step's, in the wide dtype; an evaluation has none.
    `turns_SH` are the angles of rotary positions, `slopes_N` ALiBi's of all heads: layers share them. `documents` are
    the int32 bounds of documents that attention does not cross, and the tokens of the longest one, among the tokens
    that attention sees: all ranks'.
    `halves` are the masks of the two parts of this rank's tokens, if these see keys that were gathered. `seen_runs` are
    the places of the tokens whose queries attention has, all ranks' or each half's.
    `groups_S` are what an evaluation sums losses by.
    """

    tokens_S: Tensor
    labels_S: Tensor
    positions_S: Tensor
    loss_mask_S: Tensor
    seq_length: int
    runs: Runs
    dropout: DropoutKey | None
    scale: Scale | None = None
    turns_SH: Tensor | None = None
    slopes_N: Tensor | None = None
    documents: tuple[Tensor, int] | None = None
    own_runs: Runs | None = None
    halves: tuple[Mask, ...] = ()
    groups_S: Tensor | None = None
    seen_runs: tuple[Runs, ...] = ()

    @property
    def weights_S(self) -> Tensor | None:
        """Return the factors of the tokens' losses in the step's; whoever asks first waits for all ranks' counts."""
        scale = None if self.scale is None else self.scale()
        return None if scale is None else self.loss_mask_S.to(scale.dtype) * scale

    def mask(self) -> Mask:
        """Return which keys a query sees: those of its row, or document, up to its own place."""
        bounds, longest = (None, self.seq_length) if self.documents is None else self.documents
        return Mask(bounds, bounds, longest, longest)

    def masks(self, window: int | None, layer: int, heads: range) -> tuple[Mask, ...]:
        """Return the mask of a layer for all tokens that attention sees, or for each half of this rank's.

        Weights are dropped by the numbers of the layer and of this rank's `heads` in it, which have slopes of ALiBi.
        """
        alibi = None if self.slopes_N is None else self.slopes_N[heads.start : heads.stop]
        masks = tuple(replace(mask, window=window, alibi=alibi) for mask in self.halves or (self.mask(),))
        key, length = self.dropout, self.seq_length
        if key is None or not key.weights:
            return masks
        first_key = self.seen_runs[0][0].start // length * length
        drops = [
            WeightDropout(key.weights, key.seed, key.step, layer, length, runs, first_key, heads.start)
            for runs in self.seen_runs
        ]
        return tuple(replace(mask, dropout=drop) for mask, drop in zip(masks, drops, strict=True))

    def drop(self, x_TD: Tensor, *, layer: int, site: int) -> Tensor:
        """Drop elements of what this rank has of an activation, each by its token's place."""
        key = self.dropout
        if key is None or not key.p:
            return x_TD
        parts, start = [], 0
        for sample, position, num_tokens in boxes(self.own_runs or self.runs, self.seq_length):
            box_BLD = x_TD[start : start + num_tokens].unflatten(0, (-1, min(num_tokens, self.seq_length)))
            dropped_BLD = dropout(
                box_BLD, key.p, seed=key.seed, step=key.step, layer=layer, site=site,
                first_sample=sample, first_position=position,
            )  # fmt: skip
            parts.append(dropped_BLD.flatten(0, 1))
            start += num_tokens
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def own(self, x_S: Tensor) -> Tensor:
        """Return what of something of all tokens belongs to those that this rank has; a view if that is one run."""
        return x_S if self.own_runs is None else self._of(x_S, self.own_runs)

    def part(self, runs: Runs) -> "MicroBatch":
        """Return what of the micro-batch has some of its places, and sees the others in attention."""
        if runs == self.runs:
            return self
        names = ("tokens_S", "labels_S", "positions_S", "loss_mask_S", "turns_SH", "groups_S")
        whole = {name: getattr(self, name) for name in names}
        parts: dict[str, Any] = {name: None if x is None else self._of(x, runs) for name, x in whole.items()}
        return replace(self, **parts, runs=runs, own_runs=None)

    def cut(self, runs: Runs) -> "MicroBatch":
        """Return the micro-batch of some of its places, within which attention stays: it cuts documents too."""
        if runs == self.runs:
            return self
        bounds, longest = self.documents or (None, self.seq_length)
        if bounds is None:  # rows are the documents
            bounds = torch.arange(0, len(self.tokens_S) + 1, longest, dtype=torch.int32, device=self.tokens_S.device)
        cut_bounds, start = [], 0
        for rows in (rows_of(run, self.runs) for run in runs):
            cut_bounds.append(bounds.clamp(rows.start, rows.stop) - (rows.start - start))
            start += len(rows)
        return replace(self.part(runs), documents=(torch.cat(cut_bounds), longest))

    def _of(self, x_S: Tensor, runs: Runs) -> Tensor:
        parts = [x_S[rows.start : rows.stop] for rows in (rows_of(run, self.runs) for run in runs)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def sums_by(x_S: Tensor, groups_S: Tensor | None, num_groups: int) -> Tensor:
    """Return the sum of all elements and the sums of those of each group, [1 + groups], float64.

    Of 1, 2, 3 in groups 1, 0, 1 of 3 they are 6, 2, 4, 0.
    """
    total = x_S.sum(dtype=torch.float64).view(1)
    if groups_S is None:
        return total
    sums_G = torch.zeros(num_groups, dtype=torch.float64, device=x_S.device)
    return torch.cat([total, sums_G.index_add_(0, groups_S, x_S.double())])
