"""Each way to cut a model, by name, beside one process: losses within 1e-10 in float64, weights within 1e-9.

tests/trainer/test_layouts.py draws them at random. Here "llama" has QK-norm, grouped key-value heads and a head of its
own, "gpt2" a tied head, biases and dropout; both have 7 layers, which no layout divides, and an odd vocabulary.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import alone, assert_parity, config_for, run_steps, small
from tests.trainer.support.ranks import run_ranks
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.config.resolve import cuts_tokens, layout_of, resolve
from trainer.verify.threads import run_threads

TOKENS_CUT = {"sequence_parallel": "on"}
IN_PARTS = TOKENS_CUT | {"tp_overlap_parts": 3}
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("tp2", TOKENS_CUT),
    ("tp4", TOKENS_CUT),
    ("tp2-pp2", TOKENS_CUT),
    ("tp2-dp2", TOKENS_CUT),
    ("tp4", IN_PARTS),
    ("tp2-dp2-pp2", IN_PARTS | {"schedule": "zb-h1"}),
    ("pp2-virtual2", {}),
    ("pp2-virtual3", {}),
    ("pp3", {"schedule": "zb-h1"}),
    ("tp2-pp2-virtual2", IN_PARTS | {"schedule": "zb-h1"}),
    ("pp2-virtual2", {"pipeline_layout": "3,1,2,1"}),
    ("dp2-pp2", {"schedule": "zb-h1", "pipeline_layout": "5,2", "zero_stage": 0}),
    ("cp2-pp2", {"schedule": "zb-h1"}),
    ("tp2-cp2-pp2-virtual2", IN_PARTS | {"zero_stage": 3, "zero_whole_kib": 0}),
    ("cp4-dp2", {"zero_stage": 2, "zero_whole_kib": 0}),
    ("cp2-dp2", {"zero_stage": 0}),
    ("tp2-cp2-pp2", {"cp_method": "allgather", "zero_stage": 3, "zero_whole_kib": 0}),
    ("cp4-dp2", {"cp_method": "allgather"}),
]
QUICK = [("llama", 0), ("gpt2", 2), ("llama", 7), ("gpt2", 8)]  # the others are slow together
CASES = [
    pytest.param(model, *row, marks=[] if (model, number) in QUICK else [pytest.mark.slow])
    for model in ("gpt2", "llama")
    for number, row in enumerate(ROWS)
]


def deep(model: str, layout: str, **parallel: Any) -> Config:
    """The model with 7 layers, and two rows a micro-batch."""
    made = small(config_for(model, ParallelLayout.parse(layout)))
    train = replace(made.train, micro_batch_size=2, gradient_accumulation_steps=0)
    made = replace(made, model=replace(made.model, num_layers=7), parallel=replace(made.parallel, **parallel))
    return resolve(replace(made, train=train), layout_of(made).world_size)


@cache
def reference(model: str) -> dict[str, Any]:
    return run_steps(0, alone(deep(model, "tp1")), 2)


@pytest.mark.parametrize(("model", "layout", "parallel"), CASES)
def test_a_layout_repeats_one_process(model: str, layout: str, parallel: dict[str, Any]) -> None:
    config = deep(model, layout, **parallel)
    num_ranks = layout_of(config).world_size
    assert cross_faults(config, num_ranks) == []
    assert cuts_tokens(config) == (config.parallel.tp > 1)
    assert_parity(run_threads(num_ranks, run_steps, config, 2), reference(model))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), [("gpt2", "tp4"), ("llama", "tp2-pp2"), ("gpt2", "tp2-dp2")])
def test_processes_that_transfer_in_parts_repeat_one(model: str, layout: str) -> None:
    config = deep(model, layout, **IN_PARTS)
    assert_parity(run_ranks(4, run_steps, config, 2), reference(model))
