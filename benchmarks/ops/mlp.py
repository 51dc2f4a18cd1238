"""The MLP, forward and backward, as a share of the rate of its matrix products alone in the same run.

    python -m benchmarks.ops.mlp [--device cpu|cuda] [--shape 32768x2048x8192] [--dtypes bf16]

The shape is tokens x hidden x feed-forward size. `gemms` are the six products of SwiGLU's MLP on tensors that are
ready, gradients of weights into fp32; `csrc` is what the trainer runs; `eager` is torch with autograd leaves, whose
gradients of bf16 weights are bf16. Beside a share, on CUDA, is the most memory that a pass takes beside its inputs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians
from trainer.linear.linear import linear
from trainer.linear.weight import Weight, add_product
from trainer.ops.activation import SWIGLU
from trainer.ops.dtypes import wide_dtype


def main() -> None:
    options = arguments("the MLP against its matrix products", "512x256x1024", "32768x2048x8192")
    tokens, hidden, ffn = options.shape
    for dtype in options.dtypes:
        kind = {"dtype": DTYPES[dtype], "device": options.device}
        x_TD, dy_TD = (torch.randn(tokens, hidden, **kind) for _ in range(2))
        up, down = (torch.randn(shape, **kind) * hidden**-0.5 for shape in ((2 * ffn, hidden), (hidden, ffn)))
        forms = {
            "gemms": products(x_TD, dy_TD, up, down),
            "csrc": trained(x_TD, dy_TD, up, down),
            "eager": eager(x_TD, dy_TD, up, down),
        }
        seconds = medians(forms, options.device, options.repeats)
        rate = 18 * tokens * hidden * ffn / seconds["gemms"] / 1e12
        shares = [f"{name} {seconds['gemms'] / seconds[name]:6.1%}{peak(forms[name], options.device)}"
                  for name in forms if name != "gemms"]  # fmt: skip
        print(f"{f'mlp {dtype}':24} gemms {rate:7.1f} TFLOP/s; of it: {', '.join(shares)}", flush=True)
        percent = {name: 100 * seconds["gemms"] / seconds[name] for name in ("csrc", "eager")}
        claim, peer = f"mlp {dtype}, {tokens}x{hidden}x{ffn}", {"eager": percent["eager"]}
        limit = {"the products [TFLOP/s]": rate}
        options.record.add(claim, percent["csrc"], "% of the products", peer=peer, limit=limit)


def products(x_TD: Tensor, dy_TD: Tensor, up: Tensor, down: Tensor) -> Callable[[], object]:
    """Return the six products alone."""
    packed_TC, h_TF = x_TD @ up.T, dy_TD @ down
    gradients = [torch.empty_like(each, dtype=wide_dtype(each.dtype)) for each in (up, down)]

    def run() -> None:
        F.linear(x_TD, up)
        F.linear(h_TF, down)
        torch.mm(dy_TD, down)
        add_product(gradients[1], dy_TD, h_TF, first=True)
        add_product(gradients[0], packed_TC, x_TD, first=True)
        torch.mm(packed_TC, up)

    return run


def trained(x_TD: Tensor, dy_TD: Tensor, up: Tensor, down: Tensor) -> Callable[[], object]:
    """Return the trainer's form."""
    weights = [
        Weight(name, each, torch.empty_like(each, dtype=wide_dtype(each.dtype)), contributes=True)
        for name, each in (("gate + up", up), ("down", down))
    ]

    def run() -> None:
        for weight in weights:
            weight.begin_sum()
        packed_TC = linear(x_TD.detach().requires_grad_(), weights[0])
        linear(packed_TC, weights[1], make_x=SWIGLU).backward(dy_TD)

    return run


def eager(x_TD: Tensor, dy_TD: Tensor, up: Tensor, down: Tensor) -> Callable[[], object]:
    """Return torch's own form."""
    leaves = [each.detach().requires_grad_() for each in (*up.chunk(2), down)]

    def run() -> None:
        gate, up, down = leaves
        own_TD = x_TD.detach().requires_grad_()
        h_TF = F.silu(F.linear(own_TD, gate)) * F.linear(own_TD, up)
        torch.autograd.grad(F.linear(h_TF, down), (own_TD, *leaves), dy_TD)

    return run


def peak(form: Callable[[], object], device: str) -> str:
    """Return the memory that one pass takes at most, as text; nothing on the CPU."""
    if device != "cuda":
        return ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    form()
    torch.cuda.synchronize()
    return f" ({(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB)"


if __name__ == "__main__":
    main()
