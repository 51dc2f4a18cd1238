"""Products of many matrices of one shape, each with rows of its own: those of the tokens that go to an expert.

Rows come in the order of matrices, and `ends_E` says where those of each one end, on the device: [0, 2, 5] are matrices
without rows, with rows 0-1 and with rows 2-4. Several parameters of E matrices may be side by side, as gate and up are:
their outputs are the columns of one tensor, and the gradient of x is the sum of theirs.

On GPUs products of bf16 are torch's grouped ones, which round to bf16. So gradients of the matrices, which are added in
fp32, are a kernel of quack, which FlashAttention-4 brings along, or without it one of Triton. Without both, of other
dtypes and on CPUs products are a loop over matrices. It reads the ends: on a GPU the host waits for them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.linear.weight import Weight, add_product


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """The products of a weight [P E, N, K]: P parameters of E matrices, for R rows of x [R, K] and of y [R, P N]."""

    weight: Weight
    num_parts: int = 1
    kernel: Callable[[], str | None] = lambda: "triton"

    @property
    def num_experts(self) -> int:
        """Return the number of matrices of each parameter."""
        return self.weight.shape[0] // self.num_parts

    def forward(self, x_RK: Tensor, ends_E: Tensor) -> Tensor:
        """Return x W^T, [R, P N]."""
        parts, size = self._parts(), self.weight.shape[1]
        if has_library(x_RK):
            return joined([torch._grouped_mm(x_RK, part.transpose(1, 2), offs=ends_E) for part in parts])
        y_RC = x_RK.new_empty(len(x_RK), size * self.num_parts)
        for number, rows in runs_of(ends_E):
            for part, y_RN in zip(parts, y_RC[rows].split(size, 1), strict=True):
                torch.mm(x_RK[rows], part[number].t(), out=y_RN)
        return y_RC

    def dgrad(self, dy_RC: Tensor, ends_E: Tensor) -> Tensor:
        """Return dy W, [R, K], the sum of those of all parts."""
        parts, (_, size, num_columns) = self._parts(), self.weight.shape
        if has_library(dy_RC):
            first, *others = (
                torch._grouped_mm(dy_RN, part, offs=ends_E)
                for part, dy_RN in zip(parts, dy_RC.split(size, 1), strict=True)
            )
            for other in others:
                first += other
            return first
        dx_RK = dy_RC.new_empty(len(dy_RC), num_columns)
        for number, rows in runs_of(ends_E):
            for index, (part, dy_RN) in enumerate(zip(parts, dy_RC[rows].split(size, 1), strict=True)):
                torch.addmm(dx_RK[rows], dy_RN, part[number], beta=1.0 if index else 0.0, out=dx_RK[rows])
        return dx_RK

    def wgrad(self, factors: Callable[[], tuple[Tensor, Tensor]], ends_E: Tensor, *, ends: bool = True) -> None:
        """Add dy^T x to the weight's gradient, now or when the schedule makes it; `factors` returns dy and x then."""
        num_parts, kernel = self.num_parts, self.kernel()
        self.weight.add_gradient(
            lambda out, first: add_products(out, *factors(), ends_E, num_parts, first=first, kernel=kernel), ends=ends
        )

    def _parts(self) -> tuple[Tensor, ...]:
        return self.weight.values.chunk(self.num_parts)


def add_products(
    out_GNK: Tensor,
    dy_RC: Tensor,
    x_RK: Tensor,
    ends_E: Tensor,
    num_parts: int,
    *,
    first: bool,
    kernel: str | None = "triton",
) -> None:
    """Add dy^T x of each matrix's rows to `out`, [P E, N, K], or write it there: zero for one without rows."""
    if kernel == "quack":
        from quack.gemm_interface import gemm_add_inplace  # which compiles what it is first asked for

        if first:
            out_GNK.zero_()
        starts_E1 = F.pad(ends_E, (1, 0))  # [0, 0, 2, 5] for the ends 0, 2 and 5
        for out_ENK, dy_RN in zip(out_GNK.chunk(num_parts), dy_RC.split(out_GNK.shape[1], 1), strict=True):
            gemm_add_inplace(dy_RN.t(), x_RK, out_ENK, cu_seqlens_k=starts_E1, tuned=False)
        return
    if kernel == "triton" and has_triton(out_GNK):
        from trainer.linear import grouped_triton  # which needs triton

        grouped_triton.add_products(out_GNK, dy_RC, x_RK, ends_E, first=first)
        return
    size = out_GNK.shape[1]
    for number, rows in runs_of(ends_E):
        for out_ENK, dy_RN in zip(out_GNK.chunk(num_parts), dy_RC[rows].split(size, 1), strict=True):
            if rows.start < rows.stop:
                add_product(out_ENK[number], dy_RN, x_RK[rows], first=first)
            elif first:
                out_ENK[number].zero_()


def gradient_kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the kernels of gradients in fp32 for factors of a dtype there, the fastest first."""
    if device.type != "cuda":
        return []
    is_hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    quack = ["quack"] if dtype == torch.bfloat16 and is_hopper and _is_installed("quack") else []
    return quack + ["triton"] * _is_installed("triton")


def has_triton(out_GNK: Tensor) -> bool:
    """Return whether gradients of such a dtype are a kernel there that reads the ends on the device."""
    return out_GNK.is_cuda and out_GNK.dtype == torch.float32 and _is_installed("triton")


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def has_library(x_RK: Tensor) -> bool:
    """Return whether torch has a grouped product for such a tensor that does not wait for the host."""
    return x_RK.is_cuda and x_RK.dtype == torch.bfloat16


def runs_of(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the number of each matrix and its rows."""
    start = 0
    for number, stop in enumerate(read_ends(ends_E)):
        yield number, slice(start, stop)
        start = stop


def read_ends(ends_E: Tensor) -> list[int]:
    """Return the ends of rows on the host, which waits for them if they are on a GPU: nothing else here reads any.

    Tensors that have only shapes have no rows.
    """
    ends: list[int] = [0] * len(ends_E) if ends_E.is_meta else ends_E.tolist()
    return ends


def joined(parts: list[Tensor]) -> Tensor:
    """Return the columns of several tensors side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
