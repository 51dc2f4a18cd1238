"""RMSNorm and LayerNorm, with the residual stream's add before it and without: csrc beside torch and peers.

    python -m benchmarks.ops.norm [--device cpu|cuda] [--shape 4096x1024] [--dtypes fp32,bf16] [--compile]

Rates are shares of a copy's. A norm must read x and write y, its backward read dy and x and write dx. With the add it
must read x and the residual and write the sum and y, its backward read dy, the sum's gradient and the sum and write one
gradient. The backward's times hold what autograd needs for gradients of the weights in their dtype. Liger and quack
take part if they are installed. Results of earlier runs: results.md.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians, print_rates
from trainer.ops.norm import add_norm, add_norm_reference

EPS = 1e-5
Form = Callable[..., tuple[Tensor, ...]]  # x, residual, weight, bias -> y, sum


def main() -> None:
    options = arguments("norms against torch, peers and the copy rate", "4096x1024", "16384x8192")
    rows, cols = options.shape
    for dtype in options.dtypes:
        kind: dict[str, Any] = {"dtype": DTYPES[dtype], "device": options.device}
        x, residual, dy, dsum = (torch.randn(rows, cols, **kind) for _ in range(4))
        weight, bias = (torch.randn(cols, **kind) for _ in range(2))
        target = torch.empty_like(x)
        for leaf in (x, residual, weight, bias):
            leaf.requires_grad_()
        for norm in ("rmsnorm", "layernorm"):
            for with_add in (False, True):
                wanted = x, residual if with_add else None, weight, bias if norm == "layernorm" else None
                measure(options, f"{'add+' * with_add}{norm}", dtype, wanted, (dy, dsum), target)


def measure(
    options: Any, title: str, dtype: str, inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor, Tensor],
    target: Tensor,
) -> None:  # fmt: skip
    """Print the rates of one norm's forward and backward."""
    with_add, forms = inputs[1] is not None, usable(options, inputs)
    leaves = [each for each in inputs if each is not None]

    def backward(form: Form) -> Callable[[], object]:
        outputs = form(*inputs)[: 1 + with_add]
        return lambda: torch.autograd.grad(outputs, leaves, gradients[: len(outputs)], retain_graph=True)

    runs: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: lambda form=form: form(*inputs) for name, form in forms.items()},
        "backward": {name: backward(form) for name, form in forms.items()},
    }
    for (direction, each), least in zip(runs.items(), (4, 4) if with_add else (2, 3), strict=True):
        copy = {"copy": lambda: target.copy_(gradients[0])}
        seconds = medians(copy | each, options.device, options.repeats)
        moved = {name: (2 if name == "copy" else least) * target.nbytes for name in seconds}
        print_rates(options, f"{title} {direction} {dtype}", seconds, moved)


def usable(options: Any, inputs: tuple[Tensor | None, ...]) -> dict[str, Form]:
    """Return the forms that run here, by name."""
    forms: dict[str, Form] = {"csrc": lambda *each: add_norm(*each, EPS), "eager": eager}
    peers: dict[str, Form] = {"liger": liger, "quack": quack}
    if options.compile:
        torch._dynamo.reset()
        peers["compile"] = torch.compile(lambda *each: add_norm_reference(*each, EPS))
    for name, peer in peers.items():
        try:
            peer(*inputs)
        except Exception as error:
            print(f"{name} takes no part: {type(error).__name__}: {error}")
        else:
            forms[name] = peer
    return forms


def eager(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Add and normalise as two torch ops."""
    total = x if residual is None else x + residual
    if bias is None:
        return torch.nn.functional.rms_norm(total, weight.shape, weight, EPS), total
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, EPS), total


def liger(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Call Liger's kernels; with LayerNorm the add is torch's."""
    functional = importlib.import_module("liger_kernel.transformers.functional")
    if bias is not None:
        total = x if residual is None else x + residual
        return functional.liger_layer_norm(total, weight, bias, EPS), total
    if residual is None:
        return (functional.liger_rms_norm(x, weight, EPS, in_place=False),)
    return tuple(functional.liger_fused_add_rms_norm(x, residual, weight, EPS, in_place=False))


def quack(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Call quack's kernels of RMSNorm: those of LayerNorm (0.6.5) take fp32 weights and are not joined for autograd."""
    if bias is not None:
        raise NotImplementedError("its LayerNorm takes fp32 weights, and autograd does not know it")
    found = importlib.import_module("quack").rmsnorm(
        x, weight, residual=residual, eps=EPS, prenorm=residual is not None
    )
    return found if isinstance(found, tuple) else (found,)


if __name__ == "__main__":
    main()
