"""Products in eight bits: both factors are fp8 values with scales, and what is written is as wide as before.

For y = x W^T a token's row of x meets a row of W, for dx = dy W a row of dy meets a column of W, and for dW = dy^T x
columns of dy and x meet: each factor is needed as it is, or transposed, and has scales along what is summed. One pass
over a tensor makes both. Weights are cast once an update. A gradient of a weight is written, or added, in fp32: it is
never rounded to less. Where ranks have parts of what shares a scale, its largest magnitude is that of all of them. So
the numbers in eight bits are the same under every layout.

On CUDA products are torch's. On CPUs, and of float64, the values are multiplied in float64. Sources: Micikevicius and
others, 2022 (arXiv 2209.05433); tiles and blocks: DeepSeek-V3 (arXiv 2412.19437).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from trainer.config import Fp8Config
from trainer.linear.weight import Weight, add_product
from trainer.mesh.group import Group
from trainer.ops.fp8 import Maxima, Quantised, Scaling, maxima, quantise

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OF_TOKENS: dict[str, Scaling] = {"tensorwise": "tensor", "rowwise": "row", "blockwise": "tile"}
OF_WEIGHTS: dict[str, Scaling] = {"tensorwise": "tensor", "rowwise": "row", "blockwise": "block"}
RECIPES = {
    "tensor": ScalingType.TensorWise,
    "row": ScalingType.RowWise,
    "tile": ScalingType.BlockWise1x128,
    "block": ScalingType.BlockWise128x128,
}
LARGEST = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}  # the bits of the largest finite value
ROWS = 16  # of a product on CUDA: others are filled up


class Copies(NamedTuple):
    """A factor as it is and transposed, in eight bits, and as it was: those of the three that are needed."""

    rows: Quantised | None
    columns: Quantised | None
    wide: Tensor | None = None


class CastCounts:
    """Counts values of activations and gradients that are saturated, or zero in eight bits alone, in some steps.

    Row l of `sums` has those of layer l on this rank, and all values behind them.
    """

    def __init__(self, fp8: Fp8Config, num_layers: int, device: torch.device) -> None:
        self._interval, self._counts_now = fp8.stats_interval, False
        self.sums = torch.zeros(num_layers if self._interval else 0, 3, dtype=torch.float64, device=device)

    def begin_step(self, step: int) -> None:
        """Count from now on if the step behind `step` steps is one of the interval."""
        self._counts_now = self._interval > 0 and (step + 1) % self._interval == 0
        self.sums.zero_()

    def add(self, layer: int, x_RC: Tensor, copy: Quantised | None) -> None:
        """Count the values of a cast, of which `x_RC` went in."""
        if not self._counts_now or copy is None:
            return
        magnitudes = copy.values_RC.view(torch.uint8) & 0x7F  # without the sign
        is_zero = (magnitudes == 0) & (x_RC != 0)
        counts = (magnitudes >= LARGEST[copy.values_RC.dtype]).sum(), is_zero.sum()
        self.sums[layer, :2] += torch.stack(counts)
        self.sums[layer, 2] += is_zero.numel()

    def shares(self, sums: Tensor) -> Tensor:
        """Return the shares of saturated values of all layers, and those of zeros behind them; none in other steps."""
        if not self._counts_now:
            return sums.new_empty(0)
        counts_L3 = sums.view_as(self.sums)
        return (counts_L3[:, :2] / counts_L3[:, 2:].clamp(min=1)).t().flatten()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How factors are cast: `fp8` says what shares a scale, `tokens` are the groups that cut those of a micro-batch."""

    fp8: Fp8Config
    counts: CastCounts
    tokens: tuple[Group, ...] = ()

    def cast(
        self,
        x_RC: Tensor,
        scaling: Scaling,
        over: tuple[Sequence[Group], Sequence[Group]],
        *,
        rows: bool,
        columns: bool,
        is_gradient: bool = False,
    ) -> tuple[Quantised | None, Quantised | None]:
        """Return a factor in eight bits, and transposed; `over` are the groups that cut its columns, and its rows."""
        x_RC = x_RC.contiguous()
        largest: Maxima = (None, None)
        if any(over) and scaling in ("tensor", "row"):  # those of all ranks that have a part of what shares a scale
            by_row, by_column = maxima(x_RC, scaling, rows=rows, columns=columns)
            if scaling == "tensor":
                largest = (largest_of(by_column if by_row is None else by_row, (*over[0], *over[1])),) * 2
            else:
                largest = largest_of(by_row, over[0]), largest_of(by_column, over[1])
        dtype = FORMATS[self.fp8.grad_format if is_gradient else "e4m3"]
        return quantise(x_RC, scaling, dtype, pow2=self.fp8.pow2_scale, rows=rows, columns=columns, maxima=largest)


def largest_of(magnitudes: Tensor | None, groups: Sequence[Group]) -> Tensor | None:
    """Return the largest magnitudes of the ranks of groups; one that is not finite stays so.

    The bits of numbers that are not negative are in their order, with infinity and NaN behind them: transports that
    take the maximum of numbers may pass a NaN over.
    """
    if magnitudes is None:
        return None
    bits = magnitudes.view(torch.int64 if magnitudes.dtype == torch.float64 else torch.int32).clone()
    for group in groups:
        group.all_reduce(bits, "max")
    return bits.view(magnitudes.dtype)


class CutAlong(NamedTuple):
    """Who else has parts of a weight [N, K]: the groups that cut N, and K, and the ranks that have the same rows."""

    outs: tuple[Group, ...] = ()
    sums: tuple[Group, ...] = ()
    sharers: Group | None = None


ALONE = CutAlong()


class Fp8Gemm:
    """The products of a weight [N, K] in eight bits; owned by the training thread.

    Ranks that have the same rows of W have a part of dy each, which is summed before the cast: the first of them has
    the products. With `keeps_copies` the weight is cast once an update, both ways if it `is_trained`, else at each use.
    With `keeps_columns` a forward pass keeps x transposed in eight bits, and not
    x itself, which nothing else keeps.
    """

    def __init__(
        self,
        weight: Weight,
        recipe: Recipe,
        *,
        cut: CutAlong = ALONE,
        keeps_copies: bool = True,
        keeps_columns: bool = False,
        is_trained: bool = True,
        layer: int = 0,
    ) -> None:
        self.weight, self.recipe, self.cut = weight, recipe, cut
        self.is_trained, self.layer = is_trained, layer
        self.keeps_copies, self.narrow = keeps_copies, recipe.fp8.wgrad == "fp8"
        self.keeps_columns = keeps_columns and self.narrow
        self._scaling, self._scaling_of_weight = OF_TOKENS[recipe.fp8.recipe], OF_WEIGHTS[recipe.fp8.recipe]
        self._epoch, self._copies = -1, Copies(None, None)

    def take(self, x_TK: Tensor, *, keeps: bool = False) -> Copies:
        """Return x in eight bits, transposed too if that is kept."""
        rows, columns = self._cast_x(x_TK, rows=True, columns=keeps and self.keeps_columns)
        self.recipe.counts.add(self.layer, x_TK, rows)
        return Copies(rows, columns, x_TK)

    def keep(self, x: Copies) -> tuple[Tensor, ...]:
        """Return x, or its transposed values and scales."""
        if x.columns is not None:
            return x.columns.values_RC, x.columns.scales
        assert x.wide is not None, "a forward pass has it"
        return (x.wide,)

    def retake(self, *tensors: Tensor) -> Copies:
        """Return x transposed in eight bits, or if gradients of weights are wide products x itself."""
        if len(tensors) > 1:
            return Copies(None, Quantised(tensors[0], tensors[1], self._scaling))
        if self.narrow:
            return Copies(*self._cast_x(tensors[0], rows=False, columns=True))
        return Copies(None, None, tensors[0])

    def share(self, dy_TN: Tensor) -> Copies:
        """Return dy in eight bits, and transposed or as it is."""
        over, sharers, has_sum = (self.cut.outs, self.recipe.tokens), self.cut.sharers, True
        if sharers is not None:
            dy_TN, has_sum = sharers.all_reduce(dy_TN.clone()), sharers.index == 0
            dy_TN *= has_sum
        rows, columns = self.recipe.cast(dy_TN, self._scaling, over, rows=True, columns=self.narrow, is_gradient=True)
        if has_sum:
            self.recipe.counts.add(self.layer, dy_TN, rows)
        return Copies(rows, columns, None if self.narrow else dy_TN)

    def forward(self, x: Copies, bias_N: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return x W^T + b, [T, N], in `out` if there is one."""
        is_fast = self.recipe.fp8.fast_accum
        y_TN = product(x.rows, self.copy_of_weight(columns=False), self.weight.dtype, is_fast=is_fast, out=out)
        if bias_N is not None:
            y_TN += bias_N
        return y_TN

    def dgrad(self, dy: Copies, *, out: Tensor | None = None) -> Tensor:
        """Return dy W, [T, K], in `out` if there is one."""
        return product(dy.rows, self.copy_of_weight(columns=True), self.weight.dtype, out=out)

    def wgrad(self, dy: Copies, x: Copies, *, ends: bool = True) -> None:
        """Add dy^T x to the weight's gradient, now or when the schedule makes it."""
        if dy.wide is not None and x.wide is not None:
            dy_TN, x_TK = dy.wide, x.wide
            self.weight.add_gradient(lambda out, first: add_product(out, dy_TN, x_TK, first=first), ends=ends)
            return
        dy_NT, x_KT = dy.columns, x.columns

        def add(out: Tensor, first: bool) -> None:
            if first:
                product(dy_NT, x_KT, out.dtype, out=out)
            else:
                out += product(dy_NT, x_KT, out.dtype)

        self.weight.add_gradient(add, ends=ends)

    def _cast_x(self, x_TK: Tensor, *, rows: bool, columns: bool) -> tuple[Quantised | None, Quantised | None]:
        over = self.cut.sums, self.recipe.tokens
        return self.recipe.cast(x_TK, self._scaling, over, rows=rows, columns=columns)

    def copy_of_weight(self, *, columns: bool) -> Quantised | None:
        """Return the weight in eight bits as it is now, or transposed."""
        copies = self._copies if self._epoch == self.weight.epoch else Copies(None, None)
        if (copies.columns if columns else copies.rows) is None:
            both, over = self.keeps_copies and self.is_trained, (self.cut.sums, self.cut.outs)
            rows, transposed = both or not columns, both or columns
            copies = Copies(
                *self.recipe.cast(self.weight.values, self._scaling_of_weight, over, rows=rows, columns=transposed)
            )
            if self.keeps_copies:
                self._epoch, self._copies = self.weight.epoch, copies
        return copies.columns if columns else copies.rows


def product(
    a: Quantised | None, b: Quantised | None, dtype: torch.dtype, *, is_fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return a b^T, [M, N], of factors [M, K] and [N, K] in a dtype, in `out` if there is one.

    `is_fast` sums less exactly where that is faster: for factors with scales of rows, on GPUs.
    """
    assert a is not None, "this copy was asked for"
    assert b is not None, "this copy was asked for"
    if not a.values_RC.is_cuda or dtype == torch.float64:
        y_MN = (a.wide(torch.float64) @ b.wide(torch.float64).t()).to(dtype)
        return y_MN if out is None else out.copy_(y_MN)
    values_MK, of_a, num_rows = a.values_RC, a.scales, len(a.values_RC)
    if missing := -num_rows % ROWS:
        values_MK = F.pad(values_MK.view(torch.uint8), (0, 0, 0, missing)).view(values_MK.dtype)
        if a.scaling != "tensor":
            of_a = F.pad(of_a.t(), (0, missing), value=1.0).contiguous().t()
    of_b = b.scales if b.scaling == "tile" else b.scales.t()
    recipes = [RECIPES[factor.scaling].value for factor in (a, b)]
    arguments: Any = values_MK, b.values_RC.t(), [of_a], recipes[:1], [], [of_b], recipes[1:], [], None, dtype, []
    fast = {"use_fast_accum": is_fast and a.scaling == "row"}
    if out is None or missing:
        y_MN = torch.ops.aten._scaled_mm_v2(*arguments, **fast)[:num_rows]
        return y_MN if out is None else out.copy_(y_MN)
    return torch.ops.aten._scaled_mm_v2.out(*arguments, **fast, out=out)  # F.scaled_mm, which has no `out`
