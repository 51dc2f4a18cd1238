"""Mixtures of experts: any layout trains as one process does, orders and recompute keep bits, plain torch agrees."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.trainer.support.moe import MIXTURES, engine_of, mixture
from tests.trainer.support.parity import (
    alone,
    assemble_weights,
    assert_parity,
    local_batch,
    run_steps,
)
from trainer.config import DataConfig, ModelConfig
from trainer.config.resolve import has_experts, layout_of
from trainer.linear import grouped
from trainer.model.router import best, scores, weights
from trainer.model.table import parameter_table
from trainer.run.activations import CHOICES
from trainer.verify.threads import run_threads

SHARDED: dict[str, Any] = {"zero_stage": 3, "zero_whole_kib": 0}
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "tp2", {}),
    ("shared", "tp2-pp2", {"schedule": "zb-h1"}),
    ("every second", "dp2", {"zero_stage": 3, "zero_whole_kib": 0}),
    ("shared", "tp2", {"sequence_parallel": "off"}),
    ("plain", "tp4-dp2", {"tp_overlap_parts": 2}),
    ("shared", "pp2-virtual2", {"schedule": "zb-h1"}),
    ("plain", "cp2-pp2", {"zero_stage": 2, "zero_whole_kib": 0}),
    ("shared", "tp2-cp2-dp2", SHARDED),
    ("every second", "dp4", {"dp_shard": 2, **SHARDED}),
    ("plain", "dp2", {"zero_stage": 0}),
    ("every second", "tp2-dp2-pp2", {"schedule": "zb-h1", "sequence_parallel": "off"}),
    ("plain", "pp3", {"pipeline_layout": "cost"}),
]
QUICK = 3  # the others are slow together
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.ci] * (place >= QUICK))
    for place, case in enumerate(LAYOUTS)
]


@cache
def reference(name: str) -> dict[str, Any]:
    return run_steps(0, alone(mixture(name)), 2)


@pytest.mark.parametrize(("name", "layout", "parallel"), CASES)
def test_a_layout_repeats_one_process(name: str, layout: str, parallel: dict[str, Any]) -> None:
    config = mixture(name, layout, **parallel)
    assert_parity(run_threads(layout_of(config).world_size, run_steps, config, 2), reference(name))


def outcome(config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    runs = run_threads(layout_of(config).world_size, run_steps, config, 2)
    return (runs[0]["losses"], runs[0]["norms"], runs[0]["evaluation"]), assemble_weights(runs)


def assert_same_bits(left: Any, right: Any) -> None:
    numbers, values = left
    others, other_values = right
    assert numbers == others
    for name, value in values.items():
        assert torch.equal(value, other_values[name]), name


SLOW = [pytest.mark.slow, pytest.mark.ci]
BITS = [
    ("shared", "tp1", {}, ["full", "selective of mlp"]),
    pytest.param("plain", "tp2", {}, [name for name in CHOICES if name != "none"], marks=SLOW),
    pytest.param("shared", "tp2", {"sequence_parallel": "off"}, ["full", "selective"], marks=SLOW),
    pytest.param("every second", "tp2-pp2", {"schedule": "zb-h1"}, ["full", "selective of mlp"], marks=SLOW),
    pytest.param("shared", "ep4-dp4", {"moe_dispatch": "alltoall"}, ["full", "selective of mlp"], marks=SLOW),
    pytest.param("shared", "ep2-dp2", {"moe_overlap_parts": 3}, ["full", "selective of mlp"], marks=SLOW),
]


@pytest.mark.parametrize(("name", "layout", "parallel", "choices"), BITS)
def test_what_is_made_again_has_the_bits_of_what_is_kept(
    name: str, layout: str, parallel: dict[str, Any], choices: list[str]
) -> None:
    expected = outcome(mixture(name, layout, **parallel))
    for choice in choices:
        assert_same_bits(outcome(mixture(name, layout, train=CHOICES[choice], **parallel)), expected)


@pytest.mark.parametrize(
    ("name", "layout", "parallel"),
    [
        ("shared", "pp2", {}),
        pytest.param("plain", "tp2-pp2", {}, marks=SLOW),
        pytest.param("every second", "dp2-pp2", {}, marks=SLOW),
        pytest.param("shared", "ep2-dp2-pp2", {"moe_dispatch": "alltoall"}, marks=SLOW),
        pytest.param("shared", "ep2-dp2-pp2", {"moe_overlap_parts": 2}, marks=SLOW),
    ],
)
def test_orders_of_passes_and_overlap_have_equal_bits(name: str, layout: str, parallel: dict[str, Any]) -> None:
    expected = outcome(mixture(name, layout, **parallel))
    for options in ({"schedule": "gpipe"}, {"schedule": "zb-h1"}, {"overlap_grad_reduce": False}):
        assert_same_bits(outcome(mixture(name, layout, **parallel, **options)), expected)


@pytest.mark.slow
@pytest.mark.ci
def test_documents_and_cut_state_have_the_bits_of_any_order() -> None:
    config = replace(mixture("shared", "cp2-pp2", **SHARDED), data=DataConfig(document_mask=True))
    expected = outcome(config)
    for options in ({"schedule": "zb-h1"}, {"overlap_param_gather": False}):
        assert_same_bits(outcome(replace(config, parallel=replace(config.parallel, **options))), expected)


def test_the_table_has_the_names_of_an_imported_model() -> None:
    table = parameter_table(mixture("shared"))
    of_layer = {name.removeprefix("layers.1.mlp."): row.shape for name, row in table.items() if "layers.1.mlp" in name}
    assert of_layer == {
        "router.weight": (16, 32),
        "experts.gate.weight": (16, 4, 32),
        "experts.up.weight": (16, 4, 32),
        "experts.down.weight": (16, 32, 4),
        "shared.gate.weight": (8, 32),
        "shared.up.weight": (8, 32),
        "shared.down.weight": (32, 8),
    }
    assert table["layers.0.mlp.gate.weight"].shape == (48, 32), "the first layer is dense"


def test_which_layers_have_experts() -> None:
    model = ModelConfig(num_layers=6, num_experts=4, first_dense_layers=2, moe_every=2)
    assert [has_experts(model, layer) for layer in range(6)] == [False, False, False, True, False, True]
    assert not has_experts(ModelConfig(), 0)


def test_equal_scores_go_to_lower_numbers() -> None:
    tied = torch.tensor([[0.5, 0.7, 0.5, 0.7, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.3, 0.3]])
    assert best(tied, 3).tolist() == [[1, 3, 0], [0, 1, 2], [2, 3, 4]]


def test_weights_are_shares_of_the_best() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.float64)
    model = ModelConfig(num_experts=3)
    top = scores(logits, model)[:, 1:]
    assert weights(top, model).sum().item() == pytest.approx(1)
    assert torch.equal(weights(top, replace(model, router_norm_topk=False)), top)
    scaled = weights(top, replace(model, router_scale=2.5))
    torch.testing.assert_close(scaled, 2.5 * weights(top, model))
    assert torch.equal(scores(logits, replace(model, router_score="sigmoid")), torch.sigmoid(logits))


@pytest.mark.parametrize("name", MIXTURES)
def test_all_tokens_on_the_same_experts(name: str) -> None:
    """Routers of zeros: each token goes to the first ones, the others have no token and no gradient."""
    config = mixture(name)
    engine = engine_of(config, router=0.0)
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    k = config.model.experts_per_token
    for weight, _ in engine.store._found.values():
        if ".experts." in weight.name:
            gradient = weight._gradient.unflatten(0, (-1, config.model.num_experts))
            assert gradient[:, :k].any()
            assert not gradient[:, k:].any()


def test_an_expert_without_tokens_has_no_gradient_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    config = mixture("plain")
    engine = engine_of(config)
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    monkeypatch.setattr("trainer.model.router.best", lambda scores, k: torch.zeros_like(scores[:, :k]).long() + 3)
    engine.train_step(1, local_batch(config, 1, engine.mesh))
    for weight, _ in engine.store._found.values():
        if ".experts." in weight.name:
            gradient = weight._gradient.unflatten(0, (-1, 5))
            assert not gradient[:, [0, 1, 2, 4]].any()


def test_bf16_trains_near_fp32() -> None:
    wide, narrow = (
        run_steps(0, mixture("shared", train={"precision": precision}), 2) for precision in ("fp32", "bf16")
    )
    assert narrow["losses"] == pytest.approx(wide["losses"], rel=2e-2)


@pytest.mark.slow
@pytest.mark.ci
def test_no_product_of_experts_is_made_that_the_backward_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made again are gate and up, not down."""
    counts = []
    real = grouped.GroupedGemm.forward
    monkeypatch.setattr(
        grouped.GroupedGemm, "forward", lambda self, *args: counts.append(self.num_parts) or real(self, *args)
    )
    config = mixture("plain", train=CHOICES["full"])
    engine = engine_of(config)
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    passes = config.train.gradient_accumulation_steps * config.model.num_layers
    assert (counts.count(2), counts.count(1)) == (2 * passes, passes)
