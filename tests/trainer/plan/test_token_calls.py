"""Calls for tokens: what the run's code multiplies beside them, what that hides, and what the host takes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ckptkit import Coords
from tests.trainer.support.calibrated import calibration_of
from tests.trainer.support.option_walk import run_of
from trainer.config import Config
from trainer.config.resolve import layout_of, resolve
from trainer.model.table import local_runs, parameter_table
from trainer.plan.calibration import PartRate
from trainer.plan.rates import Rates
from trainer.plan.step_time import group_places, step_time
from trainer.plan.store_moves import store_moves
from trainer.plan.token_calls import TokenCalls
from trainer.plan.volumes import VolumeTable

NODE: dict[str, Any] = {"network": 50e9, "node": 8}
H100 = Rates.of_card("h100", **NODE)
SIZES = {
    "model__num_layers": "2",
    "model__vocab_size": "512",
    "train__micro_batch_size": "2",
    "train__precision": "bf16",
}


def cut_run(**flags: str) -> Config:
    return resolve(run_of("examples/gpt-small.toml", parallel__tp="2", **SIZES, **flags), 2)


def test_four_of_ten_calls_of_a_layer_are_beside_products() -> None:
    config = cut_run()
    model, tokens = config.model, config.train.micro_batch_size * config.train.seq_length
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    widened = [2 * tokens * model.hidden_size * rows // 2 for rows in (heads, 2 * model.ffn_hidden_size)]
    calls = Counter[tuple[str, str, int, int]]()
    for move, count in VolumeTable().of(config).layer.items():
        calls[move.kind, move.way, move.beside, move.beside_w] += count
    exposed = {("all_gather", "F"): 2, ("reduce_scatter", "F"): 2, ("all_gather", "B"): 2}
    beside = {("all_gather", "B", work, 0): 1 for work in widened}  # of x once more beside dx, whose sum is beside dW
    beside |= {("reduce_scatter", "B", 0, work): 1 for work in widened}
    assert calls == {(*call, 0, 0): count for call, count in exposed.items()} | beside


def token_calls(rates: Rates, *, puts_off: bool = False) -> TokenCalls:
    return TokenCalls(VolumeTable().of(cut_run()), rates, {"tp": (2, 2)}, puts_off)


def test_a_product_hides_what_was_measured_of_a_call() -> None:
    half = [PartRate("beside", kind, "any", (1.0, 2.0), 0.5, 1.0) for kind in ("all_gather", "reduce_scatter")]
    known = calibration_of(H100)
    measured = Rates.of_calibration(replace(known, figures=(*known.figures, *half)), **NODE)
    slow = 1e9  # operations a second: each call is shorter than what is beside it
    calls = [token_calls(H100), token_calls(measured), token_calls(H100, puts_off=True)]
    alone = calls[0].exposed_s("layer", "B", 1e30)
    hidden = [alone - each.exposed_s("layer", "B", slow) for each in calls]
    assert hidden[0] > 0
    assert hidden[1] == pytest.approx(hidden[0] / 2)
    assert hidden[2] == pytest.approx(hidden[0] / 2), "a sum of dx is beside no product that W makes"
    assert [each.exposed_s("layer", "F", slow) for each in calls] == [calls[0].exposed_s("layer", "F", 1e30)] * 3


def test_a_host_that_makes_calls_slowly_is_what_a_step_waits_for() -> None:
    known, config = calibration_of(H100), cut_run()
    volumes = VolumeTable().of(config)
    hosts = [known.host_s | {"call": seconds} for seconds in (1e-3, 2e-3)]
    less, more = (
        step_time(config, Rates.of_calibration(replace(known, host_s=host), **NODE), volumes) for host in hosts
    )
    number = config.train.gradient_accumulation_steps
    calls = number * (config.model.num_layers * volumes.layer.total() + volumes.ends.total())
    assert more.total - less.total == pytest.approx(calls * 1e-3)


def test_a_host_makes_the_calls_of_cut_weights_too() -> None:
    known = calibration_of(H100)
    rates = Rates.of_calibration(replace(known, host_s=known.host_s | {"call": 1.0}), **NODE)
    flags = {"parallel__dp": "2", "parallel__zero_stage": "3", "parallel__reshard_after_forward": "on"}
    config = resolve(run_of("examples/gpt-small.toml", **(SIZES | {"model__num_layers": "9"} | flags)), 2)
    runs = local_runs(config, parameter_table(config), layout_of(config), Coords())
    times = sum(move.times for move in store_moves(config, runs, group_places(config)) if move.is_of_pass)
    assert times > 2 * config.train.gradient_accumulation_steps
    assert step_time(config, rates, VolumeTable().of(config)).total == pytest.approx(times, rel=0.01)
