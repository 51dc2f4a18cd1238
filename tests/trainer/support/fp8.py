"""Runs with products in eight bits whose parts of weights, and tokens of a rank, are multiples of 128."""

from dataclasses import replace
from typing import Any

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.parity import config_for
from trainer.config import Config, Fp8Config, ModelConfig
from trainer.config.check import cross_faults
from trainer.config.resolve import resolve

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=4,
    head_size=64,
    ffn_hidden_size=256,
    vocab_size=61,
    round_vocab_to=1,
    qk_norm=True,
)
BATCH = {"seq_length": 256, "global_batch_size": 4}
RECIPES = ("tensorwise", "rowwise", "blockwise")


def eight_bits(
    recipe: str,
    layout: ParallelLayout | None = None,
    *,
    model: dict[str, Any] | None = None,
    fp8: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    precision: str = "fp64",
    **parallel: Any,
) -> Config:
    """A run whose parts of weights, and tokens of a rank, are multiples of 128."""
    layout = layout or ParallelLayout()
    config = config_for("llama", layout, precision=precision)
    config = replace(
        config,
        model=replace(MODEL, **(model or {})),
        parallel=replace(config.parallel, **parallel),
        train=replace(config.train, gradient_accumulation_steps=0, **{**BATCH, **(train or {})}),
        fp8=Fp8Config(recipe=recipe, **{"wgrad": "fp8", **(fp8 or {})}),
    )
    require_equal(cross_faults(config, layout.world_size) == [], f"{cross_faults(config, layout.world_size)}")
    return resolve(config, layout.world_size)
