"""The passes of a step as one graph: the bits of passes that are enqueued one by one, whatever comes between steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.fp8 import RECIPES, eight_bits
from tests.trainer.support.parity import config_for, in_groups, local_batch, make_engine, small
from tests.trainer.support.ranks import run_ranks
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.pipeline import graph
from trainer.pipeline.graph import Capture, PassGraph, Results, record_on_gpu
from trainer.store.residence import Residence
from trainer.store.store import ParameterStore
from trainer.verify.replay import run_again
from trainer.verify.threads import run_threads

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
NUM_STEPS = 6
NAMES = ("tokens", "labels", "positions", "loss_mask")  # of a batch's tensors


def plain(name: str = "llama", *, device: str = "cpu", precision: str = "fp64", **train: Any) -> Config:
    config = small(config_for(name, ParallelLayout(), device=device, precision=precision))
    model = replace(config.model, dropout=0.0)
    return replace(config, model=model, train=replace(config.train, **train))


def trained(engine: Engine, config: Config, *, stop: int = NUM_STEPS) -> dict[str, Any]:
    """Train, with an evaluation in between; what came of it."""
    losses, evaluations = [], []
    for step in range(stop):
        stats = engine.train_step(step, local_batch(config, step, engine.mesh))
        losses.append((stats.loss, stats.grad_norm, stats.outcome))
        if step % 2:
            evaluations.append(engine.eval_batch(in_groups(local_batch(config, 99, engine.mesh))))
    return {"losses": losses, "evaluations": evaluations, "state": state_of(engine.store)}


def state_of(store: ParameterStore) -> list[torch.Tensor]:
    store.join()
    return [tensor.clone() for bucket in store.buckets for tensor in (bucket.parameters, *bucket.states.values())]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["evaluations"] == other["evaluations"]
    assert all(map(torch.equal, one["state"], other["state"]))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_graph_reads_the_batch_and_the_scale_of_its_step(name: str) -> None:
    config = plain(name)
    engine = make_engine(0, config)
    recorded = []

    def record(run: Callable[[], Results]) -> Capture:
        recorded.append(run)
        return run_again(run)

    engine.graph = PassGraph(engine._passes, engine.store.expire, record)
    assert_same(trained(engine, config), trained(make_engine(0, config), config))
    assert len(recorded) == 1


def test_other_rows_are_recorded_again() -> None:
    config, engines = plain(), [make_engine(0, plain()) for _ in range(2)]
    recorded = []

    def record(run: Callable[[], Results]) -> Capture:
        recorded.append(run)
        return run_again(run)

    engines[0].graph = PassGraph(engines[0]._passes, engines[0].store.expire, record)
    batches = [local_batch(config, step, engines[0].mesh) for step in range(NUM_STEPS)]
    fewer = [replace(each, **{name: getattr(each, name)[:2] for name in NAMES}) for each in batches]
    taken = [*batches[:4], *fewer[4:]]
    losses = [[engine.train_step(step, batch).loss for step, batch in enumerate(taken)] for engine in engines]
    assert losses[0] == losses[1]
    assert len(recorded) == 2


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model": {"dropout": 0.1}}, "model.dropout drops by the number of a step"),
        ({"model": {"attention_dropout": 0.1}}, "model.attention_dropout drops by the number of a step"),
        ({"parallel": {"grad_reduce": "int8"}}, "parallel.grad_reduce rounds by the number of a step"),
        ({"data": {"document_mask": True}}, "data.document_mask has other bounds in each step"),
        ({"data": {"packing": "pad"}}, "data.packing puts documents in rows"),
        (
            {"train": {"cuda_graphs": True, "device": "auto", "global_batch_size": 4, "rampup_batch_size": (2, 2, 9)}},
            "train.rampup_batch_size changes the number of micro-batches",
        ),
        ({"profile": {"nvtx": True}}, "profile.nvtx marks passes and layers"),
    ],
)
def test_what_a_step_decides_by_itself_is_refused(changed: dict[str, dict[str, Any]], text: str) -> None:
    config = plain(cuda_graphs=True, device="auto")
    tables = {name: replace(getattr(config, name), **values) for name, values in changed.items()}
    faults = cross_faults(replace(config, **tables), 1)
    assert any(text in reason and "train.cuda_graphs" in names for names, reason in faults)


def test_a_cpu_is_refused() -> None:
    config = plain(cuda_graphs=True, device="auto")
    assert not cross_faults(config, 1)
    assert cross_faults(replace(config, train=replace(config.train, device="cpu")), 1)


@pytest.mark.usefixtures("leases_with_content")
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_recording_finds_nothing_under_way_and_gathers_all(zero_stage: int) -> None:
    def passes_and_graph(rank: int, *, network: Network) -> list[dict[str, Any]]:
        runs = [trained(make_engine(rank, config, network=network), config)]
        engine = make_engine(rank, config, network=network)
        leases = engine.store.parameter_leases._all + engine.store.gradient_leases._all
        assert leases

        def record(run: Callable[[], Results]) -> Capture:
            assert not any(lease.pending for lease in leases)
            assert not any(isinstance(lease.tenant, Residence) for lease in engine.store.parameter_leases._all)
            run()
            assert not any(lease.pending for lease in leases)
            return run_again(run)

        engine.graph = PassGraph(engine._passes, engine.store.expire, record)
        return [*runs, trained(engine, config)]

    config = small(config_for("llama", ParallelLayout.parse("dp2"), zero_stage=zero_stage))
    config = replace(config, parallel=replace(config.parallel, zero_whole_kib=0))
    for passes, one_graph in run_threads(2, passes_and_graph):
        assert_same(passes, one_graph)


CONFIGS = {
    "llama": lambda device: plain(device=device, precision="bf16"),
    "gpt2": lambda device: plain("gpt2", device=device, precision="bf16"),
    "fp32": lambda device: plain(device=device, precision="fp32"),
    "fp16": lambda device: plain(device=device, precision="fp16"),
    "recompute": lambda device: plain(device=device, precision="bf16", recompute="full"),
    **{
        recipe: lambda device, recipe=recipe: eight_bits(recipe, precision="bf16", train={"device": device})
        for recipe in RECIPES
    },
}


@ON_GPU
@pytest.mark.cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_a_graph_of_a_gpu_has_the_bits_of_its_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]("cuda")
    recorded = []

    def record(run: Callable[[], Results]) -> Capture:
        recorded.append(run)
        return record_on_gpu(run)

    monkeypatch.setattr(graph, "record_on_gpu", record)
    expected = trained(make_engine(0, config), config)
    engine = make_engine(0, replace(config, train=replace(config.train, cuda_graphs=True)))
    assert_same(trained(engine, config), expected)
    assert len(recorded) == 1


def graph_and_passes(rank: int, config: Config) -> list[dict[str, Any]]:
    runs = []
    for cuda_graphs in (False, True):
        engine = make_engine(rank, replace(config, train=replace(config.train, cuda_graphs=cuda_graphs)))
        assert (engine.graph is not None) == cuda_graphs
        runs.append(trained(engine, config))
        engine.close()
    return [{**run, "state": [float(tensor.double().sum()) for tensor in run["state"]]} for run in runs]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.cuda
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("tp2", {}),
        ("tp2", {"sequence_parallel": "off"}),
        ("pp2", {"schedule": "zb-h1"}),
        ("pp2-virtual2", {}),
        ("dp2", {}),
        ("dp2", {"zero_stage": 2, "zero_whole_kib": 0}),
        ("dp2", {"zero_stage": 3, "zero_whole_kib": 0}),
        ("cp2", {}),
        ("cp2", {"cp_method": "allgather"}),
    ],
)
def test_a_graph_of_two_gpus_has_the_bits_of_its_passes(layout: str, parallel: dict[str, Any]) -> None:
    config = config_for("llama", ParallelLayout.parse(layout), device="cuda", precision="bf16")
    config = replace(config, parallel=replace(config.parallel, **parallel))
    for passes, one_graph in run_ranks(2, graph_and_passes, config, backend="nccl"):
        assert passes == one_graph
