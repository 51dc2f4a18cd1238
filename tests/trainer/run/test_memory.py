"""The memory of a rank by arithmetic, and what engines really allocate."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, make_engine, state_bytes
from trainer.checkpoint.mapping import saved_pieces
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.config.walk import config_from
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh, mesh_of
from trainer.model.microbatch import MicroBatch
from trainer.run.memory import GROUP_BYTES, PAIR_BYTES, PEER_BYTES, RankMemory, arena_bytes, rank_memory, size_text
from trainer.run.stage_times import Nobody, random_batch
from trainer.verify.threads import run_threads

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "trainer"


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"activation": "gelu", "norm": "layernorm", "bias": True},
        {"num_kv_heads": 1, "qk_norm": True},
        {"position": "learned", "tie_embeddings": True},
    ],
)
@pytest.mark.parametrize("optim", [{}, {"moments": "bf16"}, {"master": "split"}], ids=str)
def test_the_estimate_is_what_an_engine_allocates(model: dict, optim: dict) -> None:
    shape = {"vocab_size": 997, "num_layers": 4, "hidden_size": 128, "num_heads": 4} | model
    train = {"micro_batch_size": 2, "seq_length": 64, "global_batch_size": 4, "device": "cpu"}
    train["precision"] = "bf16" if "master" in optim else "fp32"
    config = config_from({"model": shape, "train": train, "optim": optim}, source="")
    engine = Engine(config, ProcessMesh(layout_of(config), 0, torch.device("cpu"), timeout_s=60))
    memory = rank_memory(config, 0)
    assert memory.parameters == pytest.approx(
        sum(bucket.parameters.nbytes for bucket in engine.store.buckets), rel=0.01
    )
    assert memory.gradients == pytest.approx(sum(bucket.gradients.nbytes for bucket in engine.store.buckets), rel=0.01)
    assert memory.optimizer == pytest.approx(state_bytes(engine.store), rel=0.01)
    own = {bucket.parameters.untyped_storage().data_ptr() for bucket in engine.store.buckets}
    kept_tensors: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in own:
            kept_tensors[address] = tensor
        return tensor

    tokens = torch.zeros(2 * 64, dtype=torch.long)
    batch = MicroBatch(tokens, tokens, torch.arange(64).repeat(2), torch.ones(2 * 64), 64, (range(2 * 64),), None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = engine.chunks[0].forward(None, batch)
    assert loss.shape == tokens.shape
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept_tensors.values())
    assert memory.activations == pytest.approx(measured, rel=0.15)


def bytes_of_a_rank(rank: int, config: Config, *, network: Network) -> tuple[int, int, int, int]:
    """Parameters, gradients, optimizer and leases of an engine."""
    store = make_engine(rank, config, network=network).store
    parameters, gradients = (
        sum(getattr(bucket, name).nbytes for bucket in store.buckets) for name in ("parameters", "gradients")
    )
    return parameters, gradients, state_bytes(store), store.parameter_leases.nbytes + store.gradient_leases.nbytes


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("layout", "options"),
    [("dp4", {}), ("dp4", {"dp_shard": 2}), ("tp2-dp2", {"reshard_after_forward": "off"}), ("dp2-pp2", {})],
)
def test_zero_stages_keep_and_lease_what_is_printed(zero_stage: int, layout: str, options: dict) -> None:
    made = config_for("gpt2" if "tp" in layout else "llama", ParallelLayout.parse(layout), precision="bf16")
    options = {"zero_stage": zero_stage, "zero_whole_kib": 8, **(options if zero_stage > 1 else {})}
    made = replace(made, parallel=replace(made.parallel, **options))
    for rank, found in enumerate(run_threads(4, bytes_of_a_rank, made)):
        memory = rank_memory(made, layout_of(made).coords(rank).pp)
        assert (memory.parameters, memory.gradients, memory.leases) == (found[0], found[1], found[3])
        assert memory.optimizer == pytest.approx(found[2], rel=0.01)
        assert ("leases" in str(memory)) == (zero_stage > 1)


def test_stages_differ_and_zero_cuts_the_optimizer() -> None:
    model = {"vocab_size": 100, "num_layers": 4, "hidden_size": 32}
    layout = {"pp": 2, "dp": 4}
    cut = config_from({"model": model, "parallel": layout}, source="", world_size=None)
    whole = config_from({"model": model, "parallel": layout | {"zero_stage": 0}}, source="", world_size=None)
    tied = config_from({"model": model | {"tie_embeddings": True}, "parallel": layout}, source="", world_size=None)
    for pp in (0, 1):
        assert rank_memory(whole, pp).optimizer == pytest.approx(4 * rank_memory(cut, pp).optimizer, rel=0.01)
    first, last = rank_memory(tied, 0), rank_memory(tied, 1)
    # both hold the tied matrix and own half of it; the last stage has a norm besides, in a bucket of 4 times 64 bytes
    assert last.parameters == first.parameters + 4 * 64
    assert last.optimizer == first.optimizer + 2 * 32 * 4 // 4
    assert size_text(last.parameters).endswith(" KiB")


@pytest.mark.parametrize(
    "model", [{}, {"activation": "gelu", "norm": "layernorm", "bias": True}, {"num_kv_heads": 1, "qk_norm": True}]
)
def test_the_estimate_is_what_a_backward_pass_leaves_to_w(model: dict) -> None:
    shape = {"vocab_size": 997, "num_layers": 4, "hidden_size": 128, "num_heads": 4} | model
    train = {"micro_batch_size": 2, "seq_length": 64, "global_batch_size": 2, "device": "cpu"}
    tables = {"model": shape, "train": train, "parallel": {"pp": 2, "schedule": "zb-h1"}}
    config = config_from(tables, source="", world_size=2)
    engine = Engine(config, mesh_of(config, 0, torch.device("cpu"), network=Nobody(2)))
    engine.store.begin_step(0)
    out = engine.chunks[0].forward(None, random_batch(engine))
    with engine.store.wgrads.putting_off() as products:
        out.backward(torch.ones_like(out))
    kept_bytes: dict[int, int] = {}
    functions = list[Any](products)
    while functions:
        for cell in functions.pop().__closure__ or ():
            held = cell.cell_contents
            if isinstance(held, torch.Tensor) and held.dim() > 1:  # gradients of norms are small
                kept_bytes[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
            elif callable(held):
                functions.append(held)
    assert sum(kept_bytes.values()) == rank_memory(config, 0).activations


ON_GPUS = [  # rows of benchmarks/trainer/gpu.py, and the GiB that torch allocated at most, in the results beside it
    ("1b", 50.7, {"micro_batch_size": 8, "global_batch_size": 8}, {}),
    ("1b", 27.3, {"micro_batch_size": 2, "global_batch_size": 32}, {}),
    ("350m", 25.1, {"micro_batch_size": 32, "global_batch_size": 64}, {}),
    ("3.8b", 100.7, {"micro_batch_size": 16, "global_batch_size": 32}, {}),
    ("1b", 44.4, {"micro_batch_size": 8, "global_batch_size": 16}, {"dp": 2}),
    ("1b", 41.4, {"micro_batch_size": 16, "global_batch_size": 16}, {"tp": 2}),
    ("1b", 13.7, {"micro_batch_size": 2, "global_batch_size": 32}, {"tp": 2}),
    ("1b", 13.5, {"micro_batch_size": 1, "global_batch_size": 16}, {"pp": 2}),
]


@pytest.mark.parametrize(("model", "measured", "train", "parallel"), ON_GPUS)
def test_the_plan_is_what_gpus_allocated(model: str, measured: float, train: dict, parallel: dict) -> None:
    tables = tomllib.loads((BENCHMARKS / f"{model}.toml").read_text())
    tables = tables | {"train": tables["train"] | train, "parallel": parallel}
    config = config_from(tables, source="", world_size=None)
    planned = max(rank_memory(config, pp).of_torch for pp in range(config.parallel.pp))
    assert planned / 2**30 == pytest.approx(measured, rel=0.02)


def test_muon_keeps_a_third_less_of_matrices() -> None:
    """8 bytes for 12 of what layers have, 0.88 of this model: 0.706 of all."""
    tables = tomllib.loads((BENCHMARKS / "1b.toml").read_text()) | {"parallel": {"dp": 2}}
    config = config_from(tables, source="", world_size=2)
    muon = replace(config, optim=replace(config.optim, name="muon"))
    assert rank_memory(muon, 0).optimizer <= 0.7060 * rank_memory(config, 0).optimizer


def test_groups_take_buffers_of_their_own() -> None:
    model = {"vocab_size": 100, "num_layers": 4, "hidden_size": 32}

    def memory(**parallel: Any) -> RankMemory:
        return rank_memory(config_from({"model": model, "parallel": parallel}, source="", world_size=None), 0)

    alone, pair, four = memory(), memory(dp=2), memory(dp=4)
    assert (alone.groups, pair.groups, four.groups) == (0, 2 * PAIR_BYTES, 2 * GROUP_BYTES)  # all ranks, and dp
    assert memory(tp=2, dp=2).groups == 2 * PAIR_BYTES + 2 * GROUP_BYTES  # tp, dp; norms are held by all
    assert memory(pp=2).groups == 3 * PAIR_BYTES  # all ranks, and a link each way
    assert memory(dp=4, grad_reduce="bf16").groups == 2 * GROUP_BYTES + 3 * PEER_BYTES
    assert alone.total == alone.of_torch + alone.context
    assert "CUDA context" in str(alone)
    on_cpu = config_from({"model": model, "train": {"device": "cpu"}}, source="")
    assert rank_memory(on_cpu, 0).total == rank_memory(on_cpu, 0).of_torch


@pytest.mark.parametrize("optim", [{}, {"moments": "bf16"}], ids=str)
def test_the_arena_holds_what_a_rank_saves(optim: dict) -> None:
    shape = {"vocab_size": 997, "num_layers": 4, "hidden_size": 128, "num_heads": 4}
    tables: dict[str, Any] = {"model": shape, "optim": optim, "train": {"device": "cpu"}}
    config = config_from(tables, source="")
    engine = Engine(config, ProcessMesh(layout_of(config), 0, torch.device("cpu"), timeout_s=60))
    saved = sum(piece.data.nbytes for piece in saved_pieces(engine.store))
    assert arena_bytes(config, 0) == pytest.approx(saved, rel=0.01)  # the vocabulary is padded
    bounded = config_from(tables | {"checkpoint": {"window_mib": 1}}, source="")
    assert arena_bytes(bounded, 0) == 1 << 20
