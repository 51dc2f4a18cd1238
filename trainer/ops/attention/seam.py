"""The seam: what an attention backend is asked, what it must answer, and the autograd function on top.

A backend returns, with its result, the log of each softmax's denominator (lse): that is what context parallelism needs
to join the results of parts of the keys. Its backward is a call of its own and nothing else is saved, so a caller may
keep, recompute or move the tensors as it likes. Scores are q.k / sqrt(H); query head n reads key-value head n // (N/K).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops.attention.weights import WeightDropout
from trainer.ops.once import differentiable_once

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Which keys a query sees: those of its own document up to its own place, the last `window` of them.

    `cu_q` and `cu_k` are the int32 bounds of documents among the tokens, [0, ..., T] and [0, ..., U]; None cuts the
    tokens into documents of equal length `max_q`, `max_k`. The longest ones have `max_q` and `max_k` tokens. The last
    query of a document is at the place of its last key. `alibi` [N], float32: head n's score falls by alibi[n] a place.
    With a `dropout` weights are dropped behind the softmax.
    """

    cu_q: Tensor | None
    cu_k: Tensor | None
    max_q: int
    max_k: int
    window: int | None = None
    alibi: Tensor | None = None
    dropout: WeightDropout | None = None

    @classmethod
    def of_rows(cls, length: int) -> "Mask":
        """Return the causal mask of rows of one length, one after the other."""
        return cls(None, None, length, length)

    @classmethod
    def of_documents(cls, bounds: Tensor, longest: int) -> "Mask":
        """Return the causal mask of documents with these int32 bounds, [0, ..., T], the longest of so many tokens."""
        return cls(bounds, bounds, longest, longest)

    @property
    def kind(self) -> str:
        """Return what the layers of a model may differ in, as `window-4096-alibi`; nothing if all before is seen."""
        window = [] if self.window is None else [f"window-{self.window}"]
        return "-".join(window + ["alibi"] * (self.alibi is not None))

    @property
    def bounds(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        """Return all that says where documents are, as kernels take it."""
        return self.cu_q, self.cu_k, self.max_q, self.max_k

    def documents(self, num_q: int, num_k: int) -> list[tuple[slice, slice]]:
        """Return each document's places among the queries and the keys; waits for the device if there are bounds.

        >>> Mask.of_rows(3).documents(6, 6)
        [(slice(0, 3, None), slice(0, 3, None)), (slice(3, 6, None), slice(3, 6, None))]
        """
        bounds_q = range(0, num_q + 1, self.max_q) if self.cu_q is None else self.cu_q.tolist()
        bounds_k = range(0, num_k + 1, self.max_k) if self.cu_k is None else self.cu_k.tolist()
        spans = [[slice(*ends) for ends in pairwise(bounds)] for bounds in (bounds_q, bounds_k)]
        return list(zip(*spans, strict=True))


Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # of a forward: q, k, v, its result [T, N, H] and the lse [N, T]
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v; dense or not, but neighbours in H are neighbours in memory


class Backend(Protocol):
    """One way to compute attention; shapes as in `attention`."""

    name: str
    drops_weights: bool  # of masks with a dropout

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        """Return why it cannot take these, or None; reads no device memory."""

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return the result [T, N, H] and the lse [N, T], float32 (float64 for float64)."""

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        """Return the gradients for that of the result."""


def attention(
    q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask, backend: Backend, results: list[Tensor] | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(H) under the mask) v [T, N, H]; differentiable once.

    T queries of N heads, U keys and values of K heads, which divide N. Raises UserError for what does not fit or what
    the backend refuses. If `results` is not empty, it has the result and the lse from before, and no other are made; an
    empty one gets them.
    """
    check(q_TNH, k_UKH, v_UKH, mask, backend)
    return _Attention.apply(q_TNH, k_UKH, v_UKH, mask, backend, results)


def check(q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask, backend: Backend) -> None:
    """Raise UserError where shapes, dtypes or the mask do not fit each other, or the backend refuses them."""
    shapes = f"q {list(q_TNH.shape)}, k {list(k_UKH.shape)}, v {list(v_UKH.shape)}"
    if not q_TNH.dim() == k_UKH.dim() == 3 or k_UKH.shape != v_UKH.shape or q_TNH.shape[2] != k_UKH.shape[2]:
        raise UserError(f"attention: {shapes} are not [T, N, H], [U, K, H] and [U, K, H]")
    if q_TNH.shape[1] % k_UKH.shape[1]:
        raise UserError(f"attention: {k_UKH.shape[1]} key-value heads do not divide {q_TNH.shape[1]} query heads")
    if len({(x.dtype, x.device) for x in (q_TNH, k_UKH, v_UKH)}) > 1:
        raise UserError(f"attention: q, k and v are {q_TNH.dtype}, {k_UKH.dtype}, {v_UKH.dtype}; they must agree")
    if (mask.cu_q is None) != (mask.cu_k is None):
        raise UserError("attention: a mask has bounds of both queries and keys, or of none")
    if mask.cu_q is None and (
        len(q_TNH) % mask.max_q or len(k_UKH) % mask.max_k or len(q_TNH) // mask.max_q != len(k_UKH) // mask.max_k
    ):
        raise UserError(f"attention: {shapes} are not rows of {mask.max_q} queries and {mask.max_k} keys")
    if mask.window is not None and mask.window < 1:
        raise UserError(f"attention: the window is {mask.window}; a query sees at least one key")
    if mask.dropout is not None and not backend.drops_weights:
        raise UserError(f"attention: {backend.name} drops no weights", hint="the backend `reference` does")
    if reason := backend.refusal(q_TNH, k_UKH, mask):
        raise UserError(
            f"attention: {backend.name} cannot take q {list(q_TNH.shape)} {q_TNH.dtype} on {q_TNH.device}: {reason}",
            hint="the backend `reference` takes everything",
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, backend: Backend, results: list[Tensor] | None
    ) -> Tensor:
        out, lse = results or backend.forward(q, k, v, mask)
        if results is not None:
            results[:] = out, lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.backend = mask, backend
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        return *ctx.backend.backward(dout, ctx.saved_tensors, ctx.mask), None, None, None


def as_rows(mask: Mask, *tensors: Tensor) -> list[Tensor]:
    """Return views [B, S, N, H] of [T, N, H] where documents have one length; else the tensors themselves."""
    if mask.cu_q is not None:
        return list(tensors)
    return [x.unflatten(0, (len(tensors[0]) // mask.max_q, -1)) for x in tensors]


def lse_by_head(lse_BNS: Tensor) -> Tensor:
    """Return [N, T] of rows."""
    return lse_BNS.transpose(0, 1).flatten(1)


def lse_by_row(lse_NT: Tensor, mask: Mask) -> Tensor:
    """Return a dense [B, N, S] where documents have one length, else a dense [N, T]."""
    if mask.cu_q is not None:
        return lse_NT.contiguous()
    return lse_NT.unflatten(1, (-1, mask.max_q)).transpose(0, 1).contiguous()


def refuses_half(q_TNH: Tensor, most: int, *, major: int = 8) -> str | None:
    """Return why a kernel for 16 bits on GPUs from a compute capability on, heads up to `most`, cannot take q."""
    if q_TNH.device.type != "cuda" or q_TNH.dtype not in HALVES:
        return "it takes bfloat16 and float16 on cuda"
    if torch.cuda.get_device_capability(q_TNH.device)[0] < major:
        return f"it wants a GPU of compute capability {major} or more"
    size = q_TNH.shape[2]
    return f"heads of {size}: it takes multiples of 8 up to {most}" if size % 8 or size > most else None


def refuses_all_but_rows(mask: Mask, *, documents: bool) -> str | None:
    """Return what of a mask a kernel for causal self-attention of rows does not know."""
    if mask.window is not None or mask.alibi is not None:
        return "it knows no window and no ALiBi"
    if mask.cu_q is not None and not documents:
        return "it knows no documents of unequal length"
    is_self = mask.cu_q is mask.cu_k and mask.max_q == mask.max_k  # known without a look into device memory
    return None if is_self else "it wants queries and keys of the same tokens"
