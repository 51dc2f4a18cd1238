"""A short training on synthetic batches that any layout must repeat: the models, the batches, the run of one rank."""

from dataclasses import replace
from typing import Any

import torch

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from trainer.checkpoint.mapping import saved_pieces, tensor_table
from trainer.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from trainer.config.resolve import resolve
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh, mesh_of
from trainer.mesh.processes import Processes
from trainer.model.microbatch import Batch
from trainer.ops.native import csrc_calls
from trainer.store.store import ParameterStore
from trainer.verify.late_lanes import late_inputs
from trainer.verify.recording import Recording
from trainer.verify.trial import counted_step
from trainer.verify.whole import assembled, copied

VOCAB, SEQ, GLOBAL_BATCH, MICRO_BATCH = 50257, 16, 16, 1
LOSSES_WITHIN, WEIGHTS_WITHIN = 1e-10, 1e-9  # of one process, in float64

MODELS = {
    "llama": ModelConfig(
        num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=48, vocab_size=VOCAB,
        round_vocab_to=1, qk_norm=True
    ),
    "gpt2": ModelConfig(
        num_layers=3, hidden_size=32, num_heads=4, vocab_size=VOCAB, round_vocab_to=1, norm="layernorm",
        position="learned", activation="gelu", bias=True, tie_embeddings=True, dropout=0.1,
    ),
}  # fmt: skip


def config_for(
    model: str, layout: ParallelLayout, *, precision: str = "fp64", zero_stage: int = 1, device: str = "cpu"
) -> Config:
    """A resolved configuration: high peak rate, no warm-up, clipping, at least 4 micro-batches."""
    config = Config(
        model=MODELS[model],
        parallel=ParallelConfig(
            tp=layout.tp, cp=layout.cp, pp=layout.pp, dp=layout.dp, virtual_stages=layout.virtual,
            zero_stage=zero_stage, bucket_mib=1,  # type: ignore[arg-type]
        ),
        optim=OptimConfig(lr=2e-3, min_lr=1e-4, clip=0.5),
        train=TrainConfig(
            train_steps=20, seq_length=SEQ, micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH,
            precision=precision, device=device, seed=7,  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    return resolve(config, layout.world_size)


def small(config: Config) -> Config:
    """The same run with a small vocabulary."""
    return replace(config, model=replace(config.model, vocab_size=61))


def alone(config: Config) -> Config:
    """The same run on one process, which takes each batch whole."""
    train = replace(config.train, micro_batch_size=config.train.global_batch_size)
    return resolve(replace(config, parallel=ParallelConfig(), train=train), 1)


def global_batch(config: Config, step: int) -> dict[str, torch.Tensor]:
    """Samples of one step in global order; few distinct rows to learn.

    Each sample has another number of unmasked tokens, some have none; a second document begins somewhere in each.
    """
    batch, seq, vocab = config.train.global_batch_size, config.train.seq_length, config.model.vocab_size
    generator = torch.Generator().manual_seed(1234)
    pool = torch.randint(vocab, (8, seq + 1), generator=generator)
    rows = pool[[(step * 5 + sample) % len(pool) for sample in range(batch)]]
    lengths, starts = (
        torch.tensor([(factor * sample + step) % (seq + 1) for sample in range(batch)]).unsqueeze(-1)
        for factor in (3, 5)
    )
    order = torch.arange(seq).expand(batch, seq)
    positions = torch.where(order < starts, order, order - starts)
    return {
        "tokens": rows[:, :-1],
        "labels": rows[:, 1:],
        "positions": positions,
        "loss_mask": (order < lengths).float(),
    }


def local_batch(config: Config, step: int, mesh: ProcessMesh) -> Batch:
    """A data-parallel rank's share: sample (m * dp_size + dp_rank) * micro_batch + i."""
    train = config.train
    order = torch.arange(train.global_batch_size).view(-1, mesh.dp.size, train.micro_batch_size)[:, mesh.dp.index]
    parts = {name: rows[order].to(mesh.device) for name, rows in global_batch(config, step).items()}
    batch = Batch(**parts, first_sample=step * train.global_batch_size)
    return with_documents(batch) if config.data.document_mask else batch


def with_documents(batch: Batch) -> Batch:
    """The same batch with the bounds of its documents, which begin where positions do."""
    documents = []
    for positions in batch.positions:
        begins = torch.nonzero(positions.flatten() == 0).flatten().tolist()
        bounds = torch.tensor([*begins, positions.numel()], dtype=torch.int32, device=positions.device)
        documents.append((bounds, int(bounds.diff().max())))
    return replace(batch, documents=tuple(documents))


def parameters_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of the parameters of an engine that is alone, as plain torch takes them."""
    saved = assembled(tensor_table(engine.table, engine.dtype), copied(saved_pieces(engine.store)))
    return {name: value for name, value in saved.items() if not name.startswith("optim.")}


def in_groups(batch: Batch) -> Batch:
    """The same batch, of which losses are summed by what remains of a token's number when three divides it."""
    return replace(batch, groups=batch.tokens % 3, num_groups=3)


def make_engine(rank: int, config: Config, *, network: Network | None = None) -> Engine:
    """The engine of one rank, on its own GPU where the configuration asks for one; ranks of a network share the first.

    Ranks that are threads cannot share the thread on which torch runs the backward of a GPU.
    """
    number = rank if network is None else 0
    device = torch.device(config.train.device, number if config.train.device == "cuda" else None)
    torch.autograd.set_multithreading_enabled(network is None)
    carried = network or Processes(device, timeout_s=config.parallel.timeout_s)
    mesh = mesh_of(config, rank, device, network=Recording(carried))
    engine = Engine(config, mesh)
    if config.train.recompute_offload and device.type == "cpu":
        for chunk in engine.chunks.values():
            chunk.keep_inputs(late_inputs())
    engine.initialise()
    return engine


def state_bytes(store: ParameterStore) -> int:
    """The bytes of optimizer state on a rank: the states, and of the masters what is kept besides."""
    states = [state for bucket in store.buckets for state in bucket.states.values()]
    apart = [bucket for bucket in store.buckets if bucket.master.dtype != bucket.parameters.dtype]
    masters = [bucket.master if bucket.low is None else bucket.low for bucket in apart]
    return sum(tensor.numel() * tensor.itemsize for tensor in (*states, *masters))


def run_steps(rank: int, config: Config, num_steps: int, *, network: Network | None = None) -> dict[str, Any]:
    """Train from the start; losses and norms, what the rank holds afterwards, and what it did."""
    engine = make_engine(rank, config, network=network)
    batches = [local_batch(config, step, engine.mesh) for step in range(num_steps)]
    stats = [counted_step(engine, step, batch) for step, batch in enumerate(batches)]
    return {
        "losses": [each.loss for each in stats],
        "norms": [each.grad_norm for each in stats],
        "num_tokens": [each.num_tokens for each in stats],
        "evaluation": engine.eval_batch(in_groups(batches[-1])),
        "weights": copied(piece for piece in saved_pieces(engine.store) if not piece.name.startswith("optim.")),
        "table": [info for info in tensor_table(engine.table, engine.dtype) if not info.name.startswith("optim.")],
        "names": [name for name, _ in engine.store.values()],
        "biases": {piece.name: piece.data.clone() for piece in engine.balance.pieces()},
        "peak_live": engine.pipeline.peak_live,
        "peak_sends": engine.pipeline.peak_sends,
        "optimizer_bytes": state_bytes(engine.store),
        "calls": csrc_calls(),
    }


def assert_parity(runs: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """Every rank saw the losses, norms and counts of one process, and together they hold its weights; in float64."""
    for rank, run in enumerate(runs):
        gap = largest_gap(run, reference)
        require_equal(gap <= LOSSES_WITHIN, f"rank {rank}: losses and norms differ by {gap:.2e}")
        require_equal(run["num_tokens"] == reference["num_tokens"], f"rank {rank}: numbers of tokens differ")
    gap, name = weights_gap(runs, reference)
    require_equal(gap <= WEIGHTS_WITHIN, f"{name} differs by {gap:.2e}")


def largest_gap(run: dict[str, Any], reference: dict[str, Any]) -> float:
    """Largest relative difference of losses, gradient norms and evaluations; infinite if one is not a number."""
    keys = ("losses", "norms", "evaluation")
    pairs = [pair for key in keys for pair in zip(run[key], reference[key], strict=True)]
    gaps = [abs(a - b) / max(abs(b), 1e-300) for a, b in pairs]
    return max(gap if gap == gap else float("inf") for gap in gaps)


def assemble_weights(runs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The weights that all ranks hold together."""
    return assembled(runs[0]["table"], [piece for run in runs for piece in run["weights"]])


def weights_gap(runs: list[dict[str, Any]], reference: dict[str, Any]) -> tuple[float, str]:
    """Largest difference of the weights that all ranks hold together from a reference, and where it is."""
    expected, found = assemble_weights([reference]), assemble_weights(runs)
    require_equal(found.keys() == expected.keys(), f"one run has not the tensors {found.keys() ^ expected.keys()}")
    return max((float((found[name] - expected[name]).abs().max()), name) for name in expected)
