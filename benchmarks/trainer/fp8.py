"""Eight bits, op by op: casts as shares of the copy rate of the same run, and products with their casts beside bf16's.

    python benchmarks/trainer/fp8.py [--tokens 32768] [--columns 2048,4096] [--models 1b,8B] [--parts casts,products]

Casts of x [tokens, columns] of bf16 read 2 bytes a value and write one a copy; maxima are read before, by tensor and
by row. Products are those of a block's linears: y = x W^T, dx = dy W, and dW = dy^T x in fp32. Each is timed with the
casts of its activations and gradients. "all" has the three with one pass over x, over dy and over the weight. As
trained, sums are fast by row in y alone; "fast" takes fast sums by tensor too.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.timing import Forms, medians
from benchmarks.record import add_option
from trainer.linear.fp8 import FORMATS, OF_TOKENS, OF_WEIGHTS, product
from trainer.ops.fp8 import SCALINGS, Quantised, Scaling, maxima, quantise

COPIES = {"plain": (True, False), "transposed": (False, True), "both": (True, True)}
MODELS = {  # weights of a block, out x in, and tokens of a micro-batch
    "1b": ({"qkv": (4096, 2048), "out": (2048, 2048), "gate, up": (16384, 2048), "down": (2048, 8192)}, 32768),
    "8B": ({"qkv": (6144, 4096), "out": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}, 8192),
}
E4M3 = FORMATS["e4m3"]
Cast = tuple[Quantised | None, Quantised | None]


def main() -> None:
    options = parsed()
    if "casts" in options.parts:
        for columns in map(int, options.columns.split(",")):
            measure_casts(options, torch.randn(options.tokens, columns, dtype=torch.bfloat16, device=options.device))
    if "products" in options.parts:
        for model in options.models.split(","):
            weights, tokens = MODELS[model]
            for name, shape in weights.items():
                num_tokens, out, size = (number // options.shrink for number in (tokens, *shape))
                measure_products(options, f"{model} {name}", num_tokens, out, size)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="casts to fp8, and products of what they write")
    parser.add_argument("--tokens", type=int, default=32768, help="rows of x of casts (default: %(default)s)")
    parser.add_argument("--columns", default="2048,4096,8192,16384", help="of x of casts (default: %(default)s)")
    parser.add_argument("--models", default="1b,8B", help="whose products (default: %(default)s)")
    parser.add_argument("--parts", default="casts,products", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default: %(default)s)")
    parser.add_argument("--shrink", type=int, default=1, help="divides the sides of products, for a trial on a CPU")
    add_option(parser)
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{where}; torch {torch.__version__}; medians of {options.repeats} interleaved rounds")
    return options


def measure_casts(options: Any, x_TC: Tensor) -> None:
    """Print the rates of maxima and casts of x by each scaling, as shares of the copy rate."""
    target_TC = torch.empty_like(x_TC)
    shape = " x ".join(map(str, x_TC.shape))
    for scaling in SCALINGS:
        forms: Forms = {"copy": lambda: target_TC.copy_(x_TC), **casts(x_TC, scaling)}
        seconds = medians(forms, options.device, options.repeats)
        num_bytes = {"copy": 4, "maxima": 2, "plain": 3, "transposed": 3, "both": 4}  # a value
        rates = {name: num_bytes[name] * x_TC.numel() / value for name, value in seconds.items()}
        copy = rates.pop("copy")
        shares = ", ".join(f"{name} {rate / 1e9:6.0f} GB/s {rate / copy:6.1%}" for name, rate in rates.items())
        print(f"{shape:14} {scaling:6} copy {copy / 1e9:6.0f} GB/s; {shares}", flush=True)
        for name, rate in rates.items():
            claim = f"fp8 by {scaling}, {name if name == 'maxima' else f'cast {name}'}, {shape}"
            limit = {"the copy [GB/s]": copy / 1e9}
            options.record.add(claim, 100 * rate / copy, "% of the copy rate", limit=limit)


def casts(x_TC: Tensor, scaling: Scaling) -> Forms:
    """Return the passes over x: of maxima where they are one of their own, and of each choice of copies."""
    forms: Forms = {}
    largest = (None, None)
    if scaling in ("tensor", "row"):
        forms["maxima"] = lambda: maxima(x_TC, scaling)
        largest = maxima(x_TC, scaling)
    for name, (rows, columns) in COPIES.items():
        forms[name] = lambda rows=rows, columns=columns: quantise(  # type: ignore[misc]
            x_TC, scaling, E4M3, rows=rows, columns=columns, maxima=largest
        )
    return forms


@dataclass(frozen=True, slots=True)
class Products:
    """The three products of a weight [N, K] by a recipe, with casts; with `is_fast` all sums by tensor are fast."""

    x_TK: Tensor
    dy_TN: Tensor
    weight_NK: Tensor
    tokens: Scaling
    weights: Scaling
    is_fast: bool = False

    def forms(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield each product with the casts of x and dy, whose weight is cast before, then all with all casts."""
        rows_NK, columns_KN = quantise(self.weight_NK, self.weights, E4M3)
        yield "y", lambda: self._product(self._cast(self.x_TK, "plain")[0], rows_NK, fast=True)
        yield "dx", lambda: self._product(self._cast(self.dy_TN, "plain")[0], columns_KN)
        yield (
            "dW",
            lambda: self._of_weight(self._cast(self.dy_TN, "transposed")[1], self._cast(self.x_TK, "transposed")[1]),
        )
        yield "all", self._all

    def _all(self) -> None:
        rows_NK, columns_KN = quantise(self.weight_NK, self.weights, E4M3)
        x_TK, x_KT = self._cast(self.x_TK, "both")
        self._product(x_TK, rows_NK, fast=True)
        dy_TN, dy_NT = self._cast(self.dy_TN, "both")
        self._product(dy_TN, columns_KN)
        self._of_weight(dy_NT, x_KT)

    def _cast(self, x_TC: Tensor, copies: str) -> Cast:
        rows, columns = COPIES[copies]
        return quantise(x_TC, self.tokens, E4M3, rows=rows, columns=columns)

    def _of_weight(self, dy_NT: Quantised | None, x_KT: Quantised | None) -> Tensor:
        return self._product(dy_NT, x_KT, dtype=torch.float32)

    def _product(
        self, a: Quantised | None, b: Quantised | None, *, dtype: torch.dtype = torch.bfloat16, fast: bool = False
    ) -> Tensor:
        if not self.is_fast or a is None or b is None:
            return product(a, b, dtype, is_fast=fast)
        one = F.ScalingType.TensorWise
        return F.scaled_mm(
            a.values_RC, b.values_RC.t(), a.scales, one, b.scales, one, output_dtype=dtype, use_fast_accum=True
        )


def measure_products(options: Any, title: str, num_tokens: int, out: int, size: int) -> None:
    """Print the rates of the products of a weight by each recipe, with those of bf16 beside them."""
    kind = {"dtype": torch.bfloat16, "device": options.device}
    x_TK, dy_TN, weight_NK = (
        torch.randn(*shape, **kind) for shape in ((num_tokens, size), (num_tokens, out), (out, size))
    )
    runs = {"bf16": in_bf16(x_TK, dy_TN, weight_NK)}
    for recipe, tokens in OF_TOKENS.items():
        runs[recipe] = usable(recipe, Products(x_TK, dy_TN, weight_NK, tokens, OF_WEIGHTS[recipe]))
    if x_TK.is_cuda:
        fast = Products(x_TK, dy_TN, weight_NK, "tensor", "tensor", is_fast=True)
        runs["tensorwise fast"] = usable("tensorwise fast", fast)
    for name in ("y", "dx", "dW", "all"):
        forms = {recipe: forms[name] for recipe, forms in runs.items() if name in forms}
        seconds = medians(forms, options.device, options.repeats)
        work = 2 * num_tokens * out * size * (3 if name == "all" else 1) / 1e12
        wide = seconds.pop("bf16")
        ratios = ", ".join(f"{recipe} {work / value:6.0f} {wide / value:5.2f}x" for recipe, value in seconds.items())
        shape = f"{num_tokens} x {out} x {size}"
        print(f"{title:12} {shape:20} {name:3} TFLOP/s: bf16 {work / wide:6.0f}, {ratios}", flush=True)
        for recipe, value in seconds.items():
            claim = f"fp8 {recipe}, {name} of {title}, {shape}"
            options.record.add(claim, work / value, "TFLOP/s", peer={"bf16": work / wide})


def in_bf16(x_TK: Tensor, dy_TN: Tensor, weight_NK: Tensor) -> Forms:
    """Return the three products in bf16, whose gradient of the weight is in fp32."""
    wide: dict[str, Any] = {"out_dtype": torch.float32} if x_TK.is_cuda else {}
    forms: Forms = {
        "y": lambda: F.linear(x_TK, weight_NK),
        "dx": lambda: torch.mm(dy_TN, weight_NK),
        "dW": lambda: torch.mm(dy_TN.t(), x_TK, **wide),
    }
    return forms | {"all": lambda: [form() for form in forms.values()]}


def usable(recipe: str, products: Products) -> Forms:
    """Return the forms that run here, by product."""
    forms: Forms = {}
    for name, form in products.forms():
        try:
            form()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            print(f"{recipe}: no {name}: {str(error).splitlines()[0]}")
        else:
            forms[name] = form
    return forms


if __name__ == "__main__":
    main()
