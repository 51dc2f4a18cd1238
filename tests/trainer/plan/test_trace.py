"""What a step transfers by its shapes is what the ranks of a real step call, call by call."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings

from ckptkit import Coords, ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.layouts import configs, layouts
from tests.trainer.support.option_walk import run_of
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network
from trainer.plan.trace import moved_bytes, traced
from trainer.verify.recording import Call, recording_of
from trainer.verify.threads import run_threads

examples = settings(derandomize=True, database=None, phases=[Phase.generate, Phase.shrink], deadline=None)


def called(rank: int, config: Config, *, network: Network) -> Counter[Call]:
    """What a rank calls in the first step."""
    engine = make_engine(rank, config, network=network)
    calls = recording_of(engine.mesh).calls
    calls.clear()
    engine.start_step(0, local_batch(config, 0, engine.mesh))
    return Counter(calls)


def check(config: Config) -> None:
    """All ranks of a stage call what the trace of its first one has; how many rows go to each expert is a router's."""
    layout, sums = layout_of(config), Counter[bool]()
    traces = [traced(config, layout.rank(Coords(pp=pp))).moves for pp in range(layout.pp)]
    for rank, real in enumerate(run_threads(layout.world_size, called, config)):
        own = Counter(Call(*move[:3]) for move in traces[layout.coords(rank).pp].elements())
        for is_real, calls in ((True, real), (False, own)):
            sums[is_real] += sum(call.num_bytes * count for call, count in calls.items() if is_routed(call, config))
        exact = [Counter({c: n for c, n in calls.items() if not is_routed(c, config)}) for calls in (own, real)]
        require_equal(exact[0] == exact[1], f"{layout} rank {rank}: {exact[0] - exact[1]}, not {exact[1] - exact[0]}")
        require_equal(kinds_of(own) == kinds_of(real), f"{layout} rank {rank} calls {kinds_of(real)}")
    require_equal(sums[True] == sums[False], f"{layout}: {sums[True]} bytes to experts, not {sums[False]}")


def is_routed(call: Call, config: Config) -> bool:
    """Whether the bytes of a call depend on a router."""
    return call.kind == "all_to_all" and call.group == "ep" and config.parallel.moe_dispatch == "alltoall"


def kinds_of(calls: Counter[Call]) -> Counter[tuple[str, str]]:
    """How often each kind was called on each group."""
    kinds: Counter[tuple[str, str]] = Counter()
    for call, count in calls.items():
        kinds[call.kind, call.group] += count
    return kinds


@settings(examples, max_examples=1)
@given(config=configs(layouts(8)))
def test_bytes_are_those_of_a_real_step(config: Config) -> None:
    check(config)


def test_a_step_that_drops_weights_of_attention_is_traced() -> None:
    config = small(config_for("llama", ParallelLayout(cp=2)))
    check(replace(config, model=replace(config.model, attention_dropout=0.1)))


@pytest.mark.slow
@settings(examples, max_examples=30)
@given(config=configs(layouts(16)))
def test_bytes_of_thirty_random_layouts(config: Config) -> None:
    check(config)


@pytest.mark.ci
@pytest.mark.slow
def test_micro_batches_that_are_not_run_are_counted() -> None:
    run = run_of("examples/tiny.toml", train__micro_batch_size="1", parallel__pp="2", parallel__schedule="zb-h1")
    regathering = replace(run, parallel=replace(run.parallel, zero_stage=3, reshard_after_forward="on"))
    for config in (run, regathering):
        few = traced(with_microbatches(config, 4), 0).moves
        many = traced(with_microbatches(config, 16), 0).moves
        more = traced(with_microbatches(config, 28), 0).moves
        assert moved_bytes(more) - moved_bytes(many) == moved_bytes(many) - moved_bytes(few) > 0


def with_microbatches(config: Config, number: int) -> Config:
    """The same run with another number of micro-batches."""
    size = number * config.train.micro_batch_size * config.parallel.dp
    train = replace(config.train, global_batch_size=size, gradient_accumulation_steps=number)
    return replace(config, train=train)
