"""FlashAttention's own packages where they are installed: `flash_attn` 2.7 or later, `flash_attn_interface` (3), and 4.

Source: Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024. Nothing here imports them before use.
"""

import os
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trainer.ops.attention.seam import Gradients, Mask, Saved, as_rows, lse_by_head, lse_by_row, refuses_half

INTERFACE_4 = "flash_attn.cute.interface"


class Flash2:
    """Version 2: every mask, ALiBi included; deterministic where torch's algorithms are asked to be."""

    name = "flash-2"
    drops_weights = False

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        return refuses_half(q_TNH, 256) or _missing("flash_attn.flash_attn_interface", "_flash_attn_varlen_backward")

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        package = import_module("flash_attn.flash_attn_interface")
        how = _how_2(q_TNH, mask) | {"return_softmax": False}
        if mask.cu_q is not None:
            out, lse, *_ = package._flash_attn_varlen_forward(q_TNH, k_UKH, v_UKH, *mask.bounds, **how)
            return out, lse
        out, lse, *_ = package._flash_attn_forward(*as_rows(mask, q_TNH, k_UKH, v_UKH), **how)
        return out.flatten(0, 1), lse_by_head(lse)

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        q_TNH, k_UKH, v_UKH, out_TNH, lse_NT = saved
        package = import_module("flash_attn.flash_attn_interface")
        dq, dk, dv = grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_TNH, k_UKH, v_UKH)]
        how = _how_2(q_TNH, mask) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        tensors = (dout_TNH, q_TNH, k_UKH, v_UKH, out_TNH)
        if mask.cu_q is not None:
            package._flash_attn_varlen_backward(*tensors, lse_NT.contiguous(), *grads, *mask.bounds, **how)
        else:
            package._flash_attn_backward(
                *as_rows(mask, *tensors), lse_by_row(lse_NT, mask), *as_rows(mask, *grads), **how
            )
        return dq, dk, dv


class Flash3:
    """Version 3, for Hopper: causal rows and documents."""

    name = "flash-3"
    drops_weights = False

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        if mask.window is not None or mask.alibi is not None:
            return "no window and no ALiBi through it"
        return refuses_half(q_TNH, 256, major=9) or _missing("flash_attn_interface", "_flash_attn_backward")

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        forward = import_module("flash_attn_interface")._flash_attn_forward
        out, lse, *_ = forward(*as_rows(mask, q_TNH, k_UKH, v_UKH), **_how_3(q_TNH, mask))
        return (out, lse) if mask.cu_q is not None else (out.flatten(0, 1), lse_by_head(lse))

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        q_TNH, k_UKH, v_UKH, out_TNH, lse_NT = saved
        dq, dk, dv = grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_TNH, k_UKH, v_UKH)]
        tensors = as_rows(mask, dout_TNH, q_TNH, k_UKH, v_UKH, out_TNH)
        lengths = (None, None) if mask.cu_q is None else (mask.max_q, mask.max_k)
        scale = q_TNH.shape[-1] ** -0.5
        backward = import_module("flash_attn_interface")._flash_attn_backward
        lse = lse_by_row(lse_NT, mask)
        # by position: the names of the last arguments changed between releases
        backward(*tensors, lse, mask.cu_q, mask.cu_k, None, None, *lengths, *as_rows(mask, *grads), scale, True)
        return dq, dk, dv


class Flash4:
    """Version 4 (`flash-attn-4`), for Hopper and Blackwell: causal rows, documents and a window.

    It compiles each kind of call at its first use, for seconds, and keeps what it compiled in the user's temporary
    folder, or where FLASH_ATTENTION_CUTE_DSL_CACHE_DIR points.
    """

    name = "flash-4"
    drops_weights = False

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        if mask.alibi is not None:
            return "no ALiBi through it"
        if q_TNH.shape[2] % 32:  # of 4.0.0b36, heads of 16 have wrong gradients on sm_90
            return f"heads of {q_TNH.shape[2]}: it takes multiples of 32"
        return refuses_half(q_TNH, 128, major=9) or _missing_4()

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        forward = import_module(INTERFACE_4)._flash_attn_fwd
        out, lse, *_ = forward(*as_rows(mask, q_TNH, k_UKH, v_UKH), return_lse=True, **_how_3(q_TNH, mask))
        return (out, lse) if mask.cu_q is not None else (out.flatten(0, 1), lse_by_head(lse))

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        q_TNH, k_UKH, v_UKH, out_TNH, lse_NT = saved
        how = _how_3(q_TNH, mask) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        tensors = as_rows(mask, q_TNH, k_UKH, v_UKH, out_TNH, dout_TNH)
        grads = import_module(INTERFACE_4)._flash_attn_bwd(*tensors, lse_by_row(lse_NT, mask), **how)[:3]
        dq, dk, dv = grads if mask.cu_q is not None else (each.flatten(0, 1) for each in grads)
        return dq, dk, dv


@cache
def _missing_4() -> str | None:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read at its import
    warnings.filterwarnings("ignore", r"Argument aux_data ", UserWarning)  # its compiler's, of what is not used here
    return _missing(INTERFACE_4, "_flash_attn_bwd")


@cache
def _missing(module: str, name: str) -> str | None:
    try:
        return None if hasattr(import_module(module), name) else f"{module} has no {name}: it is too old"
    except ImportError as error:
        return f"{module.partition('.')[0]} is not installed ({error})"


def _how_2(q_TNH: Tensor, mask: Mask) -> dict[str, Any]:
    left, right = (-1, -1) if mask.window is None else (mask.window - 1, 0)
    return {
        "dropout_p": 0.0, "softmax_scale": q_TNH.shape[-1] ** -0.5, "causal": True, "window_size_left": left,
        "window_size_right": right, "softcap": 0.0, "alibi_slopes": mask.alibi,
    }  # fmt: skip


def _how_3(q_TNH: Tensor, mask: Mask) -> dict[str, Any]:
    how: dict[str, Any] = {"softmax_scale": q_TNH.shape[-1] ** -0.5, "causal": True}
    if mask.window is not None:
        how |= {"window_size_left": mask.window - 1, "window_size_right": 0}
    if mask.cu_q is not None:
        how |= {"cu_seqlens_q": mask.cu_q, "cu_seqlens_k": mask.cu_k}
        how |= {"max_seqlen_q": mask.max_q, "max_seqlen_k": mask.max_k}
    return how
