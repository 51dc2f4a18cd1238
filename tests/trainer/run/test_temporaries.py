"""What a pass takes at its peak by arithmetic, and what the tensors of a forward and a backward pass really take."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit import Coords
from tests.trainer.run.test_activations import MODELS, Born, graph_bytes
from tests.trainer.support.parity import make_engine
from trainer.config import Config, Fp8Config
from trainer.config.resolve import layout_of
from trainer.config.walk import config_from
from trainer.engine import Engine
from trainer.linear import fp8, weight
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh
from trainer.model.table import local_runs
from trainer.ops.fp8 import Quantised, Scaling
from trainer.run.activations import CHOICES, Sizes, activation_bytes
from trainer.run.memory import rank_memory, update_bytes
from trainer.run.stage_times import random_batch
from trainer.run.temporaries import temporary_bytes
from trainer.store.plan import plan_buckets
from trainer.verify.threads import run_threads

LONG = [pytest.mark.slow, pytest.mark.ci]


class Peak(Born):
    """Notes how much of it there was at most."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.born = {place: found for place, found in self.born.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.born.values()))
        return out


@pytest.fixture(autouse=True)
def _no_wide_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU widens the factors of a product into fp32; a GPU's kernel does not."""
    monkeypatch.setattr(weight, "add_product", lambda out, dy, x, first: out.zero_())


def share_of_peak(engine: Engine, held_bytes: int = 0) -> float:
    """What is counted for a pass, and what a test holds besides, over what its tensors take."""
    engine.store.begin_step(0)
    batch = random_batch(engine)
    weights_S = batch.weights_S
    if weights_S is None:
        raise TypeError("a batch of training has weights")
    gc.collect()
    with Peak() as peak:
        loss = engine.chunks[0].forward(None, batch)
        torch.autograd.backward((loss * weights_S).sum())
    return (activation_bytes(engine.config, 0) + temporary_bytes(engine.config, 0) + held_bytes) / peak.peak


def config_of(model: str, train: dict[str, Any], parallel: dict[str, Any] | None = None, **shape: Any) -> Config:
    wide: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 128,
        "num_heads": 4,
        "ffn_hidden_size": 448,
        "vocab_size": 10,
    }
    batch: dict[str, Any] = {
        "micro_batch_size": 2,
        "seq_length": 64,
        "global_batch_size": 2,
        "device": "cpu",
        "precision": "bf16",
    }
    tables = {"model": wide | MODELS[model] | shape, "train": batch | train, "parallel": parallel or {}}
    return config_from(tables, source="", world_size=None)


SLOW = [pytest.mark.slow, pytest.mark.ci]
MORE = [(model, choice) for model in MODELS for choice in CHOICES]


@pytest.mark.parametrize(
    ("model", "choice"),
    [("llama", "none"), ("gpt2", "full"), *(pytest.param(*each, marks=SLOW) for each in MORE)],
)
@pytest.mark.parametrize(
    ("train", "shape"),
    [
        ({}, {}),
        pytest.param({"max_logits_gib": 1e-4}, {"vocab_size": 997}, marks=SLOW),  # made in parts
        pytest.param({"max_logits_gib": 0.0}, {"vocab_size": 997}, marks=SLOW),
        pytest.param({"num_layers": 1}, {"ffn_hidden_size": 96}, marks=SLOW),
    ],
)
def test_a_pass_takes_what_is_counted(model: str, choice: str, train: dict[str, Any], shape: dict[str, Any]) -> None:
    first = train.get("num_layers", 0) if choice != "none" else 0
    options = {name: value for name, value in train.items() if name != "num_layers"}
    config = config_of(model, CHOICES[choice] | options | {"recompute_num_layers": first}, **shape)
    engine = Engine(config, ProcessMesh(layout_of(config), 0, torch.device("cpu"), timeout_s=60))
    assert share_of_peak(engine) == pytest.approx(1.01, abs=0.06)


@pytest.mark.parametrize("max_logits_gib", [1e-4, 0.0])
def test_capped_logits_take_what_is_counted(max_logits_gib: float) -> None:
    config = config_of("llama", {"max_logits_gib": max_logits_gib}, vocab_size=9997, logit_softcap=3.0)
    engine = Engine(config, ProcessMesh(layout_of(config), 0, torch.device("cpu"), timeout_s=60))
    assert share_of_peak(engine) == pytest.approx(1.01, abs=0.06)


@pytest.mark.parametrize("data", [{"document_mask": True, "reset_positions": True}, {}], ids=["documents", "rows"])
def test_windows_and_documents_keep_what_is_counted(data: dict[str, Any]) -> None:
    config = config_of("llama", {}, window=16, window_every=2)
    config = replace(config, data=config_from({"data": data}, source="").data)
    engine = Engine(config, ProcessMesh(layout_of(config), 0, torch.device("cpu"), timeout_s=60))
    assert graph_bytes(engine) == pytest.approx(activation_bytes(config, 0), rel=0.03)


def share_of_rank(rank: int, config: Config, *, network: Network) -> float:
    """The threads that stand for ranks hold one tensor of all tokens, until the next one travels."""
    return share_of_peak(make_engine(rank, config, network=network), held_bytes=Sizes.of(config).whole_stream)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("cuts_tokens", ["on", "off"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_rank_of_two_takes_what_is_counted(choice: str, cuts_tokens: str) -> None:
    config = config_of("llama", CHOICES[choice], {"tp": 2, "sequence_parallel": cuts_tokens})
    assert run_threads(2, share_of_rank, config) == [pytest.approx(1.03, abs=0.11)] * 2


def cast(
    x_RC: torch.Tensor, scaling: Scaling, dtype: torch.dtype, *, rows: bool, columns: bool, **_: Any
) -> tuple[Quantised | None, Quantised | None]:
    """The results of a cast without what its reference takes besides."""
    return (
        Quantised(torch.empty_like(x_RC, dtype=dtype), torch.ones(1), scaling) if rows else None,
        Quantised(torch.empty(x_RC.shape[::-1], dtype=dtype), torch.ones(1), scaling) if columns else None,
    )


def product(a: Quantised, b: Quantised, dtype: torch.dtype, **_: Any) -> torch.Tensor:
    """The result of a product alone, and nothing of one that is written elsewhere."""
    return torch.empty(len(a.values_RC), len(b.values_RC) * (dtype == torch.bfloat16), dtype=dtype)


@pytest.mark.parametrize("wgrad", [pytest.param("bf16", marks=LONG), "fp8"])
@pytest.mark.parametrize("choice", ["none", *(pytest.param(name, marks=LONG) for name in ("full", "selective of mlp"))])
def test_passes_in_eight_bits_take_what_is_counted(choice: str, wgrad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "quantise", cast)
    monkeypatch.setattr(fp8, "product", product)
    monkeypatch.setattr(fp8, "add_product", lambda out, dy, x, first: out.zero_())
    config = config_of("llama", CHOICES[choice], {}, num_kv_heads=2)
    config = replace(config, fp8=Fp8Config(recipe="tensorwise", wgrad=wgrad))  # type: ignore[arg-type]
    engine = Engine(config, ProcessMesh(layout_of(config), 0, torch.device("cpu"), timeout_s=60))
    assert rank_memory(config, 0).copies == 0, "with one micro-batch none is kept"
    assert share_of_peak(engine) == pytest.approx(1.01, abs=0.08)
    config = replace(config, train=replace(config.train, gradient_accumulation_steps=2))
    engine = Engine(config, ProcessMesh(layout_of(config), 0, torch.device("cpu"), timeout_s=60))
    weights = rank_memory(config, 0).copies  # which the first pass makes
    assert (activation_bytes(config, 0) + weights) / graph_bytes(engine) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("name", ["muon", "lion", "sgd", "adamw"])
def test_an_update_takes_what_is_counted(name: str, overlaps: bool) -> None:
    """Within a fifth, once no activation is there."""
    parallel = {"overlap_param_gather": overlaps, "bucket_mib": 1}
    config = config_of("llama", {"micro_batch_size": 1, "seq_length": 1, "global_batch_size": 1}, parallel)
    config = replace(config, optim=replace(config.optim, name=name))
    engine = make_engine(0, config)
    for bucket in engine.store.buckets:
        bucket.gradients.normal_()
    decisions = {"factor": torch.ones((), dtype=torch.float64), "is_bad": torch.zeros(())}
    gc.collect()
    with Peak() as peak:
        engine.store.update(engine.config.optim, 0.1, 0, **decisions)
    runs = local_runs(config, engine.table, layout_of(config), Coords())
    buckets = plan_buckets(runs, 1 << 20, engine.dtype.itemsize)
    counted = update_bytes(config, buckets, {run.holders: 1 for run in runs})
    assert counted == pytest.approx(peak.peak, rel=0.2, abs=1e5)
    assert rank_memory(config, 0).temporaries >= counted - activation_bytes(config, 0)
