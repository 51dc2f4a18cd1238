"""AdamW with clipping and bf16 weights: the csrc ops beside torch's, as shares of the raw copy rate of the same run.

    python -m benchmarks.ops.adamw [--device cpu|cuda] [--shape 24x2048x6144] [--dtypes fp32,bf16]

The shape is layers x width x ffn: each layer has four matrices of width x width, three of ffn x width and two norms.
State is fp32; with bf16 the weights are written too. `update` must read gradient, moments and master, and write the
last three and the weight; `clip + update` must read the gradient once more. `torch` is its fused AdamW with the clip
factor in the kernel, then a cast; `separate` scales the gradients in a pass of its own, as clip_grad_norm_ does.
`split` keeps and moves 2 bytes of a master in place of 4, beside the bf16 weight.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.ops.timing import arguments, medians, print_rates
from trainer.config import OptimConfig
from trainer.ops import split
from trainer.ops.adamw import Interval, IntervalTable

OPTIM, LR, CLIP = OptimConfig(), 1e-6, 1.0


def main() -> None:
    options = arguments("AdamW, clipping and the cast against torch and the copy rate", "4x256x1024", "24x2048x6144")
    layers, width, ffn = options.shape
    sizes = ([width * width] * 4 + [ffn * width] * 3 + [width] * 2) * layers
    for dtype in options.dtypes:
        made = _intervals(sizes, options.device, publishes=dtype == "bf16")
        forms = {"csrc": _csrc(made, options.device), "torch": _torch(made), "separate": _torch(made, is_separate=True)}
        if dtype == "bf16":
            forms["split"] = _csrc([replace(each, master=_low_half(each)) for each in made], options.device)
        num_bytes = sum(sizes) * (28 + 2 * (dtype == "bf16"))
        source = torch.zeros(num_bytes // 8, device=options.device)
        target = torch.empty_like(source)

        def copy(source: Tensor = source, target: Tensor = target) -> Tensor:
            return target.copy_(source)

        for number, (title, more) in enumerate((("update", 0), ("clip + update", 4 * sum(sizes)))):
            runs: dict[str, Callable[[], object]] = {
                "copy": copy,
                **{name: form[number] for name, form in forms.items()},
            }
            moved = {name: 2 * source.nbytes if name == "copy" else num_bytes + more for name in runs}
            if "split" in runs:
                moved["split"] -= 2 * sum(sizes)  # of a master 2 bytes less each way, of a weight 2 bytes more
            print_rates(options, f"AdamW, {title} {dtype}", medians(runs, options.device, options.repeats), moved)


def _intervals(sizes: list[int], device: str, *, publishes: bool) -> list[Interval]:
    buffers = [torch.full((sum(sizes),), 1e-3, device=device) for _ in range(4)]
    weights = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=device) if publishes else None
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [
        Interval(
            *(buffer[end - size : end] for buffer in buffers),
            published=None if weights is None else weights[end - size : end],
            decays=True,
            row=row,
        )
        for row, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def _low_half(interval: Interval) -> Tensor:
    return torch.zeros_like(interval.master, dtype=split.LOW)


def _csrc(intervals: list[Interval], device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    table, is_bad = IntervalTable(intervals), torch.zeros((), device=device)
    squares = torch.zeros(len(intervals), dtype=torch.float64, device=device)
    one = torch.ones((), dtype=torch.float64, device=device)

    def update(factor: Tensor = one) -> None:
        table.adamw(OPTIM, LR, 10, factor=factor, is_bad=is_bad)

    def clip_and_update() -> None:
        table.write_squared_norms(squares)
        update(CLIP / squares.sum().sqrt().clamp(min=CLIP))

    return update, clip_and_update


def _torch(intervals: list[Interval], *, is_separate: bool = False) -> tuple[Callable[[], None], Callable[[], None]]:
    gradients, masters = [each.gradient for each in intervals], [each.master for each in intervals]
    moments = [each.exp_avg for each in intervals], [each.exp_avg_sq for each in intervals]
    published = [each.published for each in intervals if each.published is not None]
    steps = [torch.tensor(11.0, device=gradients[0].device) for _ in intervals]

    def update(scale: Tensor | None = None) -> None:
        torch._fused_adamw_(
            masters, gradients, *moments, [], steps, lr=LR, beta1=OPTIM.beta1, beta2=OPTIM.beta2,
            weight_decay=OPTIM.weight_decay, eps=OPTIM.eps, amsgrad=False, maximize=False, grad_scale=scale,
        )  # fmt: skip
        if published:
            torch._foreach_copy_(published, masters)

    def clip_and_update() -> None:
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        if not is_separate:
            return update(norm.clamp(min=CLIP) / CLIP)
        torch._foreach_mul_(gradients, CLIP / norm.clamp(min=CLIP))
        return update()

    return update, clip_and_update


if __name__ == "__main__":
    main()
