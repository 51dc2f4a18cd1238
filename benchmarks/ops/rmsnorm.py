"""RMSNorm, with the residual stream's add before it and without: csrc beside torch and peers, as shares of a copy.

    python -m benchmarks.ops.rmsnorm [--device cpu|cuda] [--shape 4096x1024] [--dtypes fp32,bf16] [--compile]

The norm must read x and write y, backward read dy and x and write dx. With the add it must read x and the residual and
write the sum and y, backward read dy, the sum's gradient and the sum and write one gradient. The backward's times hold
what autograd needs for a gradient of the weight in its dtype. Liger and quack take part if they are installed. Results
of earlier runs: results.md.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians, print_rates
from trainer.ops.rmsnorm import add_rms_norm, add_rms_norm_reference

EPS = 1e-5
Form = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, ...]]  # x, residual, weight -> y, sum


def main() -> None:
    options = arguments("RMSNorm against torch, peers and the copy rate", "4096x1024", "16384x8192")
    rows, cols = options.shape
    for dtype in options.dtypes:
        kind: dict[str, Any] = {"dtype": DTYPES[dtype], "device": options.device}
        x, residual, weight, dy, dsum = (
            torch.randn(*shape, **kind) for shape in [(rows, cols)] * 2 + [(cols,)] + [(rows, cols)] * 2
        )
        target = torch.empty_like(x)
        leaves = [each.requires_grad_() for each in (x, residual, weight)]
        for with_add in (False, True):
            inputs = leaves if with_add else [x, None, weight]
            forms = usable(options, inputs)

            def copy(target: Tensor = target, source: Tensor = dy) -> Tensor:
                return target.copy_(source)

            def backward(form: Form, inputs: list[Any] = inputs, gradients: tuple[Tensor, ...] = (dy, dsum)) -> Any:
                outputs = form(*inputs)[: 1 + (inputs[1] is not None)]
                wanted = [each for each in inputs if each is not None]
                return lambda: torch.autograd.grad(outputs, wanted, gradients[: len(outputs)], retain_graph=True)

            title, tensors = ("add+rmsnorm", (4, 4)) if with_add else ("rmsnorm", (2, 3))
            runs: dict[str, dict[str, Callable[[], object]]] = {
                "forward": {name: lambda form=form, inputs=inputs: form(*inputs) for name, form in forms.items()},
                "backward": {name: backward(form) for name, form in forms.items()},
            }
            for (direction, each), least in zip(runs.items(), tensors, strict=True):
                seconds = medians({"copy": copy, **each}, options.device, options.repeats)
                moved = {name: (2 if name == "copy" else least) * dy.nbytes for name in seconds}
                print_rates(f"{title} {direction} {dtype}", seconds, moved)


def usable(options: Any, inputs: list[Any]) -> dict[str, Form]:
    """Return the forms that run here, by name."""
    forms: dict[str, Form] = {
        "csrc": lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS),
        "eager": eager,
    }
    peers: dict[str, Form] = {"liger": liger, "quack": quack}
    if options.compile:
        torch._dynamo.reset()
        peers["compile"] = torch.compile(lambda x, residual, weight: add_rms_norm_reference(x, residual, weight, EPS))
    for name, peer in peers.items():
        try:
            peer(*inputs)
        except Exception as error:
            print(f"{name} takes no part: {type(error).__name__}: {error}")
        else:
            forms[name] = peer
    return forms


def eager(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
    """Add and normalise as two torch ops."""
    total = x if residual is None else x + residual
    return torch.nn.functional.rms_norm(total, weight.shape, weight, EPS), total


def liger(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
    """Call Liger's kernels."""
    functional = importlib.import_module("liger_kernel.transformers.functional")
    if residual is None:
        return (functional.liger_rms_norm(x, weight, EPS, in_place=False),)
    return tuple(functional.liger_fused_add_rms_norm(x, residual, weight, EPS, in_place=False))


def quack(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
    """Call quack's kernels."""
    found = importlib.import_module("quack").rmsnorm(
        x, weight, residual=residual, eps=EPS, prenorm=residual is not None
    )
    return found if isinstance(found, tuple) else (found,)


if __name__ == "__main__":
    main()
