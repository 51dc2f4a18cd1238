"""Context parallel: each row's tokens are cut over ranks, and attention sees all of them, in one of two ways.

Ranks trade tokens for heads (Jacobs et al., 2023, arXiv 2309.14509): before attention each has all heads of some
tokens, in it some heads of all tokens, and the other way round behind it. So any backend and any mask is the same as on
one rank. For example 8 tokens of 4 heads on two ranks: rank 1 has heads 0-3 of tokens 4-7, and attends with heads 2 and
3 of tokens 0-7. If each rank's heads can be cut in two, those of one half travel beside the attention of the other.

Or they gather keys and values (Llama 3: Dubey et al., 2024, arXiv 2407.21783), whose heads may then be fewer. A rank
has two chunks of each row, as far from its begin as from its end, so that all have as much to compute: of 8 tokens
rank 0 has 0, 1, 6 and 7, rank 1 has 2-5. Each half of a rank's tokens attends by itself, with a mask of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.mesh.group import Group, Work
from trainer.ops.attention.seam import Backend, Mask, attention, check
from trainer.ops.dtypes import wide_dtype
from trainer.ops.once import differentiable_once
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

    def seen_runs(self, runs: Runs) -> tuple[Runs, ...]:
        """Return the places of the queries that attention has: those of all ranks' tokens, or of each half of these."""
        if self.gathers_keys:
            return runs[: len(runs) // 2], runs[len(runs) // 2 :]
        first, size = runs[0].start, len(runs[0])
        start = first - self.group.index * size
        return ((range(start, start + self.group.size * size),),)

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
        return _ToHeads.apply(q_TNH, k_TKH, v_TKH, self.group, masks[0], backend, results)


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
    @differentiable_once
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
    """Attention of some heads of all tokens, for which ranks hand each other q, k and v, packed, and its result."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Group,
        mask: Mask,
        backend: Backend,
        results: list[Tensor] | None,
    ) -> Tensor:
        inputs, size = (q, k, v), group.size
        num_heads = [-(-x.shape[1] // size) for x in inputs]  # of a rank; fewer heads than ranks are repeated
        num_parts = 1 if any(number % 2 for number in num_heads) else 2
        ctx.group, ctx.backend, ctx.shapes = group, backend, [x.shape for x in inputs]
        ctx.counts = [number // num_parts for number in num_heads]
        firsts = [group.index * num_heads[0] + part * ctx.counts[0] for part in range(num_parts)]
        ctx.masks = [_of_heads(mask, range(first, first + ctx.counts[0])) for first in firsts]
        of_ranks = [_by_rank(x, size).chunk(num_parts, 2) for x in inputs]
        coming = [_start(group, parts) for parts in zip(*of_ranks, strict=True)]
        saved, returning, before = list[Tensor](), list[Work](), list(results or ())
        for mask_of_part in ctx.masks:
            q_SNH, k_SKH, v_SKH = coming.pop(0).wait().flatten(0, 1).split(ctx.counts, 1)
            check(q_SNH, k_SKH, v_SKH, mask_of_part, backend)
            out, lse = (before.pop(0), before.pop(0)) if before else backend.forward(q_SNH, k_SKH, v_SKH, mask_of_part)
            returning.append(group.start_exchange(out.contiguous()))
            saved += q_SNH, k_SKH, v_SKH, out, lse
        if results is not None:
            results[:] = [x for place, x in enumerate(saved) if place % 5 > 2]
        ctx.save_for_backward(*saved)
        return _by_token([work.wait().unflatten(0, (size, -1)) for work in returning], q.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        group, saved = ctx.group, ctx.saved_tensors
        of_parts = [saved[place : place + 5] for place in range(0, len(saved), 5)]
        coming = [_start(group, [part]) for part in _by_rank(dout, group.size).chunk(len(of_parts), 2)]
        returning = list[Work]()
        for of_part, mask in zip(of_parts, ctx.masks, strict=True):
            grads = ctx.backend.backward(coming.pop(0).wait().flatten(0, 1), of_part, mask)
            returning.append(group.start_exchange(torch.cat(grads, 1)))
        received = [work.wait().unflatten(0, (group.size, -1)).split(ctx.counts, 2) for work in returning]
        dq, dk, dv = (
            _by_token(parts, shape) for parts, shape in zip(zip(*received, strict=True), ctx.shapes, strict=True)
        )
        return dq, dk, dv, None, None, None, None


def _of_heads(mask: Mask, heads: range) -> Mask:
    """Return the mask of some of the heads."""
    dropout = None if mask.dropout is None else mask.dropout.of_heads(heads.start)
    return replace(mask, dropout=dropout, alibi=None if mask.alibi is None else mask.alibi[heads.start : heads.stop])


def _start(group: Group, parts_RTCH: Sequence[Tensor]) -> Work:
    """Begin to hand each rank its heads of several tensors, packed."""
    counts = [part.shape[2] for part in parts_RTCH]
    num_ranks, num_tokens, _, size = parts_RTCH[0].shape
    packed_RTCH = parts_RTCH[0].new_empty(num_ranks, num_tokens, sum(counts), size)
    for to_RTCH, part in zip(packed_RTCH.split(counts, 2), parts_RTCH, strict=True):
        copy_in_words(to_RTCH, part)
    return group.start_exchange(packed_RTCH)


def _by_rank(x_TNH: Tensor, num_ranks: int) -> Tensor:
    """Return a view [R, T, N / R, H] of what each rank gets; of fewer heads than ranks, neighbours get the same."""
    repeats = max(num_ranks // x_TNH.shape[1], 1)
    parts_TRNH = x_TNH.unflatten(1, (num_ranks // repeats, -1)).transpose(0, 1)
    return parts_TRNH if repeats == 1 else parts_TRNH.repeat_interleave(repeats, 0)


def _by_token(parts_RTNH: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return what ranks have of parts of their heads as one [T, N, H]: the way back of `_by_rank`.

    What several ranks have of one head, which is a gradient, is added in the wide dtype.
    """
    first, num_heads = parts_RTNH[0], sum(part.shape[2] for part in parts_RTNH)
    repeats = len(first) * num_heads // shape[1]
    if repeats > 1:
        summed = first.unflatten(0, (-1, repeats)).sum(1, dtype=wide_dtype(first.dtype)).to(first.dtype)
        return summed.transpose(0, 1).flatten(1, 2)
    whole_TRPNH = first.new_empty(shape[0], len(first), len(parts_RTNH), first.shape[2], shape[2])
    for to_TRNH, part in zip(whole_TRPNH.unbind(2), parts_RTNH, strict=True):
        copy_in_words(to_TRNH, part.transpose(0, 1))
    return whole_TRPNH.view(shape)


def copy_in_words(to: Tensor, x: Tensor) -> None:
    """Copy a tensor by words of 16 bytes, which is faster than by numbers of 2 where others are left out between them.

    Where words would not be whole, in either, numbers are copied.
    """
    if _has_words(to) and _has_words(x):
        to, x = to.view(WORD), x.view(WORD)
    to.copy_(x)


def _has_words(x: Tensor) -> bool:
    numbers = WORD.itemsize // x.element_size()
    places = (*x.stride()[:-1], x.shape[-1], x.storage_offset())
    return x.stride(-1) == 1 and not any(place % numbers for place in places)
