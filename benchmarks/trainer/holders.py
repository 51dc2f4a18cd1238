"""A training step on a CPU whose parameters have many holders, against one whose have one: what the host does for each.

    python benchmarks/trainer/holders.py [--holders 512] [--pairs 15]

The other holders are stand-ins: collectives carry nothing, so both steps compute the same. Steps alternate in one
process, one thread, and the CPU seconds of each are compared.
"""

import argparse
import statistics
import time

import torch

from benchmarks.record import add_option
from threefold.cli import Parser, run
from trainer.config import Config, ModelConfig, ParallelConfig, TrainConfig
from trainer.config.resolve import resolve
from trainer.engine import Engine
from trainer.mesh.mesh import mesh_of
from trainer.model.microbatch import Batch
from trainer.run.stage_times import Nobody

NUM_LAYERS, HIDDEN, SEQ_LENGTH, NUM_MICROBATCHES, NUM_WARMUP = 8, 128, 128, 4, 3


def main() -> int:
    parser = Parser(prog="holders.py", description=__doc__.splitlines()[0])
    parser.add_argument("--holders", type=int, default=512, help="data-parallel ranks, all but one stand-ins")
    parser.add_argument("--pairs", type=int, default=15, help="steps of each")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Time pairs of steps."""
    torch.set_num_threads(1)
    engines = [engine_of(1), engine_of(arguments.holders)]
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(NUM_WARMUP + arguments.pairs):
        for engine, seconds in zip(engines, times, strict=True):
            began = time.process_time()
            engine.train_step(step, batch())
            seconds.append(time.process_time() - began)
    alone, many = (statistics.median(seconds[NUM_WARMUP:]) for seconds in times)
    ratio = statistics.median(b / a for a, b in zip(*(seconds[NUM_WARMUP:] for seconds in times), strict=True))
    print(f"1 holder {1e3 * alone:.1f} ms, {arguments.holders} holders {1e3 * many:.1f} ms, ratio of pairs {ratio:.3f}")
    claim = f"a step with {arguments.holders} holders"
    arguments.record.add(claim, 1e3 * many, "CPU ms", limit={"one holder": 1e3 * alone})
    return 0


def engine_of(num_holders: int) -> Engine:
    """Return a small model's engine on the first of so many data-parallel ranks; each updates all it holds."""
    config = Config(
        model=ModelConfig(num_layers=NUM_LAYERS, hidden_size=HIDDEN, num_heads=4, vocab_size=256),
        parallel=ParallelConfig(dp=num_holders, zero_stage=0),
        train=TrainConfig(
            train_steps=1000, seq_length=SEQ_LENGTH, micro_batch_size=1, precision="fp32", device="cpu",
            global_batch_size=NUM_MICROBATCHES * num_holders,
        ),
    )  # fmt: skip
    mesh = mesh_of(resolve(config, num_holders), 0, torch.device("cpu"), network=Nobody(num_holders))
    engine = Engine(resolve(config, num_holders), mesh)
    engine.initialise()
    return engine


def batch() -> Batch:
    """Return one rank's share of a step, random tokens."""
    shape = NUM_MICROBATCHES, 1, SEQ_LENGTH
    rows = torch.randint(256, (*shape[:2], SEQ_LENGTH + 1))
    positions = torch.arange(SEQ_LENGTH).expand(shape).contiguous()
    return Batch(rows[..., :-1].contiguous(), rows[..., 1:].contiguous(), positions, torch.ones(shape), 0)


if __name__ == "__main__":
    raise SystemExit(main())
