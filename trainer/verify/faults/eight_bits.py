"""Faults of products in eight bits: of the scales that ranks share, and of the sums of gradients."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from trainer.config import Fp8Config
from trainer.linear import fp8
from trainer.linear.fp8 import Fp8Gemm, Recipe
from trainer.verify.faults.fault import CP, DP, EIGHT_BITS, TP, Fault
from trainer.verify.faults.planting import Patch, wrapping


def own_maxima(patch: Patch) -> None:
    patch.setattr(fp8, "largest_of", lambda magnitudes, groups: magnitudes)


def tokens_of_one(real: Any, self: Recipe, x_RC: Tensor, scaling: Any, over: Any, **options: Any) -> Any:
    return real(self, x_RC, scaling, (over[0], ()), **options)


def written_always(real: Any, self: Fp8Gemm, dy: Any, x: Any, *, ends: bool = True) -> None:
    self.weight.add_gradient(lambda out, first: out.copy_(fp8.product(dy.columns, x.columns, out.dtype)), ends=ends)


EIGHT_BIT_FAULTS = tuple(
    replace(fault, check=EIGHT_BITS, precision="bf16", model={"num_kv_heads": 4, "bias": False, "dropout": 0.0})
    for fault in (
        Fault(
            "fp8-maximum-of-part",
            "the largest magnitude of a part of a tensor",
            TP,
            own_maxima,
            fp8=Fp8Config(recipe="tensorwise", wgrad="fp8"),
        ),
        Fault(
            "fp8-maximum-of-row-part",
            "the largest magnitude of a part of a row",
            TP,
            own_maxima,
            fp8=Fp8Config(recipe="rowwise", wgrad="fp8"),
        ),
        Fault(
            "fp8-maximum-of-own-tokens",
            "the largest magnitude of a rank's own tokens",
            CP,
            wrapping(Recipe, "cast", tokens_of_one),
            fp8=Fp8Config(recipe="rowwise", wgrad="fp8"),
        ),
        Fault(
            "fp8-gradient-overwrites",
            "a gradient in eight bits overwrites the one before",
            DP,
            wrapping(Fp8Gemm, "wgrad", written_always),
            fp8=Fp8Config(recipe="blockwise", wgrad="fp8"),
        ),
    )
)
