"""How long the passes of each stage take here: one rank of each pipeline rank at a time, on one device, alone.

Collectives carry nothing, so with tp > 1 the times are those of a rank's arithmetic. Memory is what one rank needs.
"""

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from ckptkit import Coords
from trainer.config import Config
from trainer.config.resolve import cuts_tokens, layout_of, longest_row
from trainer.engine import Engine
from trainer.linear.weight import make
from trainer.mesh.clock import Moment
from trainer.mesh.mesh import mesh_of
from trainer.model.microbatch import Batch, DropoutKey, MicroBatch
from trainer.ops.dtypes import wide_dtype

NUM_WARMUP, NUM_TIMED = 2, 5


class Nobody:
    """A network, and its transports, of which this rank alone is there: nothing is carried."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def connect(self, name: str, ranks: Sequence[int]) -> "Nobody":
        """Return what carries nothing."""
        return self

    def _carry(self, *_arguments: object, **_options: object) -> None: ...

    all_reduce = broadcast = reduce_scatter = all_gather = all_gather_coalesced = all_to_all = send = receive = _carry


def stage_times(config: Config, device: torch.device) -> dict[tuple[str, int], float]:
    """Return the median seconds of F, B and W of one micro-batch, by kind and stage.

    Without a W a backward pass takes those of both.
    """
    layout, found = layout_of(config), dict[tuple[str, int], float]()
    for pp in range(layout.pp):
        mesh = mesh_of(config, layout.rank(Coords(pp=pp)), device, network=Nobody(layout.world_size))
        engine = Engine(config, mesh)
        engine.initialise()
        engine.choose_ops({}, by_timing=not config.train.deterministic)
        batch = random_batch(engine)
        for stage in engine.chunks:
            runs = [time_passes(engine, stage, batch) for _ in range(NUM_WARMUP + NUM_TIMED)]
            for kind, times in zip(("F", "B", "W"), zip(*runs[NUM_WARMUP:], strict=True), strict=True):
                found[kind, stage] = statistics.median(times)
    return found


def step_times(engine: Engine, batch: Batch, num_steps: int) -> list[float]:
    """Return the seconds between the ends of so many steps and one more; each is read while the next one runs."""
    ends, running = [], engine.start_step(0, batch)
    for step in range(1, num_steps + 1):
        following = engine.start_step(step, batch)
        running.read()
        ends.append(time.perf_counter())
        running = following
    running.read()
    return [end - begin for begin, end in pairwise(ends)]


def random_batch(engine: Engine) -> MicroBatch:
    """Return this rank's part of a micro-batch of random tokens, all of which count, in rows as long as the longest."""
    model, train, device = engine.config.model, engine.config.train, engine.mesh.device
    seq_length = longest_row(engine.config)
    num_tokens = train.micro_batch_size * seq_length
    tokens = torch.randint(model.vocab_size, (num_tokens,), device=device)
    positions = torch.arange(seq_length, device=device).repeat(train.micro_batch_size)
    ones = torch.ones(num_tokens, device=device)
    drops = model.dropout or model.attention_dropout
    key = DropoutKey(model.dropout, train.seed, 0, model.attention_dropout) if drops else None
    scale = torch.tensor(1 / num_tokens, dtype=wide_dtype(engine.dtype), device=device)
    whole = MicroBatch(tokens, tokens, positions, ones, seq_length, (range(num_tokens),), key, lambda: scale)
    return whole.part(engine.context.own_runs(whole.runs[0], seq_length))


def time_passes(engine: Engine, stage: int, batch: MicroBatch) -> list[float]:
    """Return the seconds of one F, one B and one W of a stage."""
    chunk, device = engine.chunks[stage], engine.mesh.device
    num_parts = engine.mesh.tp.size if cuts_tokens(engine.config) else 1
    shape_TD = len(batch.tokens_S) // num_parts, engine.config.model.hidden_size
    received = torch.randn(shape_TD, device=device, dtype=engine.dtype)
    engine.store.begin_step(0)
    moments = [Moment(device)]
    out = chunk.forward(received.requires_grad_() if stage else None, batch)
    if (weights_S := batch.weights_S) is not None and chunk.head is not None:
        out = (out * weights_S).sum()
    moments.append(Moment(device))
    with engine.store.wgrads.putting_off() as products:
        torch.autograd.backward(out, None if out.dim() == 0 else torch.ones_like(out))
    moments.append(Moment(device))
    make(products)
    moments.append(Moment(device))
    return [end.seconds_since(begin) for begin, end in pairwise(moments)]
