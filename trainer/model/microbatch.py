"""What one pass of a micro-batch reads."""

from dataclasses import dataclass

from torch import Tensor

from trainer.ops.attention.seam import Mask
from trainer.ops.dropout import dropout


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """What fixes the dropout masks of a micro-batch, whatever the layout: see `trainer.ops.dropout`."""

    p: float
    seed: int
    step: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tokens of one micro-batch on this rank, [T] each: its sequences one behind the other.

    The first of them is sample `first_sample` of the training stream; `positions_T` are what the model is shown, which
    may restart with each document. `weights_T` are the token losses' factors in the step's loss, in the wide dtype; an
    evaluation has none. `dropout` is None if nothing is dropped; `turns_TH` are the angles of rotary positions, which
    the layers share. `documents` are the int32 bounds of documents that attention does not cross, [0, ..., T], and the
    tokens of the longest one.
    """

    tokens_T: Tensor
    labels_T: Tensor
    positions_T: Tensor
    loss_mask_T: Tensor
    seq_length: int
    first_sample: int
    dropout: DropoutKey | None
    weights_T: Tensor | None = None
    turns_TH: Tensor | None = None
    documents: tuple[Tensor, int] | None = None

    @property
    def mask(self) -> Mask:
        """Return which keys a query sees: those of its own row, or of its own document, up to its own place."""
        return Mask.of_rows(self.seq_length) if self.documents is None else Mask.of_documents(*self.documents)

    def drop(self, x_TD: Tensor, *, layer: int, site: int) -> Tensor:
        """Drop elements of a replicated activation."""
        key = self.dropout
        if key is None:
            return x_TD
        dropped_BSD = dropout(
            x_TD.unflatten(0, (-1, self.seq_length)), key.p, seed=key.seed, step=key.step, layer=layer, site=site,
            first_sample=self.first_sample,
        )  # fmt: skip
        return dropped_BSD.flatten(0, 1)
