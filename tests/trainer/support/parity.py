"""A short training on synthetic batches that any layout must repeat: the models, the batches, the run of one rank."""

from dataclasses import replace
from typing import Any

import torch

from ckptkit.model.layout import ParallelLayout
from trainer.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from trainer.config_check import layout_of, resolve
from trainer.engine import Batch, Engine
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.native import csrc_calls

VOCAB, SEQ, GLOBAL_BATCH, MICRO_BATCH = 50257, 16, 16, 1

MODELS = {
    "llama": ModelConfig(
        num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=48, vocab_size=VOCAB, qk_norm=True
    ),
    "gpt2": ModelConfig(
        num_layers=3, hidden_size=32, num_heads=4, vocab_size=VOCAB, norm="layernorm", position="learned",
        activation="gelu", bias=True, tie_embeddings=True, dropout=0.1,
    ),
}  # fmt: skip


def config_for(
    model: str, layout: ParallelLayout, *, precision: str = "fp64", zero_stage: int = 1, device: str = "cpu"
) -> Config:
    """A resolved configuration: high peak rate, no warm-up, clipping, at least 4 micro-batches."""
    config = Config(
        model=MODELS[model],
        parallel=ParallelConfig(tp=layout.tp, pp=layout.pp, dp=layout.dp, zero_stage=zero_stage, bucket_mib=1),  # type: ignore[arg-type]
        optim=OptimConfig(lr=2e-3, min_lr=1e-4, clip=0.5),
        train=TrainConfig(
            train_steps=20, seq_length=SEQ, micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH,
            precision=precision, device=device, seed=7,  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    return resolve(config, layout.world_size)


def global_batch(step: int) -> dict[str, torch.Tensor]:
    """Samples of one step in global order; each has another number of unmasked tokens, few distinct rows to learn."""
    generator = torch.Generator().manual_seed(1234)
    pool = torch.randint(VOCAB, (8, SEQ + 1), generator=generator)
    rows = pool[[(step * 5 + sample) % len(pool) for sample in range(GLOBAL_BATCH)]]
    lengths = torch.tensor([1 + (3 * sample + step) % SEQ for sample in range(GLOBAL_BATCH)])
    positions = torch.arange(SEQ).expand(GLOBAL_BATCH, SEQ)
    mask = (positions < lengths.unsqueeze(-1)).float()
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:], "positions": positions, "loss_mask": mask}


def local_batch(step: int, dp_rank: int, dp_size: int, device: torch.device) -> Batch:
    """A data-parallel rank's share: sample (m * dp_size + dp_rank) * micro_batch + i."""
    num_microbatches = GLOBAL_BATCH // (MICRO_BATCH * dp_size)
    order = torch.arange(GLOBAL_BATCH).view(num_microbatches, dp_size, MICRO_BATCH)[:, dp_rank]
    parts = {name: rows[order].to(device) for name, rows in global_batch(step).items()}
    return Batch(**parts, first_sample=step * GLOBAL_BATCH)


def make_engine(rank: int, config: Config) -> Engine:
    """The engine of one rank, on its own GPU where the configuration asks for one."""
    index = rank if config.train.device == "cuda" else None
    return Engine(config, ProcessMesh(layout_of(config), rank, torch.device(config.train.device, index), timeout_s=60))


def run_steps(rank: int, config: Config, num_steps: int) -> dict[str, Any]:
    """Train from the start; losses and norms, and what the rank holds and did."""
    engine = make_engine(rank, config)
    mesh = engine.mesh
    stats = [
        engine.train_step(step, local_batch(step, mesh.dp.index, mesh.dp.size, mesh.device))
        for step in range(num_steps)
    ]
    return {
        "losses": [each.loss for each in stats],
        "norms": [each.grad_norm for each in stats],
        "names": [name for name, _ in engine.stage.named_parameters()],
        "peak_live": engine.pipeline.peak_live,
        "peak_sends": engine.pipeline.peak_sends,
        "optimizer_bytes": engine.optimizer_bytes,
        "calls": csrc_calls(),
    }


def largest_gap(run: dict[str, Any], reference: dict[str, Any]) -> float:
    """Largest relative difference of the losses and gradient norms of two runs."""
    pairs = [pair for key in ("losses", "norms") for pair in zip(run[key], reference[key], strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def without_clip(config: Config) -> Config:
    """The same run with clipping off."""
    return replace(config, optim=replace(config.optim, clip=0.0))
