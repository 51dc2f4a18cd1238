"""HostBatch: the rows of one step in one buffer of host memory."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datakit.store.shard import Int64s

BYTES_A_TOKEN = 28  # three int64 and one float32


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Arrays of one shape [..., seq_length], all of them views of `buffer`.

    tokens, labels (the next token) and positions are int64, loss_mask is float32. `first_sample` is the global number
    of the first sample. `epochs` says of a step, for each store of the blend, how many whole epochs of it the stream
    has read once this step is consumed; a single sample has none.
    """

    buffer: npt.NDArray[np.uint8]
    tokens: Int64s
    labels: Int64s
    positions: Int64s
    loss_mask: npt.NDArray[np.float32]
    first_sample: int = 0
    epochs: tuple[int, ...] = ()

    @classmethod
    def allocate(cls, num_rows: int, seq_length: int) -> "HostBatch":
        """Return an uninitialised batch of shape [num_rows, seq_length]."""
        shape = num_rows, seq_length
        size = num_rows * seq_length
        buffer = np.empty(size * BYTES_A_TOKEN, np.uint8)
        tokens, labels, positions = np.ndarray((3, *shape), np.int64, buffer)
        return cls(buffer, tokens, labels, positions, np.ndarray(shape, np.float32, buffer, 24 * size))

    def reshaped(self, *shape: int, first_sample: int, epochs: tuple[int, ...] = ()) -> "HostBatch":
        """Return the same memory in another shape, with its place in the stream."""
        tokens, labels, positions = [array.reshape(shape) for array in (self.tokens, self.labels, self.positions)]
        return HostBatch(self.buffer, tokens, labels, positions, self.loss_mask.reshape(shape), first_sample, epochs)
