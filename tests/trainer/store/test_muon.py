"""Muon: the bits of torch's own in one process, whole matrices under every layout, and who takes which."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckptkit import Box
from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import alone, assert_parity, config_for, local_batch, make_engine, run_steps, small
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.store.matrices import Matrix, MatrixPart, MatrixSpan, in_rounds, shared_out, spans_of
from trainer.store.muon import matrix_updates
from trainer.verify.faults.fault import EXPERTS, Fault, config_of
from trainer.verify.threads import run_threads

SCALES = {"original": "original", "match_rms": "match_rms_adamw"}  # here, and in torch


def views(engine: Engine, kind: str) -> dict[str, Tensor]:
    """One buffer of all parameters by name, of a run of one process."""
    return {
        name: getattr(bucket, kind)[offset : offset + torch.Size(shape).numel()].view(shape)
        for bucket in engine.store.buckets
        for name, shape, offset in bucket.plan.parameters()
    }


def travel_in_rounds(engine: Engine) -> None:
    """Let few matrices travel together."""
    matrices = [bucket for bucket in engine.store.buckets if bucket.optimizer.update is None]
    engine.store._matrices = matrix_updates(matrices, engine.table, engine.mesh, round_elements=300)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_an_update_of_one_process_has_the_bits_of_torch(model: str, scale: str) -> None:
    config = config_of(Fault("none", "", None, lambda patch: None, model=EXPERTS if model == "experts" else {}))
    options: dict[str, Any] = {"name": "muon", "muon_lr": 0.02, "muon_scale": scale, "clip": 0.0, "min_lr": 5e-3}
    config = replace(config, optim=replace(config.optim, **options), train=replace(config.train, precision="fp32"))
    engine = make_engine(0, config)
    if scale == "original":
        travel_in_rounds(engine)
    matrices = {name: row for name, row in engine.table.items() if row.optimizer == "muon"}
    assert {name.split(".")[-2] for name in matrices} >= {"q", "k", "v", "out", "gate", "up", "down"}
    assert not any("router" in name or "norm" in name or name.startswith(("embed", "head", "pos")) for name in matrices)
    copies: dict[str, list[Tensor]] = {}
    for name, value in views(engine, "master").items():
        if name in matrices:
            copies[name] = [each.clone() for each in value.view(-1, *value.shape[-2:])]
    parameters = [torch.nn.Parameter(each) for each in [each for stack in copies.values() for each in stack]]
    plain = torch.optim.Muon(parameters, lr=0.02, weight_decay=config.optim.weight_decay, adjust_lr_fn=SCALES[scale])

    def before_update() -> None:
        gradients = views(engine, "gradients")
        stacked = [each for name in copies for each in gradients[name].view(-1, *gradients[name].shape[-2:])]
        for parameter, gradient in zip(parameters, stacked, strict=True):
            parameter.grad = gradient.clone()
        plain.step()

    for number in range(3):
        engine.start_step(number, local_batch(config, number, engine.mesh), before_update=before_update).read()
    for name, stack in copies.items():
        own = views(engine, "master")[name]
        for number, expected in enumerate(stack):
            assert torch.equal(own.view(-1, *own.shape[-2:])[number], expected), (name, number)


LAYOUTS = [
    (ParallelLayout(tp=4, dp=2), 2, 0),  # two ranks of tp hold a key-value head
    (ParallelLayout(dp=4), 3, 2),
    (ParallelLayout(cp=2, dp=2), 3, 0),
    (ParallelLayout(tp=2, dp=2, ep=2), 1, 0),
    (ParallelLayout(tp=2, ep=4, dp=2, etp=1), 1, 0),
]


@pytest.mark.parametrize(("layout", "zero_stage", "dp_shard"), LAYOUTS, ids=str)
def test_matrices_are_whole_under_every_layout(layout: ParallelLayout, zero_stage: int, dp_shard: int) -> None:
    model = EXPERTS if layout.ep > 1 else {}
    options: dict[str, Any] = {"model": model, "cuts_tokens": bool(layout.etp), "dp_shard": dp_shard, "num_parts": 1}
    fault = Fault("none", "", layout, lambda patch: None, zero_stage, **options, optim={"name": "muon"})
    config = config_of(fault)
    assert_parity(run_threads(layout.world_size, run_steps, config, 2), run_steps(0, alone(config), 2))


def test_a_rank_without_a_matrix_joins_in() -> None:
    config = small(config_for("llama", ParallelLayout(dp=8)))
    tiny = {"hidden_size": 2, "num_heads": 1, "num_kv_heads": 1, "ffn_hidden_size": 2, "head_size": 2, "num_layers": 1}
    config = replace(config, optim=replace(config.optim, name="muon"), model=replace(config.model, **tiny))
    runs = run_threads(layout_of(config).world_size, run_steps, config, 2)
    assert_parity(runs, run_steps(0, alone(config), 2))


def trained_in_rounds(rank: int, config: Config, in_rounds: bool, *, network: Network | None = None) -> list[Tensor]:
    engine = make_engine(rank, config, network=network)
    if in_rounds:
        travel_in_rounds(engine)
    for step in range(3):
        engine.train_step(step, local_batch(config, step, engine.mesh))
    return [bucket.master.clone() for bucket in engine.store.buckets]


@pytest.mark.parametrize(("layout", "zero_stage"), [("dp4", 1), ("tp2-dp2", 0)])
def test_rounds_have_the_bits_of_one(layout: str, zero_stage: int) -> None:
    config: Config = small(config_for("llama", ParallelLayout.parse(layout), zero_stage=zero_stage))
    config = replace(config, optim=replace(config.optim, name="muon"))
    size = layout_of(config).world_size
    together, in_rounds = (run_threads(size, trained_in_rounds, config, each) for each in (False, True))
    for masters, others in zip(together, in_rounds, strict=True):
        assert all(map(torch.equal, masters, others))


class Written(TorchDispatchMode):
    """Elements of 16 bits that copies write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "copy" in str(func) or "cat" in str(func) or "clone" in str(func):
            self.num_elements += out.numel() * (out.dtype == torch.bfloat16 and "_to_copy" not in str(func))
        return out


def test_what_travels_is_written_three_times() -> None:
    """As directions, as matrices, and as what is returned."""
    config: Config = small(config_for("llama", ParallelLayout(), precision="fp32"))
    engine = make_engine(0, replace(config, optim=replace(config.optim, name="muon")))
    decisions = {"factor": torch.ones((), dtype=torch.float64), "is_bad": torch.zeros(())}
    with Written() as written:
        engine.store.update(engine.config.optim, 0.1, 0, **decisions)
    matrices = [row for row in engine.table.values() if row.optimizer == "muon"]
    assert written.num_elements == 3 * sum(torch.Size(row.shape).numel() for row in matrices)


@pytest.mark.parametrize("master", ["wide", "split"])
def test_a_bad_step_keeps_moments_and_weights(master: str) -> None:
    config: Config = small(config_for("llama", ParallelLayout(), precision="bf16"))
    engine = make_engine(0, replace(config, optim=replace(config.optim, name="muon", master=master)))
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    buckets = engine.store.buckets

    def state() -> list[Tensor]:
        kept = [[bucket.parameters, *bucket.states.values(), bucket.low] for bucket in buckets]
        return [tensor.clone() for tensors in kept for tensor in tensors if tensor is not None]

    before, nan = state(), torch.full((), torch.nan, dtype=torch.float64)
    for bucket in buckets:
        bucket.gradients.fill_(torch.nan)
    engine.store.update(engine.config.optim, 0.1, 1, factor=nan, is_bad=torch.ones(()))
    assert all(torch.equal(own, other) for own, other in zip(state(), before, strict=True))
    for bucket in buckets:
        bucket.gradients.fill_(1.0)
    engine.store.update(engine.config.optim, 0.1, 1, factor=torch.ones(()).double(), is_bad=torch.zeros(()))
    changed = [not torch.equal(own, other) for own, other in zip(state(), before, strict=True)]
    assert all(changed)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.data())
def test_spans_cover_each_element_of_a_box_once(experts: int, rows: int, columns: int, data: st.DataObject) -> None:
    box, shape = Box((2, rows, 0), (experts, rows, columns)), (9, 2 * rows, columns)
    size = experts * rows * columns
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    bounds = list(zip([0, *cuts], [*cuts, size], strict=True))
    spans = [span for start, stop in bounds if start < stop for span in spans_of("w", shape, box, start, stop)]
    places = [
        ((span.part.matrix.expert - 2) * rows * columns + place, span.first + place - span.start)
        for span in spans
        for place in range(span.start, span.stop)
    ]
    assert places == [(place, place) for place in range(size)]
    assert all(span.part.corner == (rows, 0) for span in spans)


@given(st.integers(0, 2), st.integers(1, 4), st.integers(1, 5), st.data())
def test_rectangles_of_a_span_are_its_elements(left: int, rows: int, columns: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, rows * columns - 1))
    stop = data.draw(st.integers(start + 1, rows * columns))
    matrix = Matrix("w", 0, (rows + 1, left + columns + 1))
    span = MatrixSpan(MatrixPart(matrix, (1, left), (rows, columns)), start, stop, 0)
    places, number = torch.full(matrix.shape, -1), 0
    for first, some_rows, some_columns in span.rectangles:
        places[some_rows, some_columns] = torch.arange(first, first + places[some_rows, some_columns].numel()).view(
            places[some_rows, some_columns].shape
        )
        number += 1
    expected = torch.full((rows * columns,), -1)
    expected[start:stop] = torch.arange(stop - start)
    assert torch.equal(places[1:, left : left + columns], expected.view(rows, columns))
    assert int((places >= 0).sum()) == stop - start
    assert number <= 3


def test_the_dearest_matrices_are_shared_out_first() -> None:
    matrices = [Matrix(name, 0, (size, 2)) for name, size in (("a", 3), ("b", 5), ("c", 4), ("d", 2))]
    loads = [0, 0]
    takers = shared_out(matrices, loads)
    assert {matrix.name: rank for matrix, rank in takers.items()} == {"b": 0, "c": 1, "a": 1, "d": 0}
    assert loads == [48 + 24, 40 + 32]
    assert set(shared_out(matrices, [1000, 0]).values()) == {1}, "who had more to do before takes none"
    assert in_rounds({"a": 5, "b": 2, "c": 3, "d": 9}, 5) == [["a"], ["b", "c"], ["d"]]
