"""Linear and cross-entropy without whole logits: rate as a share of that of the three products alone, and memory.

    python -m benchmarks.ops.linear_cross_entropy [--device cpu|cuda] [--shape 16384x131072x2048] [--dtypes bf16]

The shape is tokens x vocabulary x hidden size. `products` are logits, the gradient of the input and that of the matrix,
each in one call, with whole logits in memory; so the share of `parts` says what the rest costs. `whole` makes the
logits at once. Liger takes part if it is installed. The memory is what a call holds beyond its inputs and gradients.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians
from trainer.linear.linear import linear
from trainer.linear.weight import Weight, add_product
from trainer.mesh.clock import Clock
from trainer.mesh.group import Group
from trainer.ops.cross_entropy import VocabularyPart
from trainer.ops.dtypes import wide_dtype
from trainer.parallel.cross_entropy import linear_cross_entropy, tokens_at_once, vocab_cross_entropy


def main() -> None:
    options = arguments("Linear and cross-entropy against their products", "256x4096x128", "16384x131072x2048")
    num_tokens, vocabulary, hidden = options.shape
    for dtype in options.dtypes:
        x = torch.randn(num_tokens, hidden, dtype=DTYPES[dtype], device=options.device).requires_grad_()
        values = 0.02 * torch.randn(vocabulary, hidden, dtype=x.dtype, device=x.device)
        gradient = torch.empty_like(values, dtype=wide_dtype(x.dtype))
        matrix = Weight("head", values, gradient, contributes=True)
        labels = torch.randint(vocabulary, (num_tokens,), device=x.device)
        forms = forms_of(x, matrix, gradient, labels)
        seconds = medians(forms, options.device, options.repeats)
        flops = 6 * num_tokens * vocabulary * hidden
        for name, form in forms.items():
            share = seconds["products"] / seconds[name]
            rate = f"{flops / seconds[name] / 1e12:7.1f} TFLOP/s, {share:6.1%} of products"
            print(f"{dtype} {name:12} {rate}{memory_text(form, x.device)}", flush=True)
        percent = {name: 100 * seconds["products"] / seconds[name] for name in forms}
        limit = {"the products [TFLOP/s]": flops / seconds["products"] / 1e12}
        peer = {name: share for name, share in percent.items() if name not in ("products", "parts")}
        claim = f"linear and cross-entropy in parts, {dtype}, {num_tokens}x{vocabulary}x{hidden}"
        options.record.add(claim, percent["parts"], "% of the products", peer=peer, limit=limit)


def forms_of(x: Tensor, matrix: Weight, gradient: Tensor, labels: Tensor) -> dict[str, Callable[[], object]]:
    """Return each form: losses and both gradients."""
    vocabulary, num_tokens = matrix.values.shape[0], len(x)
    group, part = Group("alone", (0,), 0, Clock(x.device)), VocabularyPart(0, vocabulary)
    weights = torch.full((num_tokens,), 1 / num_tokens, dtype=gradient.dtype, device=x.device)
    at_once = tokens_at_once(num_tokens, vocabulary * x.itemsize, 2**30)

    def products() -> None:
        logits = torch.mm(x.detach(), matrix.values.t())
        add_product(gradient, logits, x.detach(), first=False)
        torch.mm(logits, matrix.values)

    def parts() -> None:
        options = {"weights_T": weights, "z_loss": 0.0, "tokens_at_once": at_once}
        losses = linear_cross_entropy(x, matrix, labels, part, group, **options)
        torch.autograd.grad((losses * weights).sum(), x)

    def whole() -> None:
        losses = vocab_cross_entropy(linear(x, matrix), labels, part, group)
        torch.autograd.grad((losses * weights).sum(), x)

    forms: dict[str, Callable[[], object]] = {"products": products, "parts": parts, "whole": whole}
    try:
        peer = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
        leaf = matrix.values.detach().clone().requires_grad_()

        def liger() -> None:
            torch.autograd.grad(peer(x, leaf, labels), (x, leaf))

        liger()
        forms["liger"] = liger
    except Exception as error:
        print(f"liger takes no part: {type(error).__name__}: {error}")
    return forms


def memory_text(form: Callable[[], object], device: torch.device) -> str:
    """Return the memory that one call takes at its peak, on CUDA."""
    if device.type != "cuda":
        return ""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    form()
    return f", {(torch.cuda.max_memory_allocated(device) - before) / 2**30:5.2f} GiB more"


if __name__ == "__main__":
    main()
