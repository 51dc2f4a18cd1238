"""Sampling: which token comes next, by the logits and one number that a counter makes.

The number of a token is a function of the seed, the prompt's tokens, which of its samples it is, and its place in the
row: Philox4x32-10 by counter, under a key as of a tensor's initial values. It depends on no other prompt of the
batch, on no order, and on no rank. So with equal logits a prompt is continued by the same tokens in any batch and
layout. Sums of another order change logits in their last bits: that changes a token where the number falls between.

Sources: top-k, Fan et al., 2018; top-p, Holtzman et al., 2020 (nucleus sampling); min-p, Nguyen et al., 2024
(arXiv 2407.01082).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.ops.philox import MASK, philox4x32, tensor_key


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: a `temperature` of 0 takes the likeliest one, the first of equals.

    Else logits are divided by it. Of the tokens the `top_k` likeliest stay, of these the likeliest that have `top_p`
    together, of these those of at least `min_p` times the probability of the likeliest. Equals stay or go together.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def key(self, prompt: Sequence[int]) -> int:
        """Return the key of a prompt's numbers."""
        return tensor_key(self.seed, "prompt " + " ".join(map(str, prompt))) if self.temperature else 0

    def choose(self, logits_BV: Tensor, numbers: Sequence[float]) -> Tensor:
        """Return a token for each row, [B]; a number in [0, 1) says where among the tokens that stay."""
        if not self.temperature:
            return logits_BV.argmax(-1)
        sums_BV = self.probabilities(logits_BV).cumsum(-1)
        points_B1 = sums_BV[:, -1:] * sums_BV.new_tensor(numbers).unsqueeze(1)
        return torch.searchsorted(sums_BV, points_B1, right=True).squeeze(1).clamp(max=sums_BV.shape[1] - 1)

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """Return what tokens have that stay, 0 for the others, float64; rows need not add up to 1."""
        probs_BV = torch.softmax(logits_BV.double() / self.temperature, -1)
        if 0 < self.top_k < probs_BV.shape[1]:
            probs_BV = _at_least(probs_BV, probs_BV.topk(self.top_k, -1).values[:, -1:])
        if self.top_p < 1:
            sorted_BV = probs_BV.sort(-1, descending=True).values
            sums_BV = sorted_BV.cumsum(-1)
            stays_BV = sums_BV - sorted_BV < self.top_p * sums_BV[:, -1:]
            last_B1 = (stays_BV & (sorted_BV > 0)).sum(-1, keepdim=True) - 1
            probs_BV = _at_least(probs_BV, sorted_BV.gather(1, last_B1))
        return _at_least(probs_BV, self.min_p * probs_BV.amax(-1, keepdim=True)) if self.min_p else probs_BV


def number_of(key: int, sample: int, place: int) -> float:
    """Return the number in [0, 1) that chooses the token at a place of a row."""
    low, high, _, _ = philox4x32([place, sample, 0, 0], key & MASK, key >> 32)
    return ((high << 32 | low) >> 11) * 2.0**-53


def _at_least(probs_BV: Tensor, least_B1: Tensor) -> Tensor:
    return probs_BV.masked_fill(probs_BV < least_B1, 0)
