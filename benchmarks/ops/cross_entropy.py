"""Cross-entropy, loss and gradient: the csrc op beside torch, Liger and quack, as shares of the run's copy rate.

    python -m benchmarks.ops.cross_entropy [--device cpu|cuda] [--shape 32768x32768] [--dtypes bf16,fp32] [--compile]

The shape is tokens x vocabulary; it is measured with 2 and 4 times the vocabulary too, for as many tokens less. Loss
and gradient must read the logits twice and write them once; `first pass` reads them once. `with losses` adds the small
kernels that make losses and factors of the sums. Liger and quack take part if they are installed.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians, print_rates
from trainer.ops.cross_entropy import VocabularyPart, cross_entropy_reference, row_sums, write_gradient
from trainer.parallel.cross_entropy import factors, losses

PEERS = {"liger": ("liger_kernel.transformers.functional", "liger_cross_entropy"), "quack": ("quack", "cross_entropy")}


def main() -> None:
    options = arguments("Cross-entropy against torch, peers and the copy rate", "256x32768", "32768x32768")
    tokens, vocabulary = options.shape
    for dtype in options.dtypes:
        for times in (1, 2, 4):
            measure(options, dtype, tokens // times, vocabulary * times)


def measure(options: Any, dtype: str, tokens: int, vocabulary: int) -> None:
    """Print a line for one shape."""
    logits = torch.randn(tokens, vocabulary, dtype=DTYPES[dtype], device=options.device)
    labels = torch.randint(vocabulary, (tokens,), device=options.device)
    part, target = VocabularyPart(0, vocabulary), torch.empty_like(logits)
    dloss = torch.full((tokens,), 1 / tokens, device=options.device, dtype=row_sums(logits, labels, part).dtype)
    scales = factors(row_sums(logits, labels, part), dloss, 0.0)

    def csrc() -> None:
        row_sums(logits, labels, part)
        write_gradient(logits, labels, part, scales)

    def with_losses() -> None:
        sums = row_sums(logits, labels, part)
        losses(sums, 0.0)
        write_gradient(logits, labels, part, factors(sums, dloss, 0.0))

    forms: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(logits),
        "first pass": lambda: row_sums(logits, labels, part),
        "csrc": csrc,
        "with losses": with_losses,
        "torch": differentiated(lambda x: F.cross_entropy(x.to(dloss.dtype), labels), logits),
    }
    if options.compile:
        compiled = torch.compile(lambda x: cross_entropy_reference(x, labels).mean())
        forms["compile"] = differentiated(compiled, logits)
    for name, (module, function) in PEERS.items():
        try:
            peer = getattr(importlib.import_module(module), function)
            run = differentiated(lambda x, peer=peer: peer(x, labels).mean(), logits)
            run()
        except Exception as error:
            print(f"{name} takes no part: {type(error).__name__}: {error}")
        else:
            forms[name] = run
    size = logits.numel() * logits.itemsize
    moved = {name: {"copy": 2, "first pass": 1}.get(name, 3) * size for name in forms}
    title, shape = f"cross-entropy {dtype}", (tokens, vocabulary)
    print_rates(options, title, medians(forms, options.device, options.repeats), moved, shape)


def differentiated(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Callable[[], object]:
    """Return a call of the loss and its gradient, for an input whose memory may be overwritten."""
    leaf = logits.detach().clone().requires_grad_()
    return lambda: torch.autograd.grad(loss(leaf), leaf)


if __name__ == "__main__":
    main()
