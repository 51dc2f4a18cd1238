"""Trials: some steps of a small run on ranks that are threads of this process, and what each of them saw and holds.

The stream is the run's own, over synthetic stores: blend, packing, masks and mixture. Each data-parallel rank reads
its batches through a Loader of its own.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckptkit import Piece, Run, TensorInfo, save
from datakit import HostBatch, pack, write_store
from trainer.checkpoint.load import restore_step
from trainer.checkpoint.mapping import saved_pieces, tensor_table
from trainer.config import Config
from trainer.config.resolve import layout_of, row_lengths
from trainer.data import open_blend, open_loader, to_device
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.mesh.mesh import mesh_of
from trainer.mesh.processes import Processes
from trainer.model.microbatch import Batch
from trainer.verdict import Outcome, StepStats
from trainer.verify.host_waits import no_host_waits
from trainer.verify.late_lanes import late_inputs, streaming_on_cpu
from trainer.verify.recording import Call, Recording
from trainer.verify.replay import record_passes
from trainer.verify.threads import Threads, run_threads
from trainer.verify.whole import assembled, copied

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Stream:
    """Some steps of a run from step `first` on: each data-parallel rank's batches, and the cursor behind each step."""

    batches: Sequence[Sequence[HostBatch]]
    cursors: Sequence[Mapping[str, Any]]
    first: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of each step, and what it holds behind the last one."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    num_tokens: tuple[int, ...]
    evaluation: tuple[float, ...]  # the sum of token losses, and their number
    pieces: Sequence[Piece]
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True)
class Trial:
    """What all ranks saw, and the tensors that they hold together."""

    config: Config
    ranks: Sequence[Seen]
    tensors: Sequence[TensorInfo]

    def whole(self) -> dict[str, Tensor]:
        """Return the whole tensors by name; Different if an element is held never or twice."""
        return assembled(self.tensors, [piece for seen in self.ranks for piece in seen.pieces])


@dataclass(frozen=True, slots=True)
class SavedStep:
    """The step of a run at a URL that ranks restore before their first step."""

    url: str
    step: int


def with_stores(config: Config, folder: Path) -> Config:
    """Write synthetic stores in a folder, one in the place of each of the run's, and return the run that reads them."""
    data, folder = config.data, folder.absolute()
    sources = data.plan.sources or ("store",)
    places = {source: str(folder / f"store-{number}") for number, source in enumerate(sources)}
    vocab, longest = config.model.vocab_size, max(row_lengths(config))
    for number, path in enumerate(places.values()):
        draw = np.random.default_rng([config.train.seed, number])
        lengths = draw.integers(1, 2 * longest, 40)
        documents = [np.append(draw.integers(0, vocab - 1, length), vocab - 1) for length in lengths]
        write_store(path, documents, vocab_size=vocab, eod_id=vocab - 1)
        for length in set(row_lengths(config)) if data.packing != "concat" else ():
            pack(path, seq_length=length, packing=data.packing)
    masked = folder / "masked"
    masked.write_text(f"{places[sources[0]]}:1\n")
    mixture = tuple(
        replace(
            each,
            weights={places[source]: weight for source, weight in each.weights.items()},
            add={places[source]: weight for source, weight in each.add.items()},
            remove=tuple(places[source] for source in each.remove),
            mask_documents=each.mask_documents and str(masked),
        )
        for each in data.mixture
    )
    stores = tuple(places[source] for source in data.stores or sources)
    return replace(config, data=replace(data, stores=stores, mixture=mixture, cache=""))


def read_stream(config: Config, num_steps: int, *, cursor: Mapping[str, Any] | None = None, first: int = 0) -> Stream:
    """Read some steps of all data-parallel ranks, from the stream's first or from those behind a cursor."""
    blend, batches, cursors = open_blend(config), [], []
    for dp_rank in range(config.parallel.dp):
        loader = open_loader(blend, config, dp_rank, cursor)
        steps = []
        for _ in range(num_steps):
            steps.append(loader.next_step())
            if dp_rank == 0:
                cursors.append(loader.cursor.to_json())
        batches.append(steps)
    return Stream(batches, cursors, first)


def try_steps(
    config: Config, stream: Stream, num_steps: int, *, start: SavedStep | None = None, refuses_waits: bool = False
) -> Trial:
    """Train some steps of a stream on all ranks, from a saved step or from the first.

    With `refuses_waits` the last step is an error, Different, if a host would wait for its device in it.
    """
    first = start.step if start else 0
    arguments = config, stream, range(first, first + num_steps), start, refuses_waits
    world_size = layout_of(config).world_size
    seen = run_threads(world_size, _train, *arguments) if world_size > 1 else [_train(0, *arguments)]
    return Trial(config, [each for each, _ in seen], seen[0][1])


def _train(
    rank: int,
    config: Config,
    stream: Stream,
    steps: range,
    start: SavedStep | None,
    refuses_waits: bool,
    *,
    network: Network | None = None,
) -> tuple[Seen, Sequence[TensorInfo]]:
    recording = Recording(network or Processes(CPU, timeout_s=60.0))
    engine = made_engine(rank, config, recording)
    if isinstance(network, Threads):
        engine.pipeline.note = network.note
    mesh = engine.mesh
    if start is not None:
        restore_step(engine, Run(start.url), start.step)
        engine.store.publish()
    stats, batch = [], None
    for step in steps:
        batch = to_device(stream.batches[mesh.dp.index][step - stream.first], CPU)
        if refuses_waits and step == steps[-1]:
            with no_host_waits("cpu"):
                pending = engine.start_step(step, batch)
            stats.append(pending.read())
        else:
            stats.append(counted_step(engine, step, batch))
    evaluation = () if batch is None else engine.eval_batch(batch)
    return seen_of(engine, stats, evaluation, recording.calls)


def seen_of(
    engine: Engine, stats: Sequence[StepStats], evaluation: tuple[float, ...], calls: Sequence[Call]
) -> tuple[Seen, Sequence[TensorInfo]]:
    """Return what a rank saw, and holds now, and the tensors of which all ranks hold a part."""
    losses, norms = tuple(each.loss for each in stats), tuple(each.grad_norm for each in stats)
    numbers = tuple(each.num_tokens for each in stats)
    tensors = [*tensor_table(engine.table, engine.dtype, engine.moments), *engine.balance.tensors]
    return Seen(losses, norms, numbers, evaluation, held_by(engine), calls), tensors


def held_by(engine: Engine) -> list[Piece]:
    """Return copies of what a rank would save."""
    engine.store.join_masters()
    return copied([*saved_pieces(engine.store), *engine.balance.saved_pieces()])


def made_engine(rank: int, config: Config, network: Network) -> Engine:
    torch.autograd.set_multithreading_enabled(False)
    streaming = streaming_on_cpu() if config.optim.offload else None
    engine = Engine(config, mesh_of(config, rank, CPU, network=network), streaming=streaming)
    engine.initialise()
    if config.train.recompute_offload:
        for chunk in engine.chunks.values():
            chunk.keep_inputs(late_inputs())
    if config.train.cuda_graphs:
        record_passes(engine)
    return engine


def first_weights(config: Config) -> dict[str, Tensor]:
    """Return the initial weights of a run of one process, by name."""
    engine = made_engine(0, config, Processes(CPU, timeout_s=60.0))
    tensors = [info for info in tensor_table(engine.table, engine.dtype) if not info.name.startswith("optim.")]
    names = {info.name for info in tensors}
    return assembled(tensors, copied(piece for piece in saved_pieces(engine.store) if piece.name in names))


def counted_step(engine: Engine, step: int, batch: Batch) -> StepStats:
    """Train a step until it counts, with room for the rows that it asked for."""
    stats = engine.train_step(step, batch)
    while stats.outcome is Outcome.REPEATED:
        engine.verdict.repeat()
        engine.balance.limit.make_room(stats.of_experts["rank_rows"])
        stats = engine.train_step(step, batch)
    return stats


def save_trial(trial: Trial, url: str, step: int, stream: Stream) -> SavedStep:
    """Save what the ranks of a trial hold as a step, each its own part, and return it."""
    attempt, start = secrets.token_hex(8), SavedStep(url, step)
    for rank in reversed(range(len(trial.ranks))):
        save_part(trial.config, start, rank, trial.ranks[rank].pieces, trial.tensors, stream, attempt)
    return start


def save_part(
    config: Config,
    start: SavedStep,
    rank: int,
    pieces: Sequence[Piece],
    tensors: Sequence[TensorInfo],
    stream: Stream,
    attempt: str,
) -> None:
    """Save a rank's part of a step; that of rank 0 commits, and comes last."""
    metadata = {"cursor": stream.cursors[start.step - stream.first - 1], "updates": start.step, "config": {"model": {}}}
    save(
        start.url,
        start.step,
        pieces,
        tensors=tensors,
        layout=layout_of(config),
        num_layers=config.model.num_layers,
        metadata=metadata,
        rank=rank,
        world_size=layout_of(config).world_size,
        attempt=attempt,
        awaits_commit=False,
    )
