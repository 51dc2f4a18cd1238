"""Attention in plain torch: any dtype, device and mask, a block of queries of one document at a time.

Arithmetic is float64 for fp64 tensors, else float32; results are rounded once. At most `BLOCK` queries'
scores are in memory, and no key that the block cannot see is read.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.ops.attention.seam import Gradients, Mask, Saved
from trainer.ops.dtypes import wide_dtype

BLOCK = 128  # queries


class Reference:
    """The backend that takes everything."""

    name = "reference"
    drops_weights = True

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        return None

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return the result and the lse; a query that sees no key has zeros and -infinity."""
        wide = wide_dtype(q_TNH.dtype)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        lse_NT = q_TNH.new_empty(q_TNH.shape[1], len(q_TNH), dtype=wide)
        for queries, keys, hidden, bias in _blocks(q_TNH, k_UKH, mask):
            q_KMH, k_KLH, v_KLH = _by_kv_head(q_TNH[queries], k_UKH, wide), _heads(k_UKH[keys]), _heads(v_UKH[keys])
            scores_NML = _scores(q_KMH, k_KLH, hidden, bias)
            lse_NM = scores_NML.logsumexp(-1)
            weights_NML = _dropped(_softmax(scores_NML, lse_NM), queries, keys, mask)
            out_TNH[queries] = _by_token(weights_NML.view(*q_KMH.shape[:2], k_KLH.shape[1]) @ v_KLH, q_TNH)
            lse_NT[:, queries] = lse_NM
        return out_TNH, lse_NT

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        """Return the gradients; those of keys are summed over blocks in the wide type."""
        q_TNH, k_UKH, v_UKH, out_TNH, lse_NT = saved
        wide, scale = wide_dtype(q_TNH.dtype), q_TNH.shape[-1] ** -0.5
        dq_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        dk_UKH, dv_UKH = (torch.zeros(k_UKH.shape, dtype=wide, device=k_UKH.device) for _ in range(2))
        for queries, keys, hidden, bias in _blocks(q_TNH, k_UKH, mask):
            q_KMH, k_KLH, v_KLH = _by_kv_head(q_TNH[queries], k_UKH, wide), _heads(k_UKH[keys]), _heads(v_UKH[keys])
            dout_KMH, out_KMH = (_by_kv_head(each[queries], k_UKH, wide) for each in (dout_TNH, out_TNH))
            weights_NML = _softmax(_scores(q_KMH, k_KLH, hidden, bias), lse_NT[:, queries])
            weights_KML = weights_NML.view(*q_KMH.shape[:2], k_KLH.shape[1])
            dropped_KML = _dropped(weights_NML, queries, keys, mask).view(weights_KML.shape)
            dweights_KML = dout_KMH @ v_KLH.mT
            dweights_KML = _dropped(dweights_KML.view(weights_NML.shape), queries, keys, mask).view(weights_KML.shape)
            delta_KM1 = (dout_KMH * out_KMH).sum(-1, keepdim=True)
            dscores_KML = weights_KML * (dweights_KML - delta_KM1) * scale
            dq_TNH[queries] = _by_token(dscores_KML @ k_KLH, q_TNH)
            dk_UKH[keys] += (dscores_KML.mT @ q_KMH).transpose(0, 1)
            dv_UKH[keys] += (dropped_KML.mT @ dout_KMH).transpose(0, 1)
        return dq_TNH, dk_UKH.to(k_UKH.dtype), dv_UKH.to(v_UKH.dtype)


def _blocks(q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
    """Yield blocks of queries, the keys that some of them see, which [M, L] each does not see, and ALiBi's bias."""
    for q_span, k_span in mask.documents(len(q_TNH), len(k_UKH)):
        ahead = (k_span.stop - k_span.start) - (q_span.stop - q_span.start)  # the first query's place among the keys
        for start in range(q_span.start, q_span.stop, BLOCK):
            stop = min(start + BLOCK, q_span.stop)
            first, last = (at - q_span.start + ahead for at in (start, stop - 1))  # places among the document's keys
            low = 0 if mask.window is None else max(0, first - mask.window + 1)
            keys = slice(k_span.start + low, k_span.start + max(low, last + 1))
            places_M = torch.arange(first, last + 1, device=q_TNH.device)
            distance_ML = places_M.unsqueeze(-1) - torch.arange(low, max(low, last + 1), device=q_TNH.device)
            hidden_ML = distance_ML < 0
            if mask.window is not None:
                hidden_ML |= distance_ML >= mask.window
            wide = wide_dtype(q_TNH.dtype)
            bias_NML = None if mask.alibi is None else -mask.alibi.to(wide).view(-1, 1, 1) * distance_ML
            yield slice(start, stop), keys, hidden_ML, bias_NML


def _dropped(x_NML: Tensor, queries: slice, keys: slice, mask: Mask) -> Tensor:
    return x_NML if mask.dropout is None else mask.dropout.drop(x_NML, queries.start, keys.start)


def _heads(x_LKH: Tensor) -> Tensor:
    return x_LKH.transpose(0, 1).to(wide_dtype(x_LKH.dtype))


def _by_kv_head(x_MNH: Tensor, k_UKH: Tensor, wide: torch.dtype) -> Tensor:
    """Return the queries of each key-value head as rows: [K, N / K * M, H]."""
    return x_MNH.transpose(0, 1).to(wide).reshape(k_UKH.shape[1], -1, x_MNH.shape[-1])


def _by_token(x_KMH: Tensor, q_TNH: Tensor) -> Tensor:
    return x_KMH.reshape(q_TNH.shape[1], -1, q_TNH.shape[2]).transpose(0, 1).to(q_TNH.dtype)


def _scores(q_KMH: Tensor, k_KLH: Tensor, hidden_ML: Tensor, bias_NML: Tensor | None) -> Tensor:
    scores_KML = q_KMH @ k_KLH.mT / math.sqrt(q_KMH.shape[-1])
    scores_NML = scores_KML.view(scores_KML.shape[0] * scores_KML.shape[1] // len(hidden_ML), *hidden_ML.shape)
    if bias_NML is not None:
        scores_NML = scores_NML + bias_NML
    return scores_NML.masked_fill(hidden_ML, -math.inf)


def _softmax(scores_NML: Tensor, lse_NM: Tensor) -> Tensor:
    return (scores_NML - lse_NM.masked_fill(lse_NM == -math.inf, 0).unsqueeze(-1)).exp()
