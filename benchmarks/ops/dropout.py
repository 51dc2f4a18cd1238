"""Dropout by counter: the csrc op beside torch's own and torch.compile, as shares of the raw copy rate of the same run.

    python -m benchmarks.ops.dropout [--device cpu|cuda] [--shape 4x1024x1024] [--dtypes fp32,bf16] [--compile]

Each must read x and write y; torch's eager op also writes a mask for its backward. Results of earlier runs: results.md.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians, print_rates
from trainer.ops.dropout import dropout, dropout_reference

P = 0.1
PLACE: dict[str, Any] = {"seed": 1, "step": 2, "layer": 3, "site": 0, "first_sample": 0}


def main() -> None:
    options = arguments("Dropout against torch and the copy rate", "4x1024x1024", "8x4096x4096")
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "csrc": lambda x: dropout(x, P, **PLACE),
        "eager": lambda x: torch.nn.functional.dropout(x, P),
    }
    if options.compile:
        forms["compiled reference"] = torch.compile(lambda x: dropout_reference(x, P, **PLACE))
    for dtype in options.dtypes:
        x = torch.randn(options.shape, dtype=DTYPES[dtype], device=options.device)
        target = torch.empty_like(x)
        runs: dict[str, Callable[[], Tensor]] = {"copy": lambda x=x, target=target: target.copy_(x)}
        runs |= {name: lambda form=form, x=x: form(x) for name, form in forms.items()}
        seconds = medians(runs, options.device, options.repeats)
        print_rates(options, f"dropout {dtype}", seconds, dict.fromkeys(runs, 2 * x.nbytes))


if __name__ == "__main__":
    main()
