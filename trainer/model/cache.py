"""Keys and values of tokens that were read, so that a further token costs the computation of itself alone.

A KeyValueCache takes the place at which context parallel lets a layer's heads see all tokens: layers hand it queries,
keys and values, and know nothing of it. Prompts attend by the run's own backend, a document each. A further token of
each row attends to what is kept, all rows in one call. Layers with a window keep no more than it: place p is in slot
p modulo the window, and softmax does not ask for an order. For example of 6 tokens a window of 4 has 4, 5, 2, 3.

Letters beside those of blocks: B rows, L slots, G = N / K query heads that read one key-value head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.model.attention import Attention
from trainer.model.microbatch import MicroBatch
from trainer.ops.attention.seam import Backend, Mask, attention
from trainer.ops.dtypes import wide_dtype

# not cuDNN's, which is the first on new GPUs: it builds a plan for each number of keys, so for each token
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one pass reads: the first tokens of some rows, or one further token of each.

    `starts` are the places of the rows' first tokens in it, `counts` their numbers. `last_B` are their last tokens
    among the S of the batch.
    """

    batch: MicroBatch
    rows: range
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    last_B: Tensor
    slots: dict[int, "Slots"] = field(default_factory=dict)  # by size: what layers of one size share

    @classmethod
    def of(cls, rows: range, starts: Sequence[int], tokens: Sequence[Sequence[int]], device: torch.device) -> "Turn":
        """Return the turn of rows whose tokens follow so many earlier ones."""
        counts = tuple(map(len, tokens))
        places = [start + place for start, count in zip(starts, counts, strict=True) for place in range(count)]
        flat, ends = [token for row in tokens for token in row], torch.tensor(counts).cumsum(0)
        tokens_S, positions_S = torch.tensor([flat, places], device=device)
        runs = (range(len(flat)),)
        batch = MicroBatch(tokens_S, tokens_S, positions_S, positions_S, len(flat), runs, None)
        return cls(batch, rows, tuple(starts), counts, (ends - 1).to(device))

    def slots_of(self, size: int) -> "Slots":
        """Return where one further token of each row goes, in layers that keep `size` tokens."""
        if size not in self.slots:
            self.slots[size] = Slots.of(self.starts, size, self.batch.tokens_S.device)
        return self.slots[size]


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of further tokens, the number of those in use behind them, and which of these a row has if not all."""

    number: int | Tensor
    num_used: int
    used_B11L: Tensor | None

    @classmethod
    def of(cls, places: Sequence[int], size: int, device: torch.device) -> "Slots":
        """Return those of one token of each row at these places, of which layers keep `size`.

        At places 2 and 5 of 4 slots the tokens go to 2 and 1; the first row has slots 0-2, the second all.
        """
        nums_used = [min(place + 1, size) for place in places]
        most = max(nums_used)
        if len(set(places)) == 1:
            return cls(places[0] % size, most, None)
        places_B = torch.tensor([place % size for place in places], device=device)
        if min(nums_used) == most:
            return cls(places_B, most, None)
        used_BL = torch.arange(most, device=device) < torch.tensor(nums_used, device=device).unsqueeze(1)
        return cls(places_B, most, used_BL[:, None, None])


class KeyValueCache:
    """What all layers of a rank keep of rows of tokens; owned by the thread that generates.

    `turn` is the pass under way.
    """

    def __init__(self, layers: Sequence[Attention], num_rows: int, size: int, dtype: torch.dtype, device: torch.device):
        """Make room for rows of at most `size` tokens."""
        self.turn: Turn
        self.rows_B = torch.arange(num_rows, device=device)
        self.layers = list[LayerCache]()
        for layer in layers:
            num_slots = size if layer.window is None else min(layer.window, size)
            shape = num_rows, layer.counts[1], num_slots, layer.head_size
            k_BKLH, v_BKLH = torch.zeros(2, *shape, dtype=dtype, device=device)  # a hidden slot still is a number
            self.layers.append(LayerCache(self, k_BKLH, v_BKLH))
        self._attentions = list(layers)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Take the place of context parallel in the layers, in passes that are enclosed."""
        places = [layer.context for layer in self._attentions]
        for layer, own in zip(self._attentions, self.layers, strict=True):
            layer.context = own
        try:
            with sdpa_kernel(KERNELS) if self.rows_B.is_cuda else nullcontext():  # a setting of all threads
                yield
        finally:
            for layer, place in zip(self._attentions, places, strict=True):
                layer.context = place

    def move(self, source: int, target: int) -> None:
        """Let a row be what another one is."""
        for layer in self.layers:
            for x_BKLH in (layer.k_BKLH, layer.v_BKLH):
                x_BKLH[target] = x_BKLH[source]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps."""

    cache: KeyValueCache
    k_BKLH: Tensor
    v_BKLH: Tensor

    def attend(
        self,
        q_SNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        masks: Sequence[Mask],
        length: int,
        backend: Backend,
        results: list[Tensor] | None,
    ) -> Tensor:
        """Keep keys and values, and return attention of the turn's queries to what is kept of their rows, [S, N, H]."""
        turn = self.cache.turn
        if any(turn.starts):
            return self._further(turn, q_SNH, k_SKH, v_SKH, masks[0].alibi)
        parts = zip(turn.rows, *(x.split(turn.counts) for x in (q_SNH, k_SKH, v_SKH)), strict=True)
        return torch.cat([self._first(row, q, k, v, masks[0], backend) for row, q, k, v in parts])

    def _first(self, row: int, q_SNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, like: Mask, backend: Backend) -> Tensor:
        num_tokens, size = len(k_SKH), self.k_BKLH.shape[2]
        slots_L = self.cache.rows_B.new_tensor(range(max(num_tokens - size, 0), num_tokens)) % size
        for kept_BKLH, new_SKH in ((self.k_BKLH, k_SKH), (self.v_BKLH, v_SKH)):
            kept_BKLH[row].index_copy_(1, slots_L, new_SKH[-size:].transpose(0, 1))
        mask = Mask(None, None, num_tokens, num_tokens, like.window, like.alibi)
        return attention(q_SNH, k_SKH, v_SKH, mask, backend)

    def _further(self, turn: Turn, q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, alibi_N: Tensor | None) -> Tensor:
        slots, rows = turn.slots_of(self.k_BKLH.shape[2]), slice(turn.rows.start, turn.rows.stop)
        k_BKLH, v_BKLH = self.k_BKLH[rows], self.v_BKLH[rows]
        for kept_BKLH, new_BKH in ((k_BKLH, k_BKH), (v_BKLH, v_BKH)):
            if isinstance(slots.number, int):
                kept_BKLH[:, :, slots.number] = new_BKH
            else:
                kept_BKLH[self.cache.rows_B[: len(new_BKH)], :, slots.number] = new_BKH
        k_BKLH, v_BKLH = k_BKLH[:, :, : slots.num_used], v_BKLH[:, :, : slots.num_used]
        q_BKGH = q_BNH.unflatten(1, (k_BKH.shape[1], -1))  # heads that share keys are queries of one head
        if alibi_N is None:
            return F.scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, slots.used_B11L).flatten(1, 2)
        bias_BKGL = self._fall(turn, slots, alibi_N.view(q_BKGH.shape[1:3]))
        q_BKGH, k_BKLH, v_BKLH = (x.to(wide_dtype(x.dtype)) for x in (q_BKGH, k_BKLH, v_BKLH))  # as scores are
        y_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, bias_BKGL.to(q_BKGH.dtype))
        return y_BKGH.to(q_BNH.dtype).flatten(1, 2)

    def _fall(self, turn: Turn, slots: Slots, slopes_KG: Tensor) -> Tensor:
        """Return what is added to the scores of slots, by how far each is behind its row's token."""
        numbers_L = torch.arange(slots.num_used, device=slopes_KG.device)
        distances_BL = (turn.batch.positions_S.unsqueeze(1) - numbers_L) % self.k_BKLH.shape[2]
        bias_BKGL = -slopes_KG.unsqueeze(-1) * distances_BL[:, None, None]
        return bias_BKGL if slots.used_B11L is None else bias_BKGL.masked_fill(~slots.used_B11L, -torch.inf)
