"""Products of experts, forward and backward, as a share of one matrix product of as many operations in the same run.

    python -m benchmarks.ops.grouped [--shape 16x8192x2048x2048] [--dtypes bf16]

The shape is experts x rows of each x columns of the result x columns of x. "uneven" has the same rows, cut so that one
expert has none and the largest three times the mean. Gradients of the matrices are added in fp32; beside them are
torch's grouped product, which writes them in bf16, and quack's, where it is installed.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.ops.timing import DTYPES, arguments, medians
from trainer.linear.grouped import GroupedGemm
from trainer.linear.weight import Weight
from trainer.ops.dtypes import wide_dtype


def main() -> None:
    options = arguments("products of experts against one product", "4x128x64x96", "16x8192x2048x2048")
    num_experts, rows, size, columns = options.shape
    for dtype in options.dtypes:
        kind = {"dtype": DTYPES[dtype], "device": options.device}
        x_RK, dy_RN = (torch.randn(num_experts * rows, width, **kind) for width in (columns, size))
        values_ENK = torch.randn(num_experts, size, columns, **kind)
        for name, counts in (("even", [rows] * num_experts), ("uneven", uneven(num_experts, rows))):
            ends_E = torch.tensor(counts, device=options.device).cumsum(0).int()
            forms = products(x_RK, dy_RN, values_ENK[0]) | grouped(x_RK, dy_RN, values_ENK, ends_E)
            seconds = medians(forms, options.device, options.repeats)
            rate = 2 * len(x_RK) * size * columns / 1e12
            for form, value in seconds.items():
                of = form.split()[0]
                share = seconds[f"{of} as one"] / value
                print(f"{name:8} {form:24} {rate / value:7.1f} TFLOP/s, {share:6.1%} of one product", flush=True)
                if form == f"{of} trained":
                    claim = f"experts, {name}, {of} {dtype}, {num_experts} x {rows} x {size} x {columns}"
                    options.record.add(claim, 100 * share, "% of one product")
            whole = sum(seconds[f"{of} as one"] for of in ("y", "dx", "dW"))
            print(f"{name:8} all {whole / sum(seconds[f'{of} trained'] for of in ('y', 'dx', 'dW')):.1%}", flush=True)


def uneven(num_experts: int, rows: int) -> list[int]:
    """Return rows of experts: none of the first, thrice the mean of the last, those between as even as may be."""
    counts = [0] + [rows] * (num_experts - 2) + [3 * rows]
    for number in range(rows):
        counts[1 + number % (num_experts - 2)] -= 1
    return counts


def products(x_RK: Tensor, dy_RN: Tensor, weight_NK: Tensor) -> dict[str, Callable[[], object]]:
    """Return the three as one product each; the gradient of a matrix is added in fp32 by cuBLAS too."""
    weight = Weight("one", weight_NK, gradient_of(weight_NK), contributes=True)

    def gradient() -> None:
        weight.begin_sum()
        weight.add_gradient(lambda out, first: torch.mm(dy_RN.t(), x_RK, out_dtype=out.dtype, out=out))

    return {
        "y as one": lambda: torch.mm(x_RK, weight_NK.t()),
        "dx as one": lambda: torch.mm(dy_RN, weight_NK),
        "dW as one": gradient if x_RK.is_cuda and x_RK.dtype == torch.bfloat16 else lambda: torch.mm(dy_RN.t(), x_RK),
    }


def grouped(x_RK: Tensor, dy_RN: Tensor, values_ENK: Tensor, ends_E: Tensor) -> dict[str, Callable[[], object]]:
    """Return the three as the trainer has them, and the gradient of the matrices by others."""
    weight = Weight("experts", values_ENK, gradient_of(values_ENK), contributes=True)
    gemm = GroupedGemm(weight)

    def gradient() -> None:
        weight.begin_sum()
        gemm.wgrad(lambda: (dy_RN, x_RK), ends_E)

    forms: dict[str, Callable[[], object]] = {
        "y trained": lambda: gemm.forward(x_RK, ends_E),
        "dx trained": lambda: gemm.dgrad(dy_RN, ends_E),
        "dW trained": gradient,
    }
    if x_RK.is_cuda and x_RK.dtype == torch.bfloat16:
        forms["dW torch, bf16"] = lambda: torch._grouped_mm(dy_RN.t(), x_RK, offs=ends_E)
        if find_spec("quack") is not None:
            from quack.gemm_interface import gemm_add_inplace

            starts = torch.cat([ends_E.new_zeros(1), ends_E])
            out_ENK = gradient_of(values_ENK).zero_()
            forms["dW quack, fp32"] = lambda: gemm_add_inplace(dy_RN.t(), x_RK, out_ENK, cu_seqlens_k=starts)
    return forms


def gradient_of(values: Tensor) -> Tensor:
    return torch.empty_like(values, dtype=wide_dtype(values.dtype))


if __name__ == "__main__":
    main()
