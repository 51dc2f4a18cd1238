"""Runs that must be equal bit for bit: one order of passes or another, activations kept or made again, other stages.

Losses, gradient norms and final weights are compared, at one thread, by their bits.
"""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import assemble_weights, config_for, run_steps, small
from trainer.config import Config, DataConfig
from trainer.config.resolve import layout_of, resolve
from trainer.run.activations import CHOICES
from trainer.store.leases import Leases
from trainer.verify.threads import run_threads

QUICK = [("llama", "pp2")]
RUNS = [*QUICK, *(
    pytest.param(model, layout, marks=pytest.mark.slow)
    for model in ("llama", "gpt2")
    for layout in ("tp1", "pp2", "tp2-pp3", "dp2-pp2", "tp2-dp2", "cp2-pp2")
    if (model, layout) not in QUICK
)]  # fmt: skip

AGAIN = ("selective", "selective of attention", "full that keeps attention", "full")


Outcome = tuple[Any, dict[str, torch.Tensor]]


def config(model: str, layout: str) -> Config:
    return small(config_for(model, ParallelLayout.parse(layout)))


def outcome(config: Config) -> Outcome:
    """Losses and norms, and the final weights."""
    runs = run_threads(layout_of(config).world_size, run_steps, config, 2)
    assert all(run["losses"] == runs[0]["losses"] for run in runs)
    return (runs[0]["losses"], runs[0]["norms"]), assemble_weights(runs)


def assert_equal(left: Config, right: Config) -> None:
    assert_same_bits(outcome(left), outcome(right))


def assert_same_bits(left: Outcome, right: Outcome) -> None:
    (numbers, weights), (other_numbers, other_weights) = left, right
    assert numbers == other_numbers
    for name, values in weights.items():
        assert torch.equal(values, other_weights[name]), name


def assert_near(left: Outcome, right: Outcome) -> None:
    (numbers, weights), (other_numbers, other_weights) = left, right
    for ours, others in zip(numbers, other_numbers, strict=True):
        assert ours == pytest.approx(others, rel=1e-12)
    for name, values in weights.items():
        torch.testing.assert_close(values, other_weights[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), RUNS)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_other_schedules_than_1f1b(model: str, layout: str, schedule: Any) -> None:
    one = config(model, layout)
    assert_equal(one, replace(one, parallel=replace(one.parallel, schedule=schedule)))


@pytest.mark.ci
@pytest.mark.parametrize(("model", "layout"), RUNS)
def test_activations_kept_and_made_again(model: str, layout: str) -> None:
    one = config(model, layout)
    again: Literal["full"] = "full"
    assert_equal(one, replace(one, train=replace(one.train, recompute=again)))


@pytest.mark.ci
@pytest.mark.parametrize(("model", "layout"), [
    ("gpt2", "tp1"), *(
        pytest.param(model, layout, marks=pytest.mark.slow)
        for model, layout in (("llama", "tp1"), ("gpt2", "tp2-pp3"), ("llama", "dp2-pp2"))
    ),
])  # fmt: skip
def test_logits_made_in_parts(model: str, layout: str) -> None:
    """Bit for bit in any order of passes and with activations made again; else near those made at once."""
    whole = config(model, layout)
    parts = replace(whole, train=replace(whole.train, max_logits_gib=1e-6, z_loss=0.01))
    whole = replace(whole, train=replace(whole.train, z_loss=0.01))
    schedule: Literal["gpipe"] = "gpipe"
    again: Literal["full"] = "full"
    both = replace(
        parts, parallel=replace(parts.parallel, schedule=schedule), train=replace(parts.train, recompute=again)
    )
    found = outcome(parts)
    assert_same_bits(found, outcome(both))
    assert_near(found, outcome(whole))


SEEN = [pytest.param(method, marks=[pytest.mark.slow, pytest.mark.ci]) for method in ("ulysses", "allgather")]


@pytest.mark.parametrize("method", SEEN)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_rows_that_are_cut_over_ranks(model: str, method: Any) -> None:
    """With documents, a window and parameters that are cut: in any order of passes, and whatever is made again."""
    one = config(model, "cp2-pp2")
    one = replace(one, data=DataConfig(document_mask=True), model=replace(one.model, num_layers=4, window=5))
    one = sharded(replace(one, parallel=replace(one.parallel, cp_method=method)), 3)
    expected = outcome(one)
    for other in (
        *(sharded(one, 3, schedule=schedule) for schedule in ("gpipe", "zb-h1")),
        sharded(one, 3, overlap_grad_reduce=False, overlap_param_gather=False),
        *(replace(one, train=replace(one.train, **CHOICES[choice])) for choice in AGAIN),
    ):
        assert_same_bits(expected, outcome(other))


def sharded(config: Config, zero_stage: Any, **parallel: Any) -> Config:
    """The same run with every bucket cut that may be, however small."""
    options = {"zero_stage": zero_stage, "zero_whole_kib": 0, **parallel}
    return replace(config, parallel=replace(config.parallel, **options))


SHARDED = [
    (model, layout)
    for model in ("llama", "gpt2")
    for layout in ("dp2", "dp4", "tp2-dp2", "dp2-pp2", "dp2-pp2-virtual2", "cp2-pp2")
]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), SHARDED)
def test_gradients_and_parameters_that_are_cut(model: str, layout: str) -> None:
    """Stages 2 and 3 have equal bits however passes follow each other; of one micro-batch stage 1 has the same too.

    Of several, stages 2 and 3 sum over ranks before they sum over micro-batches.
    """
    one = deep(config(model, layout))
    expected = outcome(sharded(one, 2))
    assert_near(expected, outcome(sharded(one, 1)))
    for other in (
        sharded(one, 3),
        sharded(one, 3, reshard_after_forward="off"),
        sharded(one, 3, reshard_after_forward="on", overlap_grad_reduce=False, overlap_param_gather=False),
        replace(sharded(one, 3), train=replace(one.train, recompute="full")),
        *(sharded(one, 3, schedule=schedule) for schedule in ("gpipe", "zb-h1") if one.parallel.pp > 1),
    ):
        assert_same_bits(expected, outcome(other))
    size = one.train.micro_batch_size * one.parallel.dp
    whole = replace(one, train=replace(one.train, global_batch_size=size, gradient_accumulation_steps=1))
    assert_same_bits(outcome(sharded(whole, 1)), outcome(sharded(whole, 3)))


NESTED = [
    (model, layout, dp_shard)
    for model in ("llama", "gpt2")
    for layout, dp_shard in (
        ("dp4", 2),
        ("tp2-dp4", 2),
        ("dp4-pp2", 2),
        ("cp2-dp2", 1),
        ("tp4-dp2", 1),
        ("dp4-pp2-virtual2", 1),
    )
]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(("model", "layout", "dp_shard"), NESTED)
def test_what_is_cut_in_groups_of_neighbours(model: str, layout: str, dp_shard: int) -> None:
    """Stages 2 and 3 have equal bits however passes follow each other, near those where all ranks cut."""
    one = small(config_for(model, ParallelLayout.parse(layout)))
    expected = outcome(sharded(one, 2, dp_shard=dp_shard))
    assert_near(expected, outcome(sharded(one, 3)))
    for other in (
        sharded(one, 3, dp_shard=dp_shard),
        sharded(one, 3, dp_shard=dp_shard, reshard_after_forward="off", overlap_grad_reduce=False),
        sharded(one, 2, dp_shard=dp_shard, overlap_param_gather=False),
        *(sharded(one, 3, dp_shard=dp_shard, schedule=name) for name in ("gpipe", "zb-h1") if one.parallel.pp > 1),
    ):
        assert_same_bits(expected, outcome(other))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_of_two_ranks_and_one_micro_batch_groups_have_equal_bits(zero_stage: int) -> None:
    one = config("llama", "dp2")
    whole = replace(one, train=replace(one.train, global_batch_size=2, gradient_accumulation_steps=1))
    assert_equal(sharded(whole, zero_stage), sharded(whole, zero_stage, dp_shard=1))


@pytest.mark.usefixtures("leases_with_content")
def test_content_that_a_lease_still_has_is_that_which_was_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sharded(deep(config("llama", "dp2")), 3)
    found = outcome(one)
    monkeypatch.setattr(Leases, "has", lambda self, tenant: False)
    monkeypatch.setattr(Leases, "give_back", lambda self, lease: (lease.settle(), self.forget(), self.put_by(lease)))
    assert_same_bits(found, outcome(one))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("first", "second"), [("tp1", "pp2"), ("dp2", "dp2-pp2"), pytest.param("tp2", "tp2-pp3", marks=pytest.mark.slow)]
)
def test_other_stages_for_untied_heads_and_at_most_two_terms_a_sum(first: str, second: str) -> None:
    assert_equal(config("llama", first), config("llama", second))


@pytest.mark.ci
@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.slow), pytest.param("gpipe", marks=pytest.mark.slow), "zb-h1"]
)
@pytest.mark.parametrize(
    "layout",
    [
        "pp2-virtual2",
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("pp3-virtual2", "dp2-pp2-virtual3")),
    ],
)
def test_several_stages_a_rank(layout: str, schedule: str) -> None:
    one = deep(config("llama", str(replace(ParallelLayout.parse(layout), virtual=1))))
    other = deep(config("llama", layout))
    assert_equal(one, replace(other, parallel=replace(other.parallel, schedule=schedule)))


def deep(config: Config) -> Config:
    """The same run with 7 layers, which stages do not divide."""
    return replace(config, model=replace(config.model, num_layers=7))


@pytest.mark.ci
@pytest.mark.slow
def test_other_stages_in_bf16() -> None:
    """A stage's end rounds the residual stream's sum, and its gradient, as the norm inside a stage does."""
    one, other = (
        replace(each, train=replace(each.train, precision="bf16"))
        for each in (config("llama", "tp1"), config("llama", "pp2"))
    )
    assert_equal(one, other)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"), [("llama", "tp2"), *(("gpt2", layout) for layout in ("tp2-pp3", "tp2-dp2", "tp2-dp2-pp2"))]
)
def test_cut_tokens_transferred_in_parts(model: str, layout: str) -> None:
    """With 8 rows a part; MKL multiplies fewer with other kernels."""
    whole = config(model, layout)
    whole = replace(whole, train=replace(whole.train, micro_batch_size=2, gradient_accumulation_steps=0))
    whole = resolve(whole, layout_of(whole).world_size)
    expected = outcome(whole)
    for num_parts, compare in ((2, assert_same_bits), (3, assert_near)):
        parts = replace(whole, parallel=replace(whole.parallel, tp_overlap_parts=num_parts))
        compare(outcome(parts), expected)


@pytest.mark.parametrize(("first", "second"), [("tp1", "pp2"), ("dp4", "dp4-pp2")])
def test_other_stages_are_near_where_sums_have_another_order(first: str, second: str) -> None:
    assert_near(outcome(config("gpt2", first)), outcome(config("gpt2", second)))
