"""HostBatch: the rows of one step in one buffer of host memory, the caller's or its own; BatchOptions, its options."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from datakit.format.native import address_of
from datakit.format.shard import Int64s
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

    With `pad_to_multiple_of`, a batch of packed rows ends with its longest row, rounded up to a multiple of that but to
    no more than a whole row: of rows that hold 70 and 90 tokens of 256, with 64, both have 128. Padding alone is lost.
    """

    mask_eod_loss: bool = False
    reset_positions: bool = False
    document_bounds: bool = False
    pad_to_multiple_of: int = 0

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of < 0:
            raise UserError(f"pad_to_multiple_of {self.pad_to_multiple_of}", hint="64, say; 0 leaves rows whole")

    def width(self, longest: int, seq_length: int) -> int:
        """Return the columns of a batch whose rows hold up to `longest` tokens of `seq_length`."""
        multiple = self.pad_to_multiple_of
        return min(-(-longest // multiple) * multiple, seq_length) if multiple > 0 else seq_length


PLAIN = BatchOptions()


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Rows of a step in one buffer, of which arrays of one `shape`, [..., seq_length], are views.

    tokens, labels (the next token) and positions are int64, loss_mask is float32. In a buffer of `num_bytes(shape)` all
    four follow each other, without gaps: of shape [2, 3, 4], 24 tokens, they begin at bytes 0, 192, 384 and 576 of 672.

    A smaller buffer holds tokens alone, [..., seq_length + 1], of which tokens and labels are views that overlap: of
    shape [2, 3, 4] it has 240 bytes. Positions then count from 0 in each row, the loss mask is 1; both are read-only.

    `first_sample` is the global number of the first sample. `epochs` says of a step, for each store of the blend, how
    many whole epochs of it the stream has read once this step is consumed; a single sample has none. `cu_seqlens` are
    the bounds of documents among all tokens, [0, ..., tokens], if they were asked for: each row begins a document, and
    so does padding. They are beside the buffer, as their number differs from batch to batch.
    """

    buffer: Bytes
    shape: tuple[int, ...]
    first_sample: int = 0
    epochs: tuple[int, ...] = ()
    cu_seqlens: Int32s | None = None

    @property
    def tokens(self) -> Int64s:
        """The rows' tokens."""
        return self._arrays[0]

    @property
    def labels(self) -> Int64s:
        """The token after each."""
        return self._arrays[1]

    @property
    def positions(self) -> Int64s:
        """The place of each token in its row, or in its document."""
        positions = self._arrays[2]
        return np.broadcast_to(_counted(self.shape[-1]), self.shape) if positions is None else positions

    @property
    def loss_mask(self) -> npt.NDArray[np.float32]:
        """1 where a token's loss counts, else 0."""
        mask = self._arrays[3]
        return np.broadcast_to(np.float32(1), self.shape) if mask is None else mask

    @property
    def _arrays(self) -> tuple[Int64s, Int64s, Int64s | None, npt.NDArray[np.float32] | None]:
        return self.split(self.buffer, self.shape, np.int64, np.float32)

    @property
    def is_tokens_only(self) -> bool:
        """Whether the buffer holds nothing but tokens."""
        return self.buffer.size != self.num_bytes(self.shape)

    @staticmethod
    def num_bytes(shape: Sequence[int], *, tokens_only: bool = False) -> int:
        """Return the size of the buffer of a batch."""
        num_tokens = math.prod(shape)
        return 8 * (num_tokens + num_tokens // shape[-1]) if tokens_only else num_tokens * BYTES_A_TOKEN

    @classmethod
    def over(cls, buffer: Bytes, shape: Sequence[int], *, tokens_only: bool = False) -> "HostBatch":
        """Return a batch whose arrays are `buffer` as it is; UserError unless that is `num_bytes(shape)` bytes.

        With `tokens_only` it may have that size too. The buffer is a writable, contiguous array of uint8 in one dim, at
        an address that 8 divides.
        """
        expected = cls.num_bytes(shape)
        hint = f"np.empty({expected}, np.uint8), or torch.empty({expected}, dtype=torch.uint8).numpy()"
        if not isinstance(buffer, np.ndarray):
            raise UserError(f"the memory of a batch is a {type(buffer).__name__}, not a numpy array", hint=hint)
        is_large = buffer.shape == (expected,)
        if buffer.dtype != np.uint8 or not (
            is_large or (tokens_only and buffer.shape == (cls.num_bytes(shape, tokens_only=True),))
        ):
            raise UserError(
                f"the memory of a batch of shape {list(shape)} is {buffer.dtype}{list(buffer.shape)}, "
                f"uint8[{expected}] expected",
                hint=hint,
            )
        flags = buffer.flags
        if not flags.c_contiguous or not flags.writeable or address_of(buffer) % 8:
            raise UserError("the memory of a batch is read-only, has gaps or is not aligned to 8 bytes", hint=hint)
        return cls(buffer, tuple(shape))

    @classmethod
    def split(cls, buffer: Any, shape: Sequence[int], int64: Any, float32: Any) -> tuple[Any, Any, Any, Any]:
        """Return tokens, labels, positions and loss mask as views of a buffer: a numpy array, or a tensor of torch.

        `int64` and `float32` are the types of that library. Of a buffer of tokens alone the last two are None.
        """
        if len(buffer) != cls.num_bytes(shape):
            rows = buffer.view(int64).reshape(*shape[:-1], shape[-1] + 1)
            return rows[..., :-1], rows[..., 1:], None, None
        wide_bytes = 24 * math.prod(shape)
        tokens, labels, positions = buffer[:wide_bytes].view(int64).reshape(3, *shape)
        return tokens, labels, positions, buffer[wide_bytes:].view(float32).reshape(shape)

    @classmethod
    def allocate(cls, num_rows: int, seq_length: int, *, tokens_only: bool = False) -> "HostBatch":
        """Return an uninitialised batch of shape [num_rows, seq_length]."""
        shape = num_rows, seq_length
        return cls(np.empty(cls.num_bytes(shape, tokens_only=tokens_only), np.uint8), shape)

    def cut(self, seq_length: int) -> "HostBatch":
        """Return a batch of rows as long or shorter, yet to be made, at the beginning of this one's memory."""
        shape = *self.shape[:-1], seq_length
        return self if shape == self.shape else HostBatch(self.buffer[: self.num_bytes(shape)], shape)

    def reshaped(self, *shape: int, first_sample: int, epochs: tuple[int, ...] = ()) -> "HostBatch":
        """Return the same memory in another shape of equal rows, with its place in the stream."""
        return HostBatch(self.buffer, shape, first_sample, epochs, self.cu_seqlens)

    def documents(self, number: int = 0, count: int = 1) -> tuple[Int32s, int]:
        """Return the bounds of documents in one of `count` equal parts of the batch, and its longest document's tokens.

        Parts are whole rows, say the micro-batches of a step.
        """
        assert self.cu_seqlens is not None, "documents' bounds were asked for"
        num_tokens = math.prod(self.shape) // count
        first, last = np.searchsorted(self.cu_seqlens, [number * num_tokens, (number + 1) * num_tokens])
        bounds: Int32s = self.cu_seqlens[first : last + 1] - np.int32(number * num_tokens)
        return bounds, int(np.diff(bounds).max())


@cache
def _counted(seq_length: int) -> Int64s:
    return np.arange(seq_length)
