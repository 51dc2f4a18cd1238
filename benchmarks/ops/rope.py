"""RoPE on packed q|k|v: the csrc op beside eager torch, as shares of the raw copy rate of the same run.

    python -m benchmarks.ops.rope [--device cpu|cuda] [--shape 32768x16x16x64] [--dtypes bf16,fp32] [--compile]

The shape is tokens x heads x kv heads x head size. Forward must read and write q and k (in place), with a norm also
keep its input; backward must read the gradients of q, k and v and write the packed one, with a norm read q and k too.
`eager` rotates q and k as torch tensors do, in their own dtype, and leaves packing to autograd.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians, print_rates
from trainer.ops.rope import QkNorm, rope, rope_reference, rope_turns

Form = Callable[..., tuple[Tensor, Tensor, Tensor]]


def main() -> None:
    options = arguments("RoPE against eager torch and the copy rate", "2048x8x4x64", "32768x16x16x64")
    tokens, num_heads, num_kv_heads, size = options.shape
    heads = (num_heads, num_kv_heads)
    positions = torch.arange(tokens, device=options.device) % 4096
    for dtype in options.dtypes:
        kind: dict[str, Any] = {"dtype": DTYPES[dtype], "device": options.device}
        qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * size, **kind).requires_grad_()
        gradients = [torch.randn(tokens, each, size, **kind) for each in (num_heads, num_kv_heads, num_kv_heads)]
        turns = rope_turns(positions, size, 10000.0, DTYPES[dtype])
        weights = [torch.randn(size, **kind).requires_grad_() for _ in range(2)]
        source, target = qkv.detach().clone(), torch.empty_like(qkv)
        head_bytes = tokens * size * qkv.itemsize
        turned, packed = (num_heads + num_kv_heads) * head_bytes, (num_heads + 2 * num_kv_heads) * head_bytes
        for norm in (None, QkNorm(weights[0], weights[1], 1e-6)):
            in_place = norm is None
            with torch.no_grad():
                scratch = qkv.detach().clone()

            def csrc(x: Tensor, norm: QkNorm | None = norm, turns: Tensor = turns) -> tuple[Tensor, Tensor, Tensor]:
                return rope(x, turns, *heads, norm=norm)

            def eager(x: Tensor, norm: QkNorm | None = norm, turns: Tensor = turns) -> tuple[Tensor, Tensor, Tensor]:
                return eager_rope(x, turns, heads, norm)

            forms: dict[str, Form] = {"csrc": csrc, "eager": eager}
            if options.compile:
                forms["compile"] = torch.compile(
                    lambda x, norm=norm, turns=turns: rope_reference(x, turns, *heads, norm=norm)
                )

            def copy(source: Tensor = source, target: Tensor = target) -> Tensor:
                return target.copy_(source)

            def forward(form: Form, x: Tensor = scratch) -> Callable[[], object]:
                return lambda: form(x)

            def backward(form: Form, inputs: tuple[Tensor, ...], dy: list[Tensor] = gradients) -> Callable[[], object]:
                outputs = form(inputs[0])
                return lambda: torch.autograd.grad(outputs, inputs, dy, retain_graph=True)

            runs = {"copy": copy, **{name: forward(form) for name, form in forms.items()}}
            if in_place:
                runs["in place"] = lambda x=scratch, turns=turns: rope(x, turns, *heads, in_place=True)
            title = f"rope{'' if norm is None else '+norm'}"
            moved = {name: 2 * (packed if name == "copy" else turned) for name in runs}
            print_rates(options, f"{title} forward {dtype}", medians(runs, options.device, options.repeats), moved)
            inputs = (qkv,) if norm is None else (qkv, *weights)
            runs = {"copy": copy, **{name: backward(form, inputs) for name, form in forms.items()}}
            least = 2 * packed + (0 if norm is None else turned)
            moved = {name: 2 * packed if name == "copy" else least for name in runs}
            print_rates(options, f"{title} backward {dtype}", medians(runs, options.device, options.repeats), moved)


def eager_rope(
    qkv: Tensor, turns: Tensor, heads: tuple[int, int], norm: QkNorm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate in the tensors' own dtype, as plain code does."""
    q, k, v = qkv.unflatten(1, (sum(heads) + heads[1], -1)).split([heads[0], heads[1], heads[1]], 1)
    if norm is not None:
        q, k = (
            torch.nn.functional.rms_norm(x, x.shape[-1:], weight, norm.eps)
            for x, weight in ((q, norm.q_weight), (k, norm.k_weight))
        )
    cos, sin = (torch.cat([each, each], -1).unsqueeze(1).to(qkv.dtype) for each in turns.chunk(2, -1))

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turned(q), turned(k), v


if __name__ == "__main__":
    main()
