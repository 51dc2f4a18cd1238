"""HostBatch: the rows of one step in one buffer of host memory."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from datakit.shard import Int64s

BYTES_A_TOKEN = 28  # three int64 and one float32


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Arrays of one shape [..., seq_length], all of them views of `buffer`.

    tokens, labels (the next token) and positions are int64, loss_mask is float32. `first_sample` is the global number
    of the step's first sample; `epochs` says, for each store of the blend, how many whole epochs of it the stream has
    read once this step is consumed.
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
        """An uninitialised batch of shape [num_rows, seq_length]."""
        shape = num_rows, seq_length
        size = num_rows * seq_length
        buffer = np.empty(size * BYTES_A_TOKEN, np.uint8)
        tokens, labels, positions = (buffer[8 * size * i : 8 * size * (i + 1)].view(np.int64) for i in range(3))
        mask = buffer[24 * size :].view(np.float32)
        return cls(buffer, tokens.reshape(shape), labels.reshape(shape), positions.reshape(shape), mask.reshape(shape))

    def reshaped(self, *shape: int, first_sample: int, epochs: tuple[int, ...]) -> "HostBatch":
        """The same memory in another shape, with its place in the stream."""
        arrays = {name: getattr(self, name).reshape(shape) for name in ("tokens", "labels", "positions", "loss_mask")}
        return replace(self, **arrays, first_sample=first_sample, epochs=epochs)
