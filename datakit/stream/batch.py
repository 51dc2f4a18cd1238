"""HostBatch: the rows of one step in one buffer of host memory, the caller's or its own; BatchOptions, its options."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from datakit.store.shard import Int64s
from datakit.stream.native import address_of
from threefold.errors import UserError

BYTES_A_TOKEN = 28  # three int64 and one float32
Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What positions and losses of a batch depend on besides its tokens.

    `mask_eod_loss` takes the loss off the positions whose token is an end of document (they would predict the next,
    unrelated document); `reset_positions` counts positions from 0 again after each of them. `document_bounds` notes
    where documents begin, for attention that does not cross them. Packed rows are always noted and reset so.
    """

    mask_eod_loss: bool = False
    reset_positions: bool = False
    document_bounds: bool = False


PLAIN = BatchOptions()


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Arrays of one shape [..., seq_length], all of them views of `buffer`.

    tokens, labels (the next token) and positions are int64, loss_mask is float32. They follow each other in the buffer
    in this order, without gaps: of shape [2, 3, 4], 24 tokens, they begin at bytes 0, 192, 384 and 576 of 672.

    `first_sample` is the global number of the first sample. `epochs` says of a step, for each store of the blend, how
    many whole epochs of it the stream has read once this step is consumed; a single sample has none. `cu_seqlens` are
    the bounds of documents among all tokens, [0, ..., tokens], if they were asked for: each row begins a document, and
    so does padding. They are beside the buffer, as their number differs from batch to batch.
    """

    buffer: Bytes
    tokens: Int64s
    labels: Int64s
    positions: Int64s
    loss_mask: npt.NDArray[np.float32]
    first_sample: int = 0
    epochs: tuple[int, ...] = ()
    cu_seqlens: Int32s | None = None

    @staticmethod
    def num_bytes(shape: Sequence[int]) -> int:
        """Return the size of the buffer of a batch."""
        return math.prod(shape) * BYTES_A_TOKEN

    @classmethod
    def over(cls, buffer: Bytes, shape: Sequence[int]) -> "HostBatch":
        """Return a batch whose arrays are `buffer` as it is; UserError unless that is `num_bytes(shape)` bytes.

        The buffer is a writable, contiguous array of uint8 in one dim, at an address that 8 divides.
        """
        expected = cls.num_bytes(shape)
        hint = f"np.empty({expected}, np.uint8), or torch.empty({expected}, dtype=torch.uint8).numpy()"
        if not isinstance(buffer, np.ndarray):
            raise UserError(f"the memory of a batch is a {type(buffer).__name__}, not a numpy array", hint=hint)
        if buffer.dtype != np.uint8 or buffer.shape != (expected,):
            raise UserError(
                f"the memory of a batch of shape {list(shape)} is {buffer.dtype}{list(buffer.shape)}, "
                f"uint8[{expected}] expected",
                hint=hint,
            )
        flags = buffer.flags
        if not flags.c_contiguous or not flags.writeable or address_of(buffer) % 8:
            raise UserError("the memory of a batch is read-only, has gaps or is not aligned to 8 bytes", hint=hint)
        return cls(buffer, *cls.split(buffer, shape, np.int64, np.float32))

    @staticmethod
    def split(buffer: Any, shape: Sequence[int], int64: Any, float32: Any) -> tuple[Any, Any, Any, Any]:
        """Return tokens, labels, positions and loss mask as views of a buffer: a numpy array, or a tensor of torch.

        `int64` and `float32` are the types of that library.
        """
        wide_bytes = 24 * math.prod(shape)
        tokens, labels, positions = buffer[:wide_bytes].view(int64).reshape(3, *shape)
        return tokens, labels, positions, buffer[wide_bytes:].view(float32).reshape(shape)

    @classmethod
    def allocate(cls, num_rows: int, seq_length: int) -> "HostBatch":
        """Return an uninitialised batch of shape [num_rows, seq_length]."""
        shape = num_rows, seq_length
        return cls.over(np.empty(cls.num_bytes(shape), np.uint8), shape)

    def reshaped(self, *shape: int, first_sample: int, epochs: tuple[int, ...] = ()) -> "HostBatch":
        """Return the same memory in another shape, with its place in the stream."""
        tokens, labels, positions = [array.reshape(shape) for array in (self.tokens, self.labels, self.positions)]
        arrays = self.buffer, tokens, labels, positions, self.loss_mask.reshape(shape)
        return HostBatch(*arrays, first_sample, epochs, self.cu_seqlens)

    def documents(self, number: int = 0, count: int = 1) -> tuple[Int32s, int]:
        """Return the bounds of documents in one of `count` equal parts of the batch, and its longest document's tokens.

        Parts are whole rows, say the micro-batches of a step.
        """
        assert self.cu_seqlens is not None, "documents' bounds were asked for"
        num_tokens = self.tokens.size // count
        first, last = np.searchsorted(self.cu_seqlens, [number * num_tokens, (number + 1) * num_tokens])
        bounds: Int32s = self.cu_seqlens[first : last + 1] - np.int32(number * num_tokens)
        return bounds, int(np.diff(bounds).max())
