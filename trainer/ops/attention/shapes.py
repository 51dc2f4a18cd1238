"""Shapes between the seam and the kernels: tokens as rows of one length, lse by head or by row, common refusals."""

import torch
from torch import Tensor

from trainer.ops.attention.seam import Mask


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
    """Return why a kernel for bf16 on GPUs from a compute capability on, heads up to `most`, cannot take q."""
    if q_TNH.device.type != "cuda" or q_TNH.dtype != torch.bfloat16:
        return "it takes bfloat16 on cuda"
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
    return None if mask.is_self else "it wants queries and keys of the same tokens"
