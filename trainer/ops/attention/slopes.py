"""ALiBi's slopes: how much a head's score falls with each place between a query and a key."""

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, *, device: torch.device) -> Tensor:
    """Return the slope of each head [N], float32: of 8 heads 1/2, 1/4, ..., 1/256.

    Of 12 heads the first 8 have those, and the rest every other one of 16 heads, from their first on.
    Source: Press, Smith and Lewis, 2022 (arXiv 2108.12409).
    """
    power = 1 << (num_heads.bit_length() - 1)
    own = torch.arange(1, power + 1, device=device, dtype=torch.float64) / power
    between = torch.arange(1, 2 * (num_heads - power) + 1, 2, device=device, dtype=torch.float64) / (2 * power)
    return torch.exp2(-8 * torch.cat([own, between])).float()
