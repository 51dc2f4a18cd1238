"""Every schedule trains alike, bit for bit: a stage's backward passes keep their order, so sums of gradients do too."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import Different, require_equal
from tests.trainer.support.layouts import LAYOUTS, configs
from tests.trainer.support.parity import assert_parity, config_for, run_steps, small
from tests.trainer.support.ranks import run_ranks
from trainer import engine
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.linear.weight import Weight, add_or_write
from trainer.pipeline.actions import Action
from trainer.pipeline.schedules import SCHEDULES
from trainer.verify.threads import run_threads

examples = settings(derandomize=True, database=None, phases=[Phase.generate, Phase.shrink])
PIPELINES = [layout for layout in LAYOUTS if layout.pp > 1 and layout.world_size <= 8]


def with_schedule(config: Config, name: str) -> Config:
    return replace(config, parallel=replace(config.parallel, schedule=name))


def assert_equal_bits(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for rank, (run, other) in enumerate(zip(runs, others, strict=True)):
        for key in ("losses", "norms", "num_tokens"):
            require_equal(run[key] == other[key], f"rank {rank}: {key}")
        for piece, same in zip(run["weights"], other["weights"], strict=True):
            require_equal((piece.name, piece.box, piece.start) == (same.name, same.box, same.start), piece.name)
            require_equal(np.array_equal(piece.data, same.data), f"rank {rank}: {piece.name}")


@pytest.mark.ci
@pytest.mark.slow
@settings(examples, max_examples=5)
@given(config=configs(st.sampled_from(PIPELINES)))
def test_schedules_end_with_equal_bits_on_threads(config: Config) -> None:
    check(config)


@pytest.mark.slow
@settings(examples, max_examples=60)
@given(config=configs(st.sampled_from(PIPELINES)))
def test_many_schedules_end_with_equal_bits_on_threads(config: Config) -> None:
    check(config)


def check(config: Config) -> None:
    first, *others = [
        run_threads(layout_of(config).world_size, run_steps, with_schedule(config, name), 2)
        for name in sorted(SCHEDULES)
    ]
    for runs in others:
        assert_equal_bits(runs, first)


def out_of_turn(patch: pytest.MonkeyPatch) -> None:
    """On the last rank W2 comes after W3."""
    real = engine.rank_actions

    def swapped(*arguments: Any) -> list[Action]:
        row = list(real(*arguments))
        if arguments[-1] == 0 or arguments[0] == "forward":
            return row
        w2, w3 = (next(i for i, each in enumerate(row) if (each.kind, each.microbatch) == ("W", m)) for m in (2, 3))
        row[w2], row[w3] = row[w3], row[w2]
        return row

    patch.setattr(engine, "rank_actions", swapped)


def merged(patch: pytest.MonkeyPatch) -> None:
    """Products of two micro-batches are summed before they are added."""
    real, waiting = Weight.add_gradient, dict[str, Any]()

    def add_gradient(weight: Weight, compute: Any, **ends: bool) -> None:
        if weight.name not in waiting:
            waiting[weight.name] = compute
            return
        earlier = waiting.pop(weight.name)

        def both(out: torch.Tensor, first: bool) -> None:
            total = torch.empty_like(out)
            earlier(total, True)
            compute(total, False)
            add_or_write(total)(out, first)

        real(weight, both, **ends)

    patch.setattr(Weight, "add_gradient", add_gradient)


@pytest.mark.parametrize("plant", [out_of_turn, merged])
def test_bits_see_another_order_of_w(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity does not: the sums are the same but for their last bits."""
    config = with_schedule(config_for("llama", ParallelLayout(pp=2)), "zb-h1")
    config = replace(small(config), model=replace(small(config).model, num_layers=2))
    first = run_threads(2, run_steps, config, 1)
    plant(monkeypatch)
    other = run_threads(2, run_steps, config, 1)
    assert_parity(other, first[0] | {"weights": [piece for run in first for piece in run["weights"]]})
    with pytest.raises(Different):
        assert_equal_bits(other, first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [ParallelLayout(pp=3), ParallelLayout(tp=2, pp=2), ParallelLayout(dp=2, pp=2)], ids=str
)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_schedules_end_with_equal_bits_on_processes(layout: ParallelLayout, precision: str) -> None:
    config = config_for("gpt2", layout, precision=precision)
    one, all_first, zero_bubble = (
        run_ranks(layout.world_size, run_steps, with_schedule(config, name), 5) for name in ("1f1b", "gpipe", "zb-h1")
    )
    assert_equal_bits(one, all_first)
    assert_equal_bits(one, zero_bubble)
    stage_of = [layout.coords(rank).pp for rank in range(layout.world_size)]
    assert [run["peak_live"] for run in one] == [layout.pp - stage for stage in stage_of]
    assert len({run["peak_live"] for run in all_first}) == 1
    assert {run["peak_live"] for run in zero_bubble} == {layout.pp}
