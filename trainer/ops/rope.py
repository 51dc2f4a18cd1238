"""RoPE, with RMSNorm of each q and k head before it if asked for (QK-norm): one native pass over packed q|k|v.

A token's row holds N heads of q, K of k and K of v. Pairs (i, i + H/2) of a q or k head turn by the token's position
times theta^(-2i/H), as in Llama. Arithmetic is fp64 for fp64 tensors, else fp32; a result is rounded once.
The bits of a token depend on that token alone, on the CPU on no number of threads. The backward reads the gradients of
q, k and v wherever they are and writes the packed gradient. Sources: Su et al., "RoFormer", 2021; for QK-norm, Henry et
al., "Query-Key Normalization for Transformers", 2020.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.config import ModelConfig
from trainer.ops import forms, native
from trainer.ops.dtypes import wide_dtype
from trainer.ops.norm import Handles, add_norm_reference
from trainer.ops.once import differentiable_once


class _Heads(ctypes.Structure):  # op_heads of csrc/ops/ops.h
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_size")),
        *((name, ctypes.c_void_p) for name in ("turns", "q_weight", "k_weight")),
        ("eps", ctypes.c_double),
    )


class _Gradients(ctypes.Structure):  # op_head_gradients of csrc/ops/ops.h
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dv")),
        *((f"{name}_{of}_stride", ctypes.c_int64) for name in "qkv" for of in ("token", "head")),
    )


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMSNorm of each head of q and of k, with weights [H]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


def rope_turns(positions: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return cosines, then sines, of the angles at positions [T]: [T, H] in float32, or float64 for that dtype.

    Angles are computed in float64, so far positions keep their digits. Make it once a micro-batch: a layer reads 2 H
    numbers a token in place of computing them.
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64) / head_size
    return turns_at(positions, theta**-exponents, dtype)


def rotary_frequencies(model: ModelConfig, *, device: torch.device) -> Tensor:
    """Return the angle a position of each pair of a head, [H / 2], float64.

    llama3 counts the turns that a frequency makes in the original length. It divides those of few turns by the factor,
    leaves those of many, and takes a weighted mean in between (Llama 3.1).
    """
    size = model.head_size
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float64) / size
    frequencies = model.rope_theta**-exponents
    if model.rope_scaling == "none":
        return frequencies
    scaled = frequencies / model.rope_factor
    if model.rope_scaling == "linear":
        return scaled
    turns = model.rope_original_length * frequencies / (2 * math.pi)
    low, high = model.rope_low_factor, model.rope_high_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return share * frequencies + (1 - share) * scaled


def turns_at(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same of any frequencies [H / 2], the angles of a position, in float64."""
    angles = positions.reshape(-1, 1).to(torch.float64) * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).to(wide_dtype(dtype))


def rope(
    qkv_TC: Tensor,
    turns_TH: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    *,
    norm: QkNorm | None = None,
    in_place: bool = False,
    form: str = "csrc",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T, N, H], k and v [T, K, H] of packed heads [T, (N + 2K) H]; differentiable once.

    v is a view of qkv; so are q and k if `in_place`, which is for a qkv that nobody else reads, and without a norm,
    whose backward needs its input. turns_TH is from `rope_turns`; None turns nothing. Raises UserError for what does
    not fit.
    """
    _check(qkv_TC, turns_TH, num_heads, num_kv_heads, norm)
    if torch.compiler.is_compiling():
        return rope_reference(qkv_TC, turns_TH, num_heads, num_kv_heads, norm=norm)
    if in_place and norm is not None:
        raise UserError("rope: with a norm it cannot run in place", hint="in_place=False")
    if in_place and not qkv_TC.is_contiguous():
        raise UserError(f"rope: in place, qkv must be contiguous; its strides are {list(qkv_TC.stride())}")
    weights, eps = ((None, None), 0.0) if norm is None else ((norm.q_weight, norm.k_weight), norm.eps)
    dense = (None if x is None else x.contiguous() for x in (turns_TH, *weights))
    if in_place and not qkv_TC.is_inference():
        torch.autograd.graph.increment_version(qkv_TC)
    return _Rope.apply(qkv_TC.contiguous(), *dense, None, ((num_heads, num_kv_heads), eps, in_place, form))


def rope_of_handles(
    qkv_TC: Tensor, turns_TH: Tensor | None, counts: tuple[int, int], handles: Handles | None, eps: float, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same with a norm of weights that are not kept, or without one in place: nobody else reads qkv."""
    return _Rope.apply(qkv_TC, turns_TH, None, None, handles, (counts, eps, handles is None, form))


def rope_reference(
    qkv_TC: Tensor, turns_TH: Tensor | None, num_heads: int, num_kv_heads: int, *, norm: QkNorm | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same in plain torch, in the same precision."""
    _check(qkv_TC, turns_TH, num_heads, num_kv_heads, norm)
    q_weight, k_weight, eps = (None, None, 0.0) if norm is None else (norm.q_weight, norm.k_weight, norm.eps)
    return _reference(qkv_TC, turns_TH, q_weight, k_weight, eps, (num_heads, num_kv_heads))


def _reference(
    qkv_TC: Tensor, turns_TH: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    counts: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_heads, num_kv_heads = counts
    heads_TNH = qkv_TC.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads_TNH.split([num_heads, num_kv_heads, num_kv_heads], 1)
    wide = wide_dtype(qkv_TC.dtype)
    q, k = (
        x.to(wide) if weight is None else add_norm_reference(x.to(wide), None, weight.to(wide), None, eps)[0]
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return turned(q, turns_TH).to(qkv_TC.dtype), turned(k, turns_TH).to(qkv_TC.dtype), v


def turned(x_TNH: Tensor, turns_TH: Tensor | None) -> Tensor:
    """Return heads turned in plain torch, rounded once; the same heads if there are no turns."""
    if turns_TH is None:
        return x_TNH
    (cos, sin), (a, b) = turns_TH.unsqueeze(1).chunk(2, -1), x_TNH.to(turns_TH.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_TNH.dtype)


def _check(qkv: Tensor, turns: Tensor | None, num_heads: int, num_kv_heads: int, norm: QkNorm | None) -> None:
    num_packed = num_heads + 2 * num_kv_heads
    if qkv.dim() != 2 or num_heads < 1 or num_kv_heads < 1 or qkv.shape[1] % (2 * num_packed):
        raise UserError(
            f"rope: qkv {list(qkv.shape)} does not hold rows of {num_heads} + 2 * {num_kv_heads} heads of an even size"
        )
    size = qkv.shape[1] // num_packed
    if turns is not None and (turns.shape, turns.dtype) != ((len(qkv), size), wide_dtype(qkv.dtype)):
        raise UserError(
            f"rope: turns are {turns.dtype} {list(turns.shape)}, not {wide_dtype(qkv.dtype)} {[len(qkv), size]}",
            hint="make them with rope_turns(positions, head_size, theta, qkv.dtype)",
        )
    for weight in () if norm is None else (norm.q_weight, norm.k_weight):
        if weight.shape != (size,) or weight.dtype != qkv.dtype or weight.device != qkv.device:
            raise UserError(
                f"rope: a weight is {weight.dtype} {list(weight.shape)} on {weight.device}, not {qkv.dtype} [{size}] "
                f"on {qkv.device}"
            )


def rope_forward(
    qkv_TC: Tensor, turns_TH: Tensor | None, counts: tuple[int, int], norm: QkNorm | None, *, in_place: bool,
    form: str = "csrc",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, k and v as `rope` does, for `counts` = (N, K); qkv, turns and weights are contiguous."""
    if form != "csrc":
        q, k, v = forms.forward(form, _reference, qkv_TC, turns_TH, *_weights(norm, qkv_TC.dtype), counts)
        return q, k, v
    num_heads, num_kv_heads = counts
    size = qkv_TC.shape[1] // (num_heads + 2 * num_kv_heads)
    turned = qkv_TC if in_place else qkv_TC.new_empty(qkv_TC.shape[0], (num_heads + num_kv_heads) * size)
    heads = _heads(qkv_TC, turns_TH, counts, norm)
    native.call("rope_forward", qkv_TC, ctypes.byref(heads), qkv_TC.data_ptr(), turned.data_ptr(), turned.shape[1])
    k_end = (num_heads + num_kv_heads) * size
    q, k = turned[:, : num_heads * size], turned[:, num_heads * size : k_end]
    num_tokens = qkv_TC.shape[0]
    return (
        q.view(num_tokens, num_heads, size),
        k.view(num_tokens, num_kv_heads, size),
        qkv_TC[:, k_end:].view(num_tokens, num_kv_heads, size),
    )


def rope_backward(
    gradients: tuple[Tensor, Tensor, Tensor], qkv_TC: Tensor | None, turns_TH: Tensor | None, norm: QkNorm | None, *,
    form: str = "csrc",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the packed gradient of qkv for those of q, k and v, and of the norms' weights: [2, H] in the wide dtype.

    Without a norm the second result is None, and qkv is not read.
    """
    dq, dk, dv = (each if each.stride(-1) == 1 else each.contiguous() for each in gradients)
    counts, size = (dq.shape[1], dk.shape[1]), dq.shape[2]
    dqkv = dq.new_empty(dq.shape[0], (counts[0] + 2 * counts[1]) * size)
    if form != "csrc":
        given = dqkv.zero_() if qkv_TC is None else qkv_TC, turns_TH, *_weights(norm, dqkv.dtype), counts
        wanted = (0,) if norm is None else (0, 2, 3)
        (dqkv, *dnorm), _ = forms.backward(form, _reference, wanted, (dq, dk, dv), *given)
        return dqkv, torch.stack(dnorm) if dnorm else None
    heads = _heads(dqkv, turns_TH, counts, norm)
    # a dim of one element may have any stride: 0 does not spoil its alignment
    strides = [0 if each.shape[dim] == 1 else each.stride(dim) for each in (dq, dk, dv) for dim in (0, 1)]
    pointers = _Gradients(*(each.data_ptr() for each in (dq, dk, dv)), *strides)
    dweights, sums = None, None
    if norm is not None:
        dweights = dqkv.new_empty(2, size, dtype=wide_dtype(dqkv.dtype))
        sums = dweights.new_empty(native.partials("rope", dqkv, ctypes.byref(heads)), 2 * size)
    inputs = ctypes.byref(heads), ctypes.byref(pointers), native.pointer(qkv_TC)
    native.call("rope_backward", dqkv, *inputs, dqkv.data_ptr(), native.pointer(dweights), native.pointer(sums))
    return dqkv, dweights


def _weights(norm: QkNorm | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, float]:
    """Return the weights, wide so that their gradients are not rounded, and eps."""
    wide = wide_dtype(dtype)
    return (None, None, 0.0) if norm is None else (norm.q_weight.to(wide), norm.k_weight.to(wide), norm.eps)


def _heads(qkv: Tensor, turns: Tensor | None, counts: tuple[int, int], norm: QkNorm | None) -> _Heads:
    size = qkv.shape[1] // (counts[0] + 2 * counts[1])
    weights, eps = ((None, None), 0.0) if norm is None else ((norm.q_weight, norm.k_weight), norm.eps)
    return _Heads(len(qkv), *counts, size, *map(native.pointer, (turns, *weights)), eps)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, turns: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
        handles: Handles | None, how: tuple[tuple[int, int], float, bool, str],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        qkv = qkv.detach()  # of the views of a detached tensor autograd keeps no trail
        counts, ctx.eps, in_place, ctx.form = how
        ctx.handles, norm = handles, _norm(handles, q_weight, k_weight, ctx.eps)
        ctx.save_for_backward(turns, q_weight, k_weight, None if norm is None else qkv)
        return rope_forward(qkv, turns, counts, norm, in_place=in_place, form=ctx.form)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        turns, q_weight, k_weight, qkv = ctx.saved_tensors
        norm = _norm(ctx.handles, q_weight, k_weight, ctx.eps)
        dqkv, dweights = rope_backward((dq, dk, dv), qkv, turns, norm, form=ctx.form)
        gradients: tuple[Tensor | None, ...] = (None, None)
        if ctx.handles is not None and dweights is not None:
            ctx.handles.take(tuple(dweights))
        elif dweights is not None:
            gradients = tuple(dweights.to(dqkv.dtype))
        return dqkv, None, *gradients, None, None


def _norm(handles: Handles | None, q_weight: Tensor | None, k_weight: Tensor | None, eps: float) -> QkNorm | None:
    q_weight, k_weight = (q_weight, k_weight) if handles is None else handles.read()
    return None if q_weight is None or k_weight is None else QkNorm(q_weight, k_weight, eps)
