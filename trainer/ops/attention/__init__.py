"""Attention behind one seam: `seam` (Mask, Backend, attention), backends, and which of them a run takes.

Modules: `reference` (any dtype and device), `sdpa` (torch's kernels on CPU and CUDA), `flash` (FlashAttention's own
packages where installed), `choose` (backends by name, the choice). Nothing is imported here.
"""
