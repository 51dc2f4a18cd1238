"""Kernels: the time of profiled steps by kind: products, attention, other kernels, transfers, and what is left idle.

On a GPU these are its kernels. On a CPU they are operations of torch, each without those that it calls.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

KINDS = {  # the first whose pattern is in a kernel's name
    "transfers": r"nccl",
    "attention": r"cudnn|flash|fmha",
    "gradients of experts": r"add_products",
    "casts to eight bits": r"op_fp8_copy|largest_of",
    "rows of experts": r"gather_rows|combine_rows|place_rows|count_rows|scan_counts|invert_rows|weighted_swiglu",
    "matrix products": r"nvjet|gemm|cutlass",
    "RoPE": r"rope",
    "cross-entropy": r"op_logits|SoftMax",
    "norms": r"::(backward|forward)(_long)?<|add_partials|layer_norm",
    "AdamW": r"adamw|sum_squares|multi_tensor",
    "sums": r"reduce_kernel",
    "SwiGLU, GELU": r"activation_",
    "copies": r"[Mm]emcpy|[Mm]emset",
    "other elementwise": r"elementwise",
}
CPU_KINDS = {
    "transfers": r"c10d|gloo",
    "attention": r"attention",
    "matrix products": r"::(mm|addmm|bmm|baddbmm|matmul|linear)",
    "copies": r"copy|clone|::to$",
}
Span = tuple[float, float]  # microseconds


@dataclass(frozen=True, slots=True)
class KindTime:
    """The kernels of one kind: how many, and their time."""

    kind: str
    milliseconds: float
    num_kernels: int


def kind_of(name: str, *, on_gpu: bool) -> str:
    """Return the kind of a kernel, or of an operation, by its name."""
    kinds = KINDS if on_gpu else CPU_KINDS
    return next((kind for kind, pattern in kinds.items() if re.search(pattern, name)), "other")


def by_kind(kernels: Iterable[tuple[str, float]], *, on_gpu: bool) -> list[KindTime]:
    """Return the kinds of kernels, the longest first; each kernel is a name and milliseconds."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, milliseconds in kernels:
        times[kind_of(name, on_gpu=on_gpu)].append(milliseconds)
    rows = [KindTime(kind, sum(own), len(own)) for kind, own in times.items()]
    return sorted(rows, key=lambda row: -row.milliseconds)


def idle_ms(spans: Sequence[Span]) -> float:
    """Return the milliseconds between the first begin and the last end in which no span runs.

    Of (0, 4), (2, 5), (8, 9) microseconds that are 3 of 9: 0.003 ms.
    """
    busy, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        busy += max(stop - max(begin, end), 0.0)
        end = max(end, stop)
    return (end - min(begin for begin, _ in spans) - busy) / 1e3 if spans else 0.0


def kernels_of(profile: torch.profiler.profile) -> tuple[list[tuple[str, float]], list[Span]]:
    """Return names and milliseconds of a GPU's kernels, and when each ran; without a GPU of operations on the CPU."""
    events = [event for event in profile.events() if not getattr(event, "is_user_annotation", False)]
    on_gpu = [event for event in events if event.device_type.name == "CUDA"]
    if on_gpu:
        spans = [(event.time_range.start, event.time_range.end) for event in on_gpu]
        return [(event.name, event.device_time / 1e3) for event in on_gpu], spans
    return [(event.name, event.self_cpu_time_total / 1e3) for event in events], []


def table(profile: torch.profiler.profile) -> list[str]:
    """Return the lines of a table by kind of kernel, with what is left idle on a GPU."""
    kernels, spans = kernels_of(profile)
    rows = by_kind(kernels, on_gpu=bool(spans))
    lines = [f"{'kernels' if spans else 'operations':<20} {sum(row.milliseconds for row in rows):>9.1f} ms"]
    lines += [f"{row.kind:<20} {row.milliseconds:>9.1f} ms {row.num_kernels:>7}" for row in rows]
    return [*lines, f"{'idle':<20} {idle_ms(spans):>9.1f} ms"] if spans else lines
