"""Which layers are on which stage."""

from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.model.layout import ParallelLayout
from datakit import MixtureConfig
from tests.trainer.support.parity import config_for
from trainer.config import Config
from trainer.model.flops import layers_and_head_flops
from trainer.model.stages import is_on_rank, sizes_by_cost, stage_flops, stage_ranges, with_layers
from trainer.model.table import parameter_table


@given(num_stages=st.integers(2, 5), extra=st.integers(0, 6), head=st.floats(0, 12))
def test_no_cut_has_a_faster_slowest_stage(num_stages: int, extra: int, head: float) -> None:
    def slowest(sizes: list[int]) -> float:
        return max(*sizes[:-1], sizes[-1] + head)

    num_layers, costs = num_stages + extra, [1.0] * (num_stages + extra)
    found = sizes_by_cost(costs, head, num_stages)
    assert (sum(found), len(found), min(found) >= 1) == (num_layers, num_stages, True)
    cuts = ((0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1))
    best = min(slowest([stop - start for start, stop in pairwise(cut)]) for cut in cuts)
    assert slowest(found) == pytest.approx(best, rel=1e-12)  # a head of nearly nothing is lost in a sum


def test_cuts_by_hand() -> None:
    assert sizes_by_cost([1.0] * 16, 3.0, 2) == [9, 7]
    assert sizes_by_cost([1.0] * 4, 50.0, 4) == [1, 1, 1, 1]
    assert sizes_by_cost([1.0] * 9, 0.0, 2) == [4, 5]


@given(costs=st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=4, max_size=9), num_stages=st.integers(2, 4))
def test_layers_may_differ(costs: list[float], num_stages: int) -> None:
    def slowest(sizes: list[int]) -> float:
        times = [sum(costs[start:stop]) for start, stop in pairwise([0, *accumulate(sizes)])]
        return max(*times[:-1], times[-1] + 2.0)

    sizes = sizes_by_cost(costs, 2.0, num_stages)
    assert (sum(sizes), len(sizes), min(sizes) >= 1) == (len(costs), num_stages, True)
    cuts = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1))
    assert slowest(sizes) == min(slowest([stop - start for start, stop in pairwise(cut)]) for cut in cuts)


def test_layers_with_windows_share_a_stage_with_more_others() -> None:
    config = config_of("cost", num_layers=12)
    rows = replace(config.train, seq_length=4096, micro_batch_size=1)
    model = replace(config.model, hidden_size=8, num_heads=2, ffn_hidden_size=8, vocab_size=8)
    full = replace(config, model=model, train=rows)
    windows = replace(full, model=replace(model, window=64, window_every=6))  # layers 6 and 12 see all

    def sizes(config: Config) -> list[int]:
        return [len(layers) for layers in stage_ranges(config, parameter_table(config), 3)]

    assert sizes(full) == [4, 4, 4]
    assert sizes(windows) == [5, 4, 3]
    layers, head = layers_and_head_flops(windows, parameter_table(windows))
    assert stage_flops(windows, parameter_table(windows), 3) == pytest.approx(
        [sum(layers[:5]), sum(layers[5:9]), sum(layers[9:]) + head]
    )


def config_of(how: str, num_layers: int = 9) -> Config:
    config = config_for("gpt2", ParallelLayout(pp=2))
    parallel = replace(config.parallel, pipeline_layout=how)
    return replace(config, model=replace(config.model, num_layers=num_layers), parallel=parallel)


def test_the_cost_of_attention_is_that_of_the_longest_rows() -> None:
    config = config_of("cost")
    table, longest = parameter_table(config), 4096 * config.train.seq_length
    changes = MixtureConfig(from_step=5, seq_length=longest), MixtureConfig(from_step=9, seq_length=longest // 2)
    planned = replace(config, data=replace(config.data, mixture=changes))
    whole = replace(config, train=replace(config.train, seq_length=longest))
    assert layers_and_head_flops(planned, table) == layers_and_head_flops(whole, table)
    assert stage_ranges(planned, table, 2) == stage_ranges(whole, table, 2) != stage_ranges(config, table, 2)


@pytest.mark.parametrize(("how", "sizes"), [("even", [5, 4]), ("7,2", [7, 2]), ("cost", [8, 1])])
def test_the_configuration_says_how(how: str, sizes: list[int]) -> None:
    config = config_of(how)
    table = parameter_table(config)
    ranges = stage_ranges(config, table, 2)
    assert [len(layers) for layers in ranges] == sizes
    assert [*ranges[0], *ranges[1]] == [*range(9)]
    recorded = with_layers(config, table).parallel.pipeline_layout
    assert recorded == {"cost": "8,1"}.get(how, how)
    [layer, *_], head = layers_and_head_flops(config, table)
    assert head > 9 * layer, "of a vocabulary of 50257"
    assert stage_flops(config, table, 2) == [sizes[0] * layer, sizes[1] * layer + head]
    layout = ParallelLayout(pp=2)
    for name, row in table.items():
        is_first = name.startswith(("embed", "pos")) or any(name.startswith(f"layers.{n}.") for n in ranges[0])
        held = [is_on_rank(row.placement, ranges, layout, pp) for pp in range(2)]
        assert held == [is_first, not is_first], name
