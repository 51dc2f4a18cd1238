"""RMSNorm: the csrc op beside torch's own and torch.compile, as shares of the raw copy rate of the same run.

    python -m benchmarks.ops.rmsnorm [--device cpu|cuda] [--shape 4096x1024] [--dtypes fp32,bf16] [--compile]

Forward must read x and write y; backward must read dy and x and write dx. Results of earlier runs: results.md.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians, print_rates
from trainer.ops.rmsnorm import rms_norm, rms_norm_reference

EPS = 1e-5


def main() -> None:
    options = arguments("RMSNorm against torch and the copy rate", "4096x1024", "16384x8192")
    rows, cols = options.shape
    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "csrc": lambda x, weight: rms_norm(x, weight, EPS),
        "eager": lambda x, weight: torch.nn.functional.rms_norm(x, (cols,), weight, EPS),
    }
    if options.compile:
        forms["compile"] = torch.compile(lambda x, weight: rms_norm_reference(x, weight, EPS))
    for dtype in options.dtypes:
        kind = {"dtype": DTYPES[dtype], "device": options.device}
        x = torch.randn(rows, cols, **kind).requires_grad_()
        weight = torch.randn(cols, **kind).requires_grad_()
        dy, target = torch.randn(rows, cols, **kind), torch.empty(rows, cols, **kind)

        def copy(source: Tensor = dy, target: Tensor = target) -> Tensor:
            return target.copy_(source)

        def forward(form: Callable[..., Tensor], x: Tensor = x, weight: Tensor = weight) -> Callable[[], Tensor]:
            return lambda: form(x, weight)

        def backward(form: Callable[..., Tensor], x: Tensor = x, weight: Tensor = weight, dy: Tensor = dy):
            y = form(x, weight)
            return lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

        for direction, make, tensors in (("forward", forward, 2), ("backward", backward, 3)):
            runs = {"copy": copy, **{name: make(form) for name, form in forms.items()}}
            seconds = medians(runs, options.device, options.repeats)
            moved = {name: (2 if name == "copy" else tensors) * dy.nbytes for name in runs}
            print_rates(f"rmsnorm {direction} {dtype}", seconds, moved)


if __name__ == "__main__":
    main()
