"""The trainer's fused operations: native kernels for CPU and CUDA, each beside a reference in plain torch.

Modules: `norm` (RMSNorm, LayerNorm), `rope` (RoPE with QK-norm), `activation` (SwiGLU, GELU), `cross_entropy` (over a
part of a vocabulary), `attention` (backends behind one seam), `dropout` (dropout by counter), `adamw` (the optimizer's
step), `fp8` (tensors in eight bits), `philox` (initial weights by counter), `native` (the library they call). Nothing
is imported here, so that naming one costs only that one.
"""
