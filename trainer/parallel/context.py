"""Context parallel: each row's tokens are cut over ranks, and attention sees all of them, in one of two ways.

Ranks trade tokens for heads (Jacobs et al., 2023, arXiv 2309.14509): before attention each has all heads of some
tokens, in it some heads of all tokens, and the other way round behind it. So any backend and any mask is the same as on
one rank. For example 8 tokens of 4 heads on two ranks: rank 1 has heads 0-3 of tokens 4-7, and attends with heads 2 and
3 of tokens 0-7.

Or they gather keys and values (Llama 3: Dubey et al., 2024, arXiv 2407.21783), whose heads may then be fewer. A rank
has two chunks of each row, as far from its begin as from its end, so that all have as much to compute: of 8 tokens
rank 0 has 0, 1, 6 and 7, rank 1 has 2-5. Each half of a rank's tokens attends by itself, with a mask of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.mesh.group import Group
from trainer.ops.attention.seam import Backend, Gradients, Mask, attention, check
from trainer.ops.dtypes import wide_dtype
from trainer.parallel.places import Runs, halves_of, share_of

WORD = torch.complex128


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The group over which each row's tokens are cut: T below are this rank's tokens, S those of all ranks."""

    group: Group
    gathers_keys: bool = False

    def own_runs(self, run: range, length: int) -> Runs:
        """Return this rank's places of a run of rows."""
        if self.gathers_keys:
            return halves_of(run, length, self.group.index, self.group.size)
        return share_of((run,), self.group.index, self.group.size)

    def halves(self, tokens_T: Tensor, documents: tuple[Tensor, int] | None, length: int) -> tuple[Mask, ...]:
        """Return the masks of the halves of this rank's tokens of rows of `length`; none unless keys are gathered."""
        if not self.gathers_keys:
            return ()
        num_tokens, num_chunks = len(tokens_T) * self.group.size, 2 * self.group.size
        size, numbers = length // num_chunks, (self.group.index, num_chunks - 1 - self.group.index)
        if documents is None and num_tokens == length:  # one row: later keys are left out
            return tuple(Mask(None, None, size, (number + 1) * size) for number in numbers)
        bounds = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=tokens_T.device)
        longest = length
        if documents is not None:
            bounds, longest = documents
        return tuple(half_mask(bounds, longest, num_tokens, length, range(n * size, n * size + size)) for n in numbers)

    def attend(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        masks: Sequence[Mask],
        length: int,
        backend: Backend,
        results: list[Tensor] | None,
    ) -> Tensor:
        """Return `attention` of this rank's tokens [T, N, H], with a mask of all of them or of each half.

        Rows have `length` tokens; `results` is as there.
        """
        if self.group.size == 1:
            return attention(q_TNH, k_TKH, v_TKH, masks[0], backend, results)
        if self.gathers_keys:
            return _ToKeys.apply(q_TNH, k_TKH, v_TKH, _Halves(self.group, masks, length, backend), results)
        q_SNH, k_SKH, v_SKH = _ToHeads.apply(q_TNH, k_TKH, v_TKH, self.group)
        return _ToTokens.apply(attention(q_SNH, k_SKH, v_SKH, masks[0], backend, results), self.group)


def half_mask(bounds: Tensor, longest: int, num_tokens: int, length: int, chunk: range) -> Mask:
    """Return what the queries of one chunk of each row see of the keys of all rows.

    Documents end with the chunk's last query; what is behind it is a document without queries, as are those before. Of
    one row of 8 tokens, documents [0, 3, 8] and the chunk 4-5, `cu_k` is [0, 3, 6, 8] and `cu_q` [0, 0, 2, 2].
    """
    ends = torch.arange(chunk.stop, num_tokens, length, dtype=bounds.dtype, device=bounds.device)
    if chunk.stop == length:
        ends = ends[:0]  # the rows' own
    cu_k = torch.cat([bounds, ends]).sort().values
    row, place = cu_k // length, cu_k % length
    cu_q = row * len(chunk) + (place - chunk.start).clamp(0, len(chunk))
    return Mask(cu_q.int(), cu_k.int(), min(longest, len(chunk)), min(longest, chunk.stop))


@dataclass(frozen=True, slots=True)
class _Halves:
    """The halves of a rank's queries, each with the mask under which it sees the keys of all ranks."""

    group: Group
    masks: Sequence[Mask]
    length: int
    backend: Backend

    def gathered(self, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Return the keys and values of all ranks, [S, 2 K, H], in the order of rows."""
        whole_SCH = self.group.start_gather(torch.cat([k_TKH, v_TKH], 1)).wait()
        first, second = whole_SCH.unflatten(0, (self.group.size, 2, -1, self._size)).unbind(1)  # [R, B, S / 2 R B, ...]
        return torch.cat([first, second.flip(0)]).transpose(0, 1).flatten(0, 2)

    def scattered(self, dkv_SCH: Tensor) -> Tensor:
        """Return the sum over ranks of the gradients of this rank's keys and values, [T, 2 K, H]."""
        first, second = dkv_SCH.unflatten(0, (-1, 2 * self.group.size, self._size)).transpose(0, 1).chunk(2)
        return self.group.start_scatter(torch.stack([first, second.flip(0)], 1).flatten(0, 3)).wait()

    def of(self, kv_SCH: Tensor) -> list[tuple[slice, Mask, Tensor]]:
        """Return for each half its tokens, its mask, and the keys and values that this is of."""
        seen = [kv_SCH if mask.cu_k is not None else kv_SCH[: mask.max_k] for mask in self.masks]
        half = len(kv_SCH) // self.group.size // 2
        return list(zip((slice(0, half), slice(half, 2 * half)), self.masks, seen, strict=True))

    @property
    def _size(self) -> int:
        return self.length // (2 * self.group.size)


class _ToKeys(torch.autograd.Function):
    """Attention of a rank's tokens to gathered keys, which the backward gathers again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, halves: _Halves, results: list[Tensor] | None) -> Tensor:
        made = results
        if not made:
            parts = []
            for tokens, mask, kv in halves.of(halves.gathered(k, v)):
                k_half, v_half = kv.chunk(2, 1)
                check(q[tokens], k_half, v_half, mask, halves.backend)
                parts.append(halves.backend.forward(q[tokens], k_half, v_half, mask))
            made = [torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)]
        if results is not None:
            results[:] = made
        ctx.save_for_backward(q, k, v, *made)
        ctx.halves = halves
        return made[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        halves: _Halves = ctx.halves
        kv_SCH, dqs = halves.gathered(k, v), list[Tensor]()
        dkv_SCH = torch.zeros(kv_SCH.shape, dtype=wide_dtype(k.dtype), device=k.device)
        for tokens, mask, kv in halves.of(kv_SCH):
            k_half, v_half = kv.chunk(2, 1)
            saved = q[tokens], k_half, v_half, out[tokens], lse[:, tokens]
            dq, *dkv = halves.backend.backward(dout[tokens].contiguous(), saved, mask)
            dqs.append(dq)
            for sums, part in zip(dkv_SCH[: len(kv)].chunk(2, 1), dkv, strict=True):
                sums += part
        dk, dv = halves.scattered(dkv_SCH).to(k.dtype).chunk(2, 1)
        return torch.cat(dqs), dk, dv, None, None


class _ToHeads(torch.autograd.Function):
    """All heads of some tokens become some heads of all tokens, by one exchange of q, k and v packed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group) -> Gradients:
        ctx.group, ctx.shapes = group, [x.shape for x in (q, k, v)]
        counts = [-(-x.shape[1] // group.size) for x in (q, k, v)]  # of a rank; fewer heads than ranks are repeated
        packed_RTCH = q.new_empty(group.size, len(q), sum(counts), q.shape[2])
        for part_RTCH, x in zip(packed_RTCH.split(counts, 2), (q, k, v), strict=True):
            in_wide_words(part_RTCH).copy_(in_wide_words(_by_rank(x, group.size)))
        q, k, v = group.start_exchange(packed_RTCH).wait().flatten(0, 1).split(counts, 1)
        return q, k, v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        counts = [x.shape[1] for x in grads]
        received = ctx.group.start_exchange(torch.cat(grads, 1)).wait()  # tokens of one rank after the other
        parts = received.unflatten(0, (ctx.group.size, -1)).split(counts, 2)
        dq, dk, dv = (_by_token(part, shape) for part, shape in zip(parts, ctx.shapes, strict=True))
        return dq, dk, dv, None


class _ToTokens(torch.autograd.Function):
    """Some heads of all tokens become all heads of some tokens."""

    @staticmethod
    def forward(ctx: Any, x_SNH: Tensor, group: Group) -> Tensor:
        ctx.group = group
        received_RTNH = group.start_exchange(x_SNH.contiguous()).wait().unflatten(0, (group.size, -1))
        return contiguous(received_RTNH.transpose(0, 1)).flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TNH: Tensor) -> tuple[Tensor, None]:
        packed_RTNH = contiguous(_by_rank(dy_TNH, ctx.group.size))
        return ctx.group.start_exchange(packed_RTNH).wait().flatten(0, 1), None


def _by_rank(x_TNH: Tensor, num_ranks: int) -> Tensor:
    """Return a view [R, T, N / R, H] of what each rank gets; of fewer heads than ranks, neighbours get the same."""
    repeats = max(num_ranks // x_TNH.shape[1], 1)
    parts_TRNH = x_TNH.unflatten(1, (num_ranks // repeats, -1)).transpose(0, 1)
    return parts_TRNH if repeats == 1 else parts_TRNH.repeat_interleave(repeats, 0)


def _by_token(x_RTNH: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient [T, N, H] of `_by_rank`; what several ranks have of one head is added in the wide dtype."""
    repeats = len(x_RTNH) * x_RTNH.shape[2] // shape[1]
    if repeats > 1:
        x_RTNH = x_RTNH.unflatten(0, (-1, repeats)).sum(1, dtype=wide_dtype(x_RTNH.dtype)).to(x_RTNH.dtype)
    return contiguous(x_RTNH.transpose(0, 1)).flatten(1, 2)


def contiguous(x: Tensor) -> Tensor:
    """Return a tensor whose elements are in order, copied at the rate of memory if they are not."""
    return x if x.is_contiguous() else in_wide_words(x).contiguous().view(x.dtype)


def in_wide_words(x: Tensor) -> Tensor:
    """Return a view of words of 16 bytes, which copy faster than numbers of 2 where others are left out between them.

    It is the tensor itself if words would not be whole.
    """
    numbers = WORD.itemsize // x.element_size()
    strides = (*x.stride()[:-1], x.shape[-1], x.storage_offset())
    return x.view(WORD) if x.stride(-1) == 1 and not any(number % numbers for number in strides) else x
