"""Faults of products in eight bits: their scales, their copies, and what is multiplied so at all. See `faults`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.faults import ShownFault
from tests.trainer.support.fp8 import BATCH, RECIPES, eight_bits
from tests.trainer.support.parity import assert_parity, local_batch, make_engine, run_steps
from trainer.config import Config, Fp8Config
from trainer.config import eight_bits as table
from trainer.linear import fp8
from trainer.linear.fp8 import CastCounts, Fp8Gemm, Recipe
from trainer.linear.weight import Gemm, Weight
from trainer.model import fp8 as of_model
from trainer.ops import fp8 as ops
from trainer.ops.fp8 import Quantised
from trainer.store.store import ParameterStore
from trainer.verify.faults.planting import Patch, wrapping
from trainer.verify.threads import run_threads

NEAR = 0.04  # of a norm: e4m3 has three bits behind the first


def gemm_of(recipe: str, values: Tensor, gradient: Tensor | None = None) -> Fp8Gemm:
    """The products of one weight, of which that for its gradient is in eight bits too."""
    weight = Weight("layers.0.mlp.down.weight", values, gradient, contributes=True)
    weight.num_users = 1
    config = Fp8Config(recipe=recipe, wgrad="fp8")  # type: ignore[arg-type]
    return Fp8Gemm(weight, Recipe(config, CastCounts(config, 1, values.device)), keeps_columns=True)


def factors(*, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and dy whose tiles of 128 have magnitudes that are far apart."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        powers = torch.arange(rows // 128).unsqueeze(1) * 3 + torch.arange(columns // 128) * 5
        return values * (2.0 ** (powers % 7 - 3)).repeat_interleave(128, 0).repeat_interleave(128, 1)

    return drawn(256, 384), drawn(128, 384), drawn(256, 128)


def compare_products() -> None:
    """Products of each recipe with those in float64."""
    x_TK, values_NK, dy_TN = factors()
    for recipe in RECIPES:
        gradient = torch.zeros_like(values_NK)
        gemm = gemm_of(recipe, values_NK, gradient)
        x = gemm.take(x_TK, keeps=True)
        y_TN, dy = gemm.forward(x), gemm.share(dy_TN)
        dx_TK = gemm.dgrad(dy)
        gemm.wgrad(dy, gemm.retake(*gemm.keep(x)))
        for name, value, expected in (
            ("y", y_TN, x_TK @ values_NK.t()),
            ("dx", dx_TK, dy_TN @ values_NK),
            ("dW", gradient, dy_TN.t() @ x_TK),
        ):
            gap = float((value - expected).norm() / expected.norm())
            require_equal(0 < gap < NEAR, f"{recipe}: {name} is {gap:.3f} from the product in float64")


def compare_spoilt() -> None:
    """A number that is not finite spoils the products of its scale: the step is seen as bad."""
    for recipe in RECIPES:
        x_TK, values_NK, _ = factors()
        x_TK[130, 200] = torch.inf
        gemm = gemm_of(recipe, values_NK)
        require_equal(bool(gemm.forward(gemm.take(x_TK))[130].isnan().all()), recipe)


def compare_eight(recipe: str, layout: ParallelLayout, **parallel: Any) -> None:
    """A layout with one process."""
    train = {**BATCH, "seq_length": 128 * layout.cp, "global_batch_size": 2}
    fp8 = {"pow2_scale": False}  # else values are rounded as with any other scale
    reference = run_steps(0, eight_bits(recipe, train=train, fp8=fp8), 2)
    config = eight_bits(recipe, layout, train=train, fp8=fp8, **parallel)
    assert_parity(run_threads(layout.world_size, run_steps, config, 2), reference)


def compare_copies() -> None:
    """Copies that are made once an update with those that are made at each use."""
    config = eight_bits("rowwise", train={**BATCH, "seq_length": 128, "global_batch_size": 2})
    losses = []
    for keeps_copies in (True, False):
        engine = make_engine(0, config)
        gemms = [weight.gemm for weight in engine.store.weights if isinstance(weight.gemm, Fp8Gemm)]
        for gemm in gemms:
            gemm.keeps_copies = keeps_copies
        batches = [local_batch(config, step, engine.mesh) for step in range(3)]
        losses.append([engine.train_step(step, batch).loss for step, batch in enumerate(batches)])
        losses[-1].append(engine.eval_batch(batches[0])[0])
        engine.initialise()
        losses[-1].append(engine.eval_batch(batches[0])[0])
    require_equal(losses[0] == losses[1], f"{losses[0]} in place of {losses[1]}")


def compare_names() -> None:
    """What is multiplied in eight bits: linears of blocks, and nothing beside them."""
    engine = make_engine(0, eight_bits("rowwise", fp8={"skip": ("layers.1.mlp.*",)}))
    wide = [weight.name for weight in engine.store.weights if len(weight.shape) == 2 and isinstance(weight.gemm, Gemm)]
    expected = ["embed.weight", "layers.1.mlp.gate.weight + layers.1.mlp.up.weight", "layers.1.mlp.down.weight"]
    require_equal(sorted(wide) == sorted([*expected, "head.weight"]), f"as they are: {wide}")


def of_the_neighbour(real: Any, *args: Any, **options: Any) -> Any:
    return tuple(
        copy if copy is None else replace(copy, scales=copy.scales.t().roll(1, 0).contiguous().t())
        for copy in real(*args, **options)
    )


def nan_at_the_limit(real: Any, *args: Any, **options: Any) -> Any:
    def spoilt(copy: Quantised) -> Quantised:
        values = copy.values_RC.float()
        values[values.abs() >= values.abs().max()] = torch.nan
        return replace(copy, values_RC=values.to(copy.values_RC.dtype))

    return tuple(copy if copy is None else spoilt(copy) for copy in real(*args, **options))


def never_cast_again(patch: Patch) -> None:
    real, first = Fp8Gemm.copy_of_weight, dict[int, Quantised | None]()

    def of_epoch(self: Fp8Gemm, *, columns: bool) -> Quantised | None:
        copy = real(self, columns=columns)
        return first.setdefault(id(self), copy) if columns and self.keeps_copies else copy

    patch.setattr(Fp8Gemm, "copy_of_weight", of_epoch)


def restored_unseen(patch: Patch) -> None:
    real = ParameterStore.initialise

    def initialise(self: ParameterStore, seed: int) -> None:
        epochs = [weight.epoch for weight in self.weights]
        real(self, seed)
        for weight, epoch in zip(self.weights, epochs, strict=True):
            weight.epoch = epoch

    patch.setattr(ParameterStore, "initialise", initialise)


def with_the_head(patch: Patch) -> None:
    real = table.linears_of

    def linears_of(config: Config, layer: int) -> Iterator[list[table.Linear]]:
        yield from real(config, layer)
        shape = 1024, config.model.hidden_size
        yield [table.Linear("head.weight", shape, shape)]

    patch.setattr(table, "linears_of", linears_of)
    patch.setattr(of_model, "linears_of", linears_of)


def finite_always(real: Any, *args: Any, **options: Any) -> Tensor:
    return real(*args, **options).nan_to_num(1.0)


FP8_FAULTS = [
    ShownFault("the scale of a neighbouring group", wrapping(fp8, "quantise", of_the_neighbour), compare_products),
    ShownFault("the largest number of fp8 is NaN", wrapping(fp8, "quantise", nan_at_the_limit), compare_products),
    ShownFault(
        "scales half as large as they must be",
        wrapping(ops, "scales_of", lambda real, *a, **o: real(*a, **o) / 2),
        compare_products,
    ),
    ShownFault("an infinity that its scale does not show", wrapping(ops, "scales_of", finite_always), compare_spoilt),
    ShownFault("a transposed copy of the values before", never_cast_again, compare_copies),
    ShownFault("copies of the values before a restore", restored_unseen, compare_copies),
    ShownFault("the head in eight bits", with_the_head, compare_names),
]
