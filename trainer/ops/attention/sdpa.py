"""torch's own attention kernels, called with their backward and lse: the CPU's, FlashAttention-2, cuDNN's, CUTLASS's.

They are called below `scaled_dot_product_attention`, which picks one by rules of its own and keeps the lse to itself.
The names are of torch 2.11 to 2.13; a backend refuses if this torch lacks them. No operand is copied and no key-value
head repeated, but for CUTLASS, which knows no grouped heads.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.ops.attention.seam import (
    HALVES,
    Gradients,
    Mask,
    Saved,
    as_rows,
    lse_by_head,
    lse_by_row,
    refuses_all_but_rows,
    refuses_half,
)

aten = torch.ops.aten


class CpuFlash:
    """The CPU's blockwise kernel: what scaled_dot_product_attention takes there, bit for bit.

    Documents of unequal length are a call each.
    """

    name = "sdpa-cpu"
    drops_weights = False

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        if q_TNH.device.type != "cpu" or not _has("_scaled_dot_product_flash_attention_for_cpu"):
            return "it runs on the cpu"
        return refuses_all_but_rows(mask, documents=True)

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        parts = []
        for tokens, length in _batches(mask, len(q_TNH)):
            q, k, v = (_rows(x[tokens], length) for x in (q_TNH, k_UKH, v_UKH))
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
            parts.append((_tokens(out), lse_by_head(lse)))
        return _joined([out for out, _ in parts], 0), _joined([lse for _, lse in parts], 1)

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        q_TNH, k_UKH, v_UKH, out_TNH, lse_NT = saved
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = []
        for tokens, length in _batches(mask, len(q_TNH)):
            wide = (_rows(x[tokens], length) for x in (dout_TNH, q_TNH, k_UKH, v_UKH, out_TNH))
            lse = lse_NT[:, tokens].unflatten(1, (-1, length)).transpose(0, 1)
            parts.append([_tokens(each) for each in backward(*wide, lse, 0.0, True)])
        dq, dk, dv = (_joined(list(each), 0) for each in zip(*parts, strict=True))
        return dq, dk, dv


class CudaFlash:
    """FlashAttention-2 as torch carries it; documents of unequal length and a window too."""

    name = "sdpa-flash"
    drops_weights = False

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        if not _has("_flash_attention_forward") or not _has("_flash_attention_backward"):
            return "this torch was built without it"
        if mask.alibi is not None:
            return "its backward knows no ALiBi"
        return refuses_half(q_TNH, 256)

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        q, k, v = as_rows(mask, q_TNH, k_UKH, v_UKH)
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *mask.bounds, 0.0, True, False, **_window(mask))
        return (out, lse) if mask.cu_q is not None else (out.flatten(0, 1), lse_by_head(lse))

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        """Return the gradients, those of k and v summed over the query heads that share them."""
        q_TNH, k_UKH, v_UKH, out_TNH, lse_NT = saved
        dout, q, k, v, out = as_rows(mask, dout_TNH, q_TNH, k_UKH, v_UKH, out_TNH)
        no_dropout = (q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64))  # its state, never read
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, lse_by_row(lse_NT, mask), *mask.bounds, 0.0, True, *no_dropout, **_window(mask)
        )
        dq, dk, dv = grads if mask.cu_q is not None else (each.flatten(0, 1) for each in grads)
        return dq, dk, dv


class Cudnn:
    """cuDNN's kernels, which are the fastest of torch's on Hopper; torch calls their backward non-deterministic."""

    name = "sdpa-cudnn"
    drops_weights = False

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        if not _has("_scaled_dot_product_cudnn_attention") or not torch.backends.cudnn.is_available():
            return "this torch was built without it"
        return refuses_all_but_rows(mask, documents=False) or refuses_half(q_TNH, 128)

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        q, k, v = (_rows(x, mask.max_q) for x in (q_TNH, k_UKH, v_UKH))
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        return _tokens(out), lse_by_head(lse.reshape(out.shape[:3]))

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        q_TNH, k_UKH, v_UKH, out_TNH, lse_NT = saved
        dout, q, k, v, out = (_rows(x, mask.max_q) for x in (dout_TNH, q_TNH, k_UKH, v_UKH, out_TNH))
        lse = lse_by_row(lse_NT, mask).unsqueeze(-1)
        no_dropout = [q.new_zeros((), dtype=torch.int64) for _ in range(2)]
        length = mask.max_q
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, *no_dropout, None, None, None, length, length, 0.0, True
        )
        return _tokens(dq), _tokens(dk), _tokens(dv)


class CudnnFlash:
    """cuDNN's forward, which is faster and repeats its bits, and FlashAttention-2's backward, which can repeat them."""

    name = "sdpa-cudnn-flash"
    drops_weights = False

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        return Cudnn().refusal(q_TNH, k_UKH, mask) or CudaFlash().refusal(q_TNH, k_UKH, mask)

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        return Cudnn().forward(q_TNH, k_UKH, v_UKH, mask)

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        return CudaFlash().backward(dout_TNH, saved, mask)


class Efficient:
    """CUTLASS's kernels, the ones of torch for float32 on CUDA; shared key-value heads are repeated for them."""

    name = "sdpa-efficient"
    drops_weights = False

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        if q_TNH.device.type != "cuda" or q_TNH.dtype not in (torch.float32, *HALVES):
            return "it takes float32, bfloat16 and float16 on cuda"
        if q_TNH.shape[2] % 8:
            return f"heads of {q_TNH.shape[2]}: it takes multiples of 8"
        return refuses_all_but_rows(mask, documents=False)

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        q, k, v = (_rows(x, mask.max_q) for x in (q_TNH, *_repeated(q_TNH, k_UKH, v_UKH)))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        return _tokens(out), lse_by_head(lse[..., : mask.max_q])  # its rows are padded

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        """Return the gradients, those of k and v summed over the query heads that share them."""
        q_TNH, k_UKH, v_UKH, out_TNH, lse_NT = saved
        repeated = _repeated(q_TNH, k_UKH, v_UKH)
        dout, q, k, v, out = (_rows(x, mask.max_q) for x in (dout_TNH, q_TNH, *repeated, out_TNH))
        lse = torch.nn.functional.pad(lse_by_row(lse_NT, mask), (0, -mask.max_q % 32), value=float("inf"))
        no_dropout = [q.new_zeros((), dtype=torch.int64, device="cpu") for _ in range(2)]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, *no_dropout, 0.0, [True, True, True, False], True
        )
        num_kv_heads = k_UKH.shape[1]
        dk, dv = (_tokens(each).unflatten(1, (num_kv_heads, -1)).sum(2) for each in (dk, dv))
        return _tokens(dq), dk, dv


def _batches(mask: Mask, num_tokens: int) -> list[tuple[slice, int]]:
    """Return which tokens are rows of one length, and that length."""
    if mask.cu_q is None:
        return [(slice(0, num_tokens), mask.max_q)]
    spans = [tokens for tokens, _ in mask.documents(num_tokens, num_tokens)]
    return [(tokens, tokens.stop - tokens.start) for tokens in spans if tokens.stop > tokens.start]


def _rows(x_TNH: Tensor, length: int) -> Tensor:
    """Return a view [B, N, S, H] of rows."""
    return x_TNH.unflatten(0, (-1, length)).transpose(1, 2)


def _tokens(x_BNSH: Tensor) -> Tensor:
    """Return [T, N, H], a view where the heads of a token are beside each other."""
    return x_BNSH.transpose(1, 2).flatten(0, 1)


def _repeated(q_TNH: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(q_TNH.shape[1] // x.shape[1], 1) for x in tensors]


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _window(mask: Mask) -> dict[str, Any]:
    return {} if mask.window is None else {"window_size_left": mask.window - 1, "window_size_right": 0}


def _has(name: str) -> bool:
    return getattr(aten, name, None) is not None
