"""Squared norms of the gradients of parts, in one pass over all of them.

Squares are summed in float64, in an order that a part's length fixes on a device type.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.ops import native

CHUNK = 1 << 14  # elements that one block of threads walks


def chunk_table(sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return chunks of parts of some sizes as [part, begin, end], and the first chunk and the end of each part.

    For example a part of 20,000 elements has the chunks [0, 16384) and [16384, 20000), and its bounds are 0 and 2.
    """
    counts = torch.tensor(sizes)
    num_chunks = (counts + CHUNK - 1) // CHUNK
    ends = num_chunks.cumsum(0)
    owner = torch.repeat_interleave(num_chunks)
    begin = (torch.arange(len(owner)) - (ends - num_chunks)[owner]) * CHUNK
    chunks = torch.stack([owner, begin, torch.minimum(begin + CHUNK, counts[owner])], 1)
    return chunks, torch.stack([ends - num_chunks, ends], 1)


class Squares:
    """Where gradients are, in the memory of their device; owned by the training thread."""

    def __init__(self, gradients: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Note flat gradients, none of them empty, each with the row of its squared norm."""
        self._gradients, self._numbers = list(gradients), list(rows)
        if not self._gradients:
            return
        device = self._gradients[0].device
        chunks, bounds = chunk_table([gradient.numel() for gradient in self._gradients])
        numbers = [
            [gradient.data_ptr(), 0, 0, 0, 0, gradient.numel(), 0, row]
            for gradient, row in zip(self._gradients, rows, strict=True)
        ]
        self._chunks, self._rows = chunks.to(device), torch.cat([torch.tensor(numbers), bounds], 1).to(device)

    def write(self, out: Tensor) -> None:
        """Write the squared norm of each gradient into its row of `out`, float64; leave the other rows."""
        if not self._gradients:
            return
        assert out.dtype == torch.float64, out.dtype
        if native.lacks_kernels(out.device):
            rows = torch.tensor(self._numbers, device=out.device)
            out[rows] = torch.stack([gradient.double().square().sum() for gradient in self._gradients])
            return
        partials = out.new_empty(len(self._chunks))
        intervals, chunks = (self._rows.data_ptr(), len(self._rows)), (self._chunks.data_ptr(), len(self._chunks))
        native.call("squared_norms", self._gradients[0], *intervals, *chunks, partials.data_ptr(), out.data_ptr())
