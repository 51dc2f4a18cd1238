"""The dtype in which sums are made."""

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over values of a dtype, and of its gradients, moments and masters."""
    return torch.float64 if dtype == torch.float64 else torch.float32
