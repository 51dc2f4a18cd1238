"""What the backward makes again has the bits of what was kept, and nothing is made that it does not read."""

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, in_groups, local_batch, make_engine, small
from tests.trainer.support.recompute import compare_again, dropping
from tests.trainer.support.training import call
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.linear.weight import Gemm
from trainer.model.host_inputs import NUM_ON_DEVICE, HostInputs
from trainer.model.recompute import Recompute
from trainer.ops.attention.sdpa import CpuFlash
from trainer.run.activations import CHOICES, activation_bytes, host_bytes
from trainer.run.banner import offload_text
from trainer.store.window import Copies, Mark
from trainer.verify.host_waits import no_host_waits
from trainer.verify.late_lanes import LateLanes

AGAIN = {name: options for name, options in CHOICES.items() if name != "none"} | {
    "full of a layer": {"recompute": "full", "recompute_num_layers": 1},
    "selective of a layer": {"recompute": "selective", "recompute_modules": ("mlp",), "recompute_num_layers": 1},
}


def with_train(config: Config, **train: Any) -> Config:
    return replace(config, train=replace(config.train, **train))


SLOW = [pytest.mark.slow, pytest.mark.ci]
QUICK = [("llama", "tp1", {}, name) for name in ("selective", "full of a layer")] + [
    ("gpt2", "tp1", {}, "selective of mlp,attention"),
    ("llama", "tp2", {"overlap_grad_reduce": False}, "full that keeps attention"),
    ("gpt2", "pp2", {"schedule": "zb-h1"}, "selective of mlp"),
]
CI = {"tp2-pp2-dp2"}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("tp1", {}),
    ("tp2", {}),
    ("tp2", {"sequence_parallel": "off"}),
    ("pp2", {}),
    ("pp2", {"schedule": "zb-h1"}),
    ("tp2-pp2-dp2", {"schedule": "zb-h1", "tp_overlap_parts": 2}),
    ("dp2", {"overlap_grad_reduce": False, "overlap_param_gather": False}),
]


@pytest.mark.parametrize(
    ("model", "layout", "parallel", "choice"),
    [
        *QUICK,
        *(
            pytest.param(model, layout, parallel, choice, marks=[pytest.mark.slow, *[pytest.mark.ci] * (layout in CI)])
            for model in ("llama", "gpt2")
            for layout, parallel in LAYOUTS
            for choice in AGAIN
            if (model, layout, parallel, choice) not in QUICK
        ),
    ],
)
def test_what_is_made_again_has_the_bits_of_what_is_kept(
    model: Any, layout: str, parallel: dict[str, Any], choice: str
) -> None:
    compare_again(dropping(model, layout, **parallel), **AGAIN[choice])


@pytest.mark.parametrize(
    ("layout", "parallel", "again"),
    [
        ("tp1", {}, {}),
        ("pp2", {"schedule": "zb-h1"}, {"recompute_keep": "attention"}),
        pytest.param("tp2-pp2", {"schedule": "1f1b"}, {"recompute_num_layers": 3}, marks=SLOW),
        pytest.param("pp2-virtual2", {}, {}, marks=SLOW),
        pytest.param("dp2", {"zero_stage": 3, "zero_whole_kib": 0}, {}, marks=SLOW),
    ],
)
def test_inputs_in_host_memory_have_the_bits_of_others(
    layout: str, parallel: dict[str, Any], again: dict[str, Any]
) -> None:
    config = dropping("llama", layout, **parallel)
    config = replace(config, model=replace(config.model, num_layers=4 * config.parallel.pp))
    compare_again(config, recompute="full", recompute_offload=True, **again)


def test_an_input_comes_back_one_layer_ahead_and_its_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dropping("llama", "tp1")
    config = replace(config, model=replace(config.model, num_layers=6))
    engine = make_engine(0, with_train(config, recompute="full"))
    lanes, sizes = Counted(), list[int]()

    def new_memory(size: int, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=dtype)

    [chunk] = engine.chunks.values()
    chunk.keep_inputs(HostInputs(lanes, new_memory))
    real = Gemm.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        lanes.calls.append("product")
        return real(self, *arguments, **named)

    monkeypatch.setattr(Gemm, "forward", forward)
    for step in range(2):
        engine.train_step(step, local_batch(config, step, engine.mesh))
    assert len(sizes) == 5, "of all layers but the last; each pass takes the same"
    as_planned = with_train(config, recompute="full", recompute_offload=True, device="cuda")
    stream = sizes[0] * engine.dtype.itemsize
    assert host_bytes(as_planned, 0) == 5 * stream
    resident = activation_bytes(with_train(as_planned, recompute_offload=False), 0)
    assert resident - activation_bytes(as_planned, 0) == (5 - NUM_ON_DEVICE) * stream
    passes = 2 * config.train.gradient_accumulation_steps
    copies = [call for call in lanes.calls if call in ("in", "out")]
    assert copies == (["out"] * 5 + ["in"] * 5) * passes
    behind = [after for call, after in zip(lanes.calls, lanes.calls[1:], strict=False) if call == "in"]
    assert set(behind) == {"product"}, "of the layer before, in the order of the backward"
    lanes.calls.clear()
    engine.eval_batch(in_groups(local_batch(config, 9, engine.mesh)))
    assert set(lanes.calls) == {"product"}, "without a backward nothing is moved"


def on_gpu(config: Config) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses and masters of a training without a wait, and the most memory that it took."""
    gc.collect()
    torch.cuda.empty_cache()
    engine = make_engine(0, config)
    losses = []
    for step in range(4):
        batch = local_batch(config, step, engine.mesh)
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        with no_host_waits("cuda" if step > 1 else "cpu"):
            pending = engine.start_step(step, batch)
        losses.append(pending.read().loss)
    masters = [bucket.master.cpu() for bucket in engine.store.buckets]
    return losses, masters, torch.cuda.max_memory_allocated()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.cuda
@pytest.mark.parametrize("keep", ["nothing", "attention"])
def test_a_gpu_keeps_few_inputs_of_layers(keep: str) -> None:
    config = small(config_for("llama", ParallelLayout(), device="cuda", precision="bf16"))
    model = replace(config.model, hidden_size=1024, ffn_hidden_size=2048, num_layers=24, num_heads=8, head_size=128)
    train = {"seq_length": 1024, "micro_batch_size": 16, "global_batch_size": 32, "gradient_accumulation_steps": 2}
    config = with_train(replace(config, model=model), recompute="full", recompute_keep=keep, **train)
    losses, masters, resident_peak = on_gpu(config)
    from_host, others, peak = on_gpu(with_train(config, recompute_offload=True))
    assert from_host == losses
    assert all(map(torch.equal, others, masters))
    stream = 16 * 1024 * 1024 * 2
    assert resident_peak - peak >= 0.9 * (23 - NUM_ON_DEVICE) * stream


class Counted(LateLanes):
    """Notes copies, and waits for what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[str]()

    def copy(self, lane: str, copies: Copies, after: Mark | None) -> Mark:
        """Note that something is copied."""
        self.calls += [lane] * bool(copies)
        return super().copy(lane, copies, after)

    def wait(self, mark: Mark) -> None:
        """Note a wait."""
        self.calls += ["wait"] * (mark is not None and mark[0] == "in")
        super().wait(mark)


def test_inputs_in_host_memory_without_effect_are_said_and_graphs_refused() -> None:
    config = with_train(dropping("llama", "tp1"), recompute="full", recompute_offload=True)
    assert list(offload_text(config, torch.device("cpu"))) == [
        "train.recompute_offload has no effect: a CPU has inputs of layers in the host's memory anyway"
    ]
    graphs = with_train(config, device="auto", cuda_graphs=True)
    assert any("train.recompute_offload moves inputs of layers" in reason for _, reason in cross_faults(graphs, 1))


@pytest.mark.parametrize(
    ("choice", "products", "kernels"),  # of a layer, both passes together
    [
        ("none", 4, 1),
        ("selective", 4, 1),
        ("selective of mlp", 5, 1),
        ("selective of attention", 5, 2),
        ("selective of mlp,attention", 6, 2),
        ("full that keeps attention", 7, 1),
        ("full", 7, 2),
    ],
)
def test_no_product_is_made_that_the_backward_does_not_read(
    choice: str, products: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four products in a layer the last is made once."""
    config = dropping("llama", "tp1")
    engine = make_engine(0, with_train(config, **CHOICES[choice]))
    counts: Counter[str] = Counter()
    for owner in (Gemm, CpuFlash):

        def counted(
            self: Any, *arguments: Any, real: Any = owner.forward, name: str = owner.__name__, **out: Any
        ) -> Any:
            counts[name] += 1
            return real(self, *arguments, **out)

        monkeypatch.setattr(owner, "forward", counted)
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    passes = config.train.gradient_accumulation_steps
    num_layers = config.model.num_layers
    assert counts["Gemm"] == passes * (num_layers * products + 1), "and the logits"
    assert counts["CpuFlash"] == passes * num_layers * kernels


def test_the_first_layers_of_a_stage_are_made_again() -> None:
    train = with_train(dropping("llama", "tp1"), recompute="full", recompute_num_layers=2).train
    assert [Recompute.of_layer(train, place).is_full for place in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (
            "--recompute none --recompute-num-layers 5",
            'recompute_num_layers needs train.recompute = "selective" or "full"',
        ),
        ("--recompute-modules mlp", 'train.recompute_modules needs train.recompute = "selective", which is "none"'),
        ("--recompute full --train.recompute-modules norms", "train.recompute_modules needs train.recompute"),
        ("--recompute selective --recompute-keep attention", 'train.recompute_keep needs train.recompute = "full"'),
        ("--recompute selective --recompute-modules mlp,scores", "'scores' is not made again here"),
        ("--recompute selective --train.recompute-modules scores", "must be one of norms, mlp, attention"),
        ("--recompute full --recompute-num-layers -1", "must be at least 0"),
        ("--recompute full --recompute-num-layers 4", "is more than model.num_layers 3: --recompute-num-layers 3"),
        ("--recompute full --recompute-num-layers 3 --pp 2", "the 2 layers that a stage has at most"),
        ("--recompute full --recompute-num-layers 3 --pp 2 --pipeline-layout 1,2", "the 2 layers that a stage has"),
        ("--recompute half", "must be one of none, selective, full, got 'half'"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "not 2 as one"),
    ],
)
def test_what_cannot_be_made_again_is_one_error_before_anything_starts(
    flags: str, fault: str, job_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", job_config, "--dry-run", *flags.split()) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert fault in first
    assert [line.split(":")[0] for line in rest] == ["hint"]
