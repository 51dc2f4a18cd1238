"""Which products are made in eight bits, and how: the linears of blocks, by one of three recipes."""

from dataclasses import dataclass
from typing import Literal

from threefold.options import option

ON = {"recipe": ("tensorwise", "blockwise", "rowwise")}
TILE = 128  # values of a row that share a scale, and both sides of a block of a weight that does
ALIGNED = 16  # bytes that rows of a product in eight bits begin at a multiple of


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """`[fp8]`: the products of linears in blocks in eight bits; head, router and embedding never are."""

    recipe: Literal["off", "tensorwise", "blockwise", "rowwise"] = option(
        "off",
        "products in eight bits, by what shares a scale: a tensor, tiles of 128 values and blocks of 128 x 128, or a "
        "row",
        flags=["--fp8"],
    )
    wgrad: Literal["bf16", "fp8"] = option(
        "bf16", "the products for gradients of weights: as wide as the rest of the run, or in eight bits", needs=ON
    )
    grad_format: Literal["e4m3", "e5m2"] = option(
        "e4m3", "format of gradients; e5m2 reaches further and is coarser", needs={"recipe": ("tensorwise", "rowwise")}
    )
    pow2_scale: bool = option(True, "scales are powers of two, so that they round nothing", needs=ON)
    fast_accum: bool = option(
        False,
        "products of forward passes sum less exactly on GPUs: faster, at the price of loss",
        needs={"recipe": ("rowwise",)},
    )
    skip: tuple[str, ...] = option((), "weights left as they are, by patterns of names such as layers.0.*", needs=ON)
    stats_interval: int = option(
        0,
        "steps between two lines with the share of saturated and of zero values; 0 never",
        minimum=0,
        keeps_bits=True,
        needs=ON,
    )

    @property
    def size(self) -> int:
        """Return what both sides of a weight must be multiples of."""
        return TILE if self.recipe == "blockwise" else ALIGNED
