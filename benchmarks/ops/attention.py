"""Attention backends, forward and backward, as shares of the rate of `scaled_dot_product_attention` in the same run.

    python -m benchmarks.ops.attention [--device cpu|cuda] [--shape 8x4096x16x16x64] [--dtypes bf16,fp32]

The shape is rows x length x heads x kv heads x head size; q, k and v are views of packed memory, as RoPE leaves them.
The last line names the backend that `choose` takes, plainly and in a deterministic run.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians
from trainer.ops.attention.choose import BACKENDS, choose
from trainer.ops.attention.seam import Mask, attention
from trainer.ops.rope import rope


def main() -> None:
    options = arguments("attention backends against torch's choice", "2x512x8x4x64", "8x4096x16x16x64")
    rows, length, num_heads, num_kv_heads, size = options.shape
    mask = Mask.of_rows(length)
    for dtype in options.dtypes:
        kind: dict[str, Any] = {"dtype": DTYPES[dtype], "device": options.device}
        packed = torch.randn(rows * length, (num_heads + 2 * num_kv_heads) * size, **kind)
        q, k, v = (
            each.detach().requires_grad_() for each in rope(packed, None, num_heads, num_kv_heads, in_place=True)
        )
        dout = torch.randn(rows * length, num_heads, size, **kind)

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (each.unflatten(0, (rows, length)).transpose(1, 2) for each in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads)
            return y.transpose(1, 2).flatten(0, 1)

        forms: dict[str, Callable[..., Tensor]] = {"sdpa": sdpa}
        for backend in BACKENDS:
            if reason := backend.refusal(q, k, mask):
                print(f"{backend.name}: {reason}")
            else:
                forms[backend.name] = lambda q, k, v, backend=backend: attention(q, k, v, mask, backend)
        outputs = {name: form(q, k, v) for name, form in forms.items()}

        def forward(form: Callable[..., Tensor], inputs: tuple[Tensor, ...] = (q, k, v)) -> Callable[[], object]:
            return lambda: form(*inputs)

        def backward(y: Tensor, inputs: tuple[Tensor, ...] = (q, k, v), dout: Tensor = dout) -> Callable[[], object]:
            return lambda: torch.autograd.grad(y, inputs, dout, retain_graph=True)

        for direction, runs in (
            ("forward", {name: forward(form) for name, form in forms.items()}),
            ("backward", {name: backward(y) for name, y in outputs.items()}),
        ):
            seconds = medians(runs, options.device, options.repeats)
            shares = [f"{name} {seconds['sdpa'] / each:6.1%}" for name, each in seconds.items() if name != "sdpa"]
            title = f"attention {direction} {dtype}"
            print(f"{title:24} sdpa {seconds['sdpa'] * 1e3:8.3f} ms; of its rate: {', '.join(shares)}", flush=True)
            claim, limit = f"{title}, {'x'.join(map(str, options.shape))}", {"sdpa": 1e3 * seconds.pop("sdpa")}
            for name, elapsed_s in seconds.items():
                options.record.add(f"{claim}: {name}", 1e3 * elapsed_s, "ms", limit=limit)
        names = [choose(q, k, mask, deterministic=deterministic) for deterministic in (False, True)]
        print(f"chosen {dtype}: {names[0]}; deterministic: {names[1]}", flush=True)


if __name__ == "__main__":
    main()
