"""Deterministic mode: on GPUs, kernels alone that repeat their bits."""

import os

import torch


def make_deterministic() -> None:
    """Let this process use deterministic kernels alone, and fail where there is none; before CUDA starts.

    Source: torch's notes on reproducibility; cuBLAS reads its workspace's size when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is not read
