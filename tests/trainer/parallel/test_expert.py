"""Experts that are cut over ranks: any layout trains as one process does, whatever rows there is memory for."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.moe import mixture
from tests.trainer.support.parity import (
    alone,
    assemble_weights,
    assert_parity,
    counted_step,
    local_batch,
    make_engine,
    run_steps,
)
from tests.trainer.support.ranks import run_ranks
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network
from trainer.model.microbatch import MicroBatch
from trainer.model.recompute import Region
from trainer.model.router import Router
from trainer.model.table import local_runs
from trainer.parallel.rows import RowLimit
from trainer.verdict import Outcome
from trainer.verify.threads import run_threads

SLOW = [pytest.mark.slow, pytest.mark.ci]
ROUTE = Router.__call__
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("shared", "ep2-dp2", {"moe_rows": 1.0, "moe_overlap_parts": 2}),
    ("every second", "tp2-ep4-dp2-etp1", {}),
    ("every second", "ep4-dp4", {"moe_dispatch": "alltoall", "moe_overlap_parts": 3}),
    ("shared", "tp2-ep2-dp2", {}),
    ("shared", "tp2-ep2-dp2", {"sequence_parallel": "off"}),
    ("every second", "ep4-dp4", {"zero_stage": 3, "zero_whole_kib": 0}),
    ("shared", "cp2-ep4-dp2", {"moe_rows": 1.1, "moe_overlap_parts": 4}),
    ("every second", "cp2-ep2", {"zero_stage": 2, "zero_whole_kib": 0}),
    ("shared", "ep2-dp2-pp2", {"schedule": "zb-h1", "moe_rows": 1.0, "moe_overlap_parts": 2}),
    ("every second", "tp2-ep2-etp1", {}),
    ("shared", "tp2-cp2-ep8-dp2-etp1", {"moe_rows": 1.0, "moe_overlap_parts": 2}),
    ("every second", "ep2-dp4-pp2-virtual2", {"schedule": "zb-h1"}),
    ("shared", "ep2-dp4", {"zero_stage": 0}),
]
EXCHANGING: list[tuple[str, dict[str, Any]]] = [
    ("tp2-ep4-dp2-etp1", {}),
    ("tp2-ep2-dp2", {"sequence_parallel": "off"}),
    ("tp2-ep2-dp2", {}),
    ("cp2-ep4-dp2", {}),
    ("ep2-dp2-pp2", {"schedule": "zb-h1"}),
    ("ep4-dp4", {"zero_stage": 3, "zero_whole_kib": 0}),
]
LAYOUTS += [("shared", layout, {"moe_dispatch": "alltoall", **parallel}) for layout, parallel in EXCHANGING]
QUICK = 3
CASES = [pytest.param(*case, marks=SLOW * (place >= QUICK)) for place, case in enumerate(LAYOUTS)]


@cache
def reference(name: str) -> dict[str, Any]:
    return run_steps(0, alone(mixture(name)), 2)


def of_bias(config: Config) -> Config:
    return replace(config, model=replace(config.model, moe_balance="bias", moe_bias_rate=0.05))


@pytest.mark.parametrize(("name", "layout", "parallel"), CASES)
def test_a_layout_repeats_one_process(name: str, layout: str, parallel: dict[str, Any]) -> None:
    config = mixture(name, layout, **parallel)
    assert cross_faults(config, layout_of(config).world_size) == []
    assert_parity(run_threads(layout_of(config).world_size, run_steps, config, 2), reference(name))


@pytest.mark.slow
@pytest.mark.ci
def test_processes_that_exchange_rows_repeat_one() -> None:
    config = mixture("shared", "ep2-dp2", moe_dispatch="alltoall")
    assert_parity(run_ranks(2, run_steps, config, 2), reference("shared"))


def first_experts(router: Router, x_TD: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Send every token to the same experts, which one rank of ep has."""
    weights_TK, experts_TK = ROUTE(router, x_TD, batch)
    return weights_TK, torch.arange(experts_TK.shape[1]).expand_as(experts_TK).contiguous()


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [("ep2-dp2", {"train": {"recompute": "full"}}), ("ep4-dp4", {}), ("tp2-ep4-dp2-etp1", {})],
)
def test_ranks_to_which_no_row_comes_repeat_one_process(
    layout: str, parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, "__call__", first_experts)
    config = mixture("shared", layout, moe_dispatch="alltoall", **parallel)
    expected = run_steps(0, alone(mixture("shared")), 2)
    assert_parity(run_threads(layout_of(config).world_size, run_steps, config, 2), expected)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("layout", ["ep2-dp2", "tp2-ep4-dp2-etp1"])
def test_biases_move_by_the_counts_of_all_ranks(layout: str) -> None:
    config = of_bias(mixture("shared", layout))
    expected = run_steps(0, alone(of_bias(mixture("shared"))), 2)
    runs = run_threads(layout_of(config).world_size, run_steps, config, 2)
    assert_parity(runs, expected)
    for run in runs:
        for name, values in run["biases"].items():
            assert torch.equal(values, expected["biases"][name])


def outcome(config: Config) -> tuple[Any, dict[str, torch.Tensor]]:
    runs = run_threads(layout_of(config).world_size, run_steps, config, 2)
    return (runs[0]["losses"], runs[0]["norms"]), assemble_weights(runs)


@pytest.mark.parametrize(
    "options", [{"moe_rows": 1.0}, pytest.param({"moe_rows": 1.25, "schedule": "gpipe"}, marks=SLOW)]
)
def test_bits_do_not_depend_on_the_bound_of_rows(options: dict[str, Any]) -> None:
    """A step that needs more is repeated; at twice the mean two ranks have memory for all rows."""
    (numbers, weights), (others, other_weights) = (
        outcome(of_bias(mixture("plain", "ep5-dp5", train={"global_batch_size": 10}, **more)))
        for more in ({"moe_rows": 5.0}, options)
    )
    assert numbers == others
    for name, values in weights.items():
        assert torch.equal(values, other_weights[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"schedule": "zb-h1"}, marks=SLOW),
        pytest.param({"train": {"recompute": "selective", "recompute_modules": ("attention",)}}, marks=SLOW),
        pytest.param({"train": {"recompute": "full"}}, marks=SLOW),
    ],
)
def test_bits_do_not_depend_on_how_many_rows_fit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With more rows than fit, layers of experts are made again, and only in steps that have more."""
    layout = "ep2-dp2-pp2" if "schedule" in options else "ep2-dp2"
    config = of_bias(mixture("shared", layout, moe_rows=1.0, **options))
    expected, spied = outcome(config), list[bool]()
    run = Region.run

    def run_spied(region: Region, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        spied.append(True)
        return run(region, *arguments)

    monkeypatch.setattr(Region, "run", run_spied)
    numbers = []
    for fits in (2.0, 1.0):
        monkeypatch.setattr(RowLimit, "fits", fits)
        spied.clear()
        (values, weights), (other_values, other_weights) = outcome(config), expected
        numbers.append(len(spied))
        assert values == other_values
        for name, tensor in weights.items():
            assert torch.equal(tensor, other_weights[name]), name
    if config.train.recompute == "none":
        assert numbers[0] == 0 < numbers[1]


def repeats(rank: int, config: Config, *, network: Network | None = None) -> list[tuple[Outcome, float, float]]:
    engine = make_engine(rank, config, network=network)
    batch = local_batch(config, 0, engine.mesh)
    before = [values.clone() for _, values in engine.store.values()]
    first = engine.train_step(0, batch)
    same = all(torch.equal(old, new) for old, (_, new) in zip(before, engine.store.values(), strict=True))
    bias_is_zero = not engine.balance.bias_LE.any()
    engine.verdict.repeat()
    engine.balance.limit.make_room(first.of_experts["rank_rows"])
    second = counted_step(engine, 0, batch)
    assert same
    assert bias_is_zero
    return [(stats.outcome, stats.of_experts["rank_rows"], engine.balance.limit.factor) for stats in (first, second)]


def test_a_step_that_needs_more_rows_changes_nothing_and_is_repeated() -> None:
    config = of_bias(mixture("shared", "ep2-dp2", moe_rows=1.0))
    first, second = run_threads(2, repeats, config)
    assert first == second, "all ranks agree"
    assert [result for result, *_ in first] == [Outcome.REPEATED, Outcome.COUNTS]
    (_, needed, factor), _ = first
    assert 1 < needed <= factor <= needed + 1 / 8
    assert factor * 8 == int(factor * 8)


def test_a_raised_bound_stays_for_a_hundred_steps() -> None:
    limit = RowLimit(1.5, torch.device("cpu"))
    limit.begin_step(7)
    assert limit.num_rows(64, 2) == 48
    limit.make_room(1.6)
    assert limit.factor == 1.625
    for step, factor in ((8, 1.625), (106, 1.625), (107, 1.5)):
        limit.begin_step(step)
        assert limit.factor == factor


@pytest.mark.parametrize(
    ("layout", "numbers", "width"), [("ep4-dp4", 4, 4), ("tp2-ep2-dp2", 8, 2), ("tp2-ep4-dp2-etp1", 4, 4)]
)
def test_a_rank_has_its_experts(layout: str, numbers: int, width: int) -> None:
    config, sizes = mixture("shared", layout), ParallelLayout.parse(layout)
    table = make_engine(0, mixture("shared")).table
    runs = {run.names[0]: run for run in local_runs(config, table, sizes, sizes.coords(0))}
    assert runs["layers.1.mlp.experts.down.weight"].shape == (numbers, 32, width)
    assert runs["layers.1.mlp.router.weight"].shape == (16, 32)


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        ({"ep": 3}, "parallel.ep 3 does not divide dp 4 * cp 1, of which it borrows: --ep 1"),
        ({"ep": 4}, "parallel.ep 4 does not divide model.num_experts 6: --ep 2"),
        ({"ep": 2, "etp": "1", "sequence_parallel": "off"}, "parallel.etp 1 needs tokens that are cut over"),
    ],
)
def test_experts_that_cannot_be_cut_are_faults(parallel: dict[str, Any], text: str) -> None:
    config = mixture("shared", "tp2-dp4")
    config = replace(config, parallel=replace(config.parallel, **parallel))
    config = replace(config, model=replace(config.model, num_experts=6))
    assert any(text in fault for _, fault in cross_faults(config, 8))
