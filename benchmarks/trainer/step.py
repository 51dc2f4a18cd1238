"""One training step of the 1b model on one GPU: tokens/s, and where the time of its kernels goes.

    python benchmarks/trainer/step.py [--micro-batch-size 8] [--global-batch-size 8] [--steps 12]

Tokens are random, the state is drawn, nothing is read or saved. The step is the median after four; then one step is
profiled, and its kernels are added by kind. For a peer, run it on the same GPU before and after.
"""

import argparse
import re
import statistics
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch

from threefold.cli import Parser, run
from trainer.config.walk import config_from, read_toml
from trainer.engine import Engine
from trainer.mesh.mesh import mesh_of
from trainer.model.microbatch import Batch

HERE = Path(__file__).parent
WARMUP_STEPS = 4
KINDS = {  # the first whose pattern is in a kernel's name
    "attention": r"cudnn|flash|fmha",
    "matrix products": r"nvjet|gemm|cutlass",
    "RoPE": r"rope",
    "cross-entropy": r"op_logits|SoftMax",
    "norms": r"::(backward|forward)(_long)?<|add_partials|layer_norm",
    "AdamW": r"adamw|sum_squares|multi_tensor",
    "sums": r"reduce_kernel",
    "SwiGLU, GELU": r"activation_",
    "other elementwise": r"elementwise",
}


def main() -> int:
    parser = Parser(prog="step.py", description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples of 4096 tokens a pass")
    parser.add_argument("--global-batch-size", type=int, default=8, help="samples a step")
    parser.add_argument("--steps", type=int, default=12, help="steps timed, the first four left out")
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Time steps, then profile one."""
    engine, batch = engine_and_batch("1b", arguments.micro_batch_size, arguments.global_batch_size)
    median = statistics.median(seconds(engine, batch, arguments.steps)[WARMUP_STEPS:])
    peak = torch.cuda.max_memory_allocated() / 2**30
    name, attention, shape = torch.cuda.get_device_name(), engine.choices.names["attention"], batch.tokens.shape
    print(f"{name}, attention {attention}: {shape[0]} micro-batches of {shape[1]} x {shape[2]} tokens:")
    print(f"{1e3 * median:.1f} ms, {shape.numel() / median:,.0f} tok/s, {peak:.1f} GiB")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.train_step(arguments.steps + 1, batch)
        torch.cuda.synchronize()
    print_kinds(profile)
    return 0


def engine_and_batch(model: str, micro_batch_size: int, global_batch_size: int) -> tuple[Engine, Batch]:
    """Return a model of this folder with drawn state on the first GPU, and random tokens for a step."""
    tables = read_toml(str(HERE / f"{model}.toml"))
    sizes = {"micro_batch_size": micro_batch_size, "global_batch_size": global_batch_size}
    config = config_from(tables | {"train": tables["train"] | sizes}, source=model)
    device = torch.device("cuda", 0)
    engine = Engine(config, mesh_of(config, 0, device))
    engine.initialise()
    engine.choose_ops({}, by_timing=True)
    shape = config.train.gradient_accumulation_steps, config.train.micro_batch_size, config.train.seq_length
    rows = torch.randint(config.model.vocab_size, (*shape[:2], shape[2] + 1), device=device)
    positions = torch.arange(shape[2], device=device).expand(shape).contiguous()
    mask = torch.ones(shape, device=device)
    return engine, Batch(rows[..., :-1].contiguous(), rows[..., 1:].contiguous(), positions, mask, 0)


def seconds(engine: Engine, batch: Batch, num_steps: int) -> list[float]:
    """Return the seconds between the ends of so many steps and one more."""
    ends, running = [], engine.start_step(0, batch)
    for step in range(1, num_steps + 1):  # as the training loop reads them: while the next one runs
        following = engine.start_step(step, batch)
        running.read()
        ends.append(time.perf_counter())
        running = following
    running.read()
    return [end - begin for begin, end in pairwise(ends)]


def print_kinds(profile: torch.profiler.profile) -> None:
    """Print the time and number of the kernels of each kind."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.name)), "other")
            found[kind].append(event.device_time / 1e3)
    print(f"{'kernels':<20} {sum(map(sum, found.values())):>8.1f} ms")
    for kind, times in sorted(found.items(), key=lambda each: -sum(each[1])):
        print(f"{kind:<20} {sum(times):>8.1f} ms {len(times):>6}")


if __name__ == "__main__":
    raise SystemExit(main())
