"""What the host does in a training step: how long it enqueues beside what the GPU computes, and in which functions.

    torchrun --standalone --nproc-per-node 2 benchmarks/trainer/host.py --tp 2 --micro-batch-size 2
        --global-batch-size 32 [--threads 1 4 8] [--clock on off] [--functions FILE]

Every flag of `trainer train` that says what a step is may be added; tokens are random, as in step.py. "step" is the
median of a step, "enqueue" that of the host's share: until `start_step` returns, with a GPU that is idle at its begin.
For each number of threads of torch and with the clock of waits on or off there is one line. Then one step is profiled:
what of the GPU's time has no kernel, what only transfers, and the calls of CUDA by name. `--functions` writes
microseconds by function of Python, of a step whose backward passes run on the thread of the forward ones.
"""

import argparse
import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from step import configured, engine_and_batch

from benchmarks.record import add_option
from threefold.cli import Parser, run
from threefold.flags import add_settings, settings_of
from trainer.commands.shared import world_size
from trainer.config import Config
from trainer.engine import Engine
from trainer.mesh import clock
from trainer.model.microbatch import Batch
from trainer.observe.kernels import idle_ms, kernels_of, kind_of, table
from trainer.run.environment import ranks_of
from trainer.run.stage_times import step_times

WARMUP_STEPS, SHOWN = 3, 40


def main() -> int:
    parser = Parser(prog="host.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="1b", help="a model of this folder, or a configuration file")
    parser.add_argument("--steps", type=int, default=6, help="steps timed in each way")
    parser.add_argument("--threads", type=int, nargs="+", default=[0], help="threads of torch; 0 leaves them")
    parser.add_argument("--clock", nargs="+", choices=("on", "off"), default=["on"], help="the clock of waits")
    parser.add_argument("--functions", type=Path, metavar="FILE", help="write microseconds by function there")
    add_option(parser)
    add_settings(parser, Config, is_shown=False)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Time the host in each way, then profile one step."""
    config = configured(arguments.model, settings_of(arguments), world_size())
    with ranks_of(config) as ranks:
        engine, batch = engine_and_batch(config, ranks)
        step_times(engine, batch, WARMUP_STEPS)
        for threads in arguments.threads:
            if threads:
                torch.set_num_threads(threads)
            for way in arguments.clock:
                with moments(is_on=way == "on"):
                    step = statistics.median(step_times(engine, batch, arguments.steps))
                    enqueue = statistics.median(enqueues(engine, batch, arguments.steps))
                if ranks.rank == 0:
                    print(f"{torch.get_num_threads()} threads, clock {way}: step {1e3 * step:.1f} ms, ", end="")
                    print(f"enqueue {1e3 * enqueue:.1f} ms, {enqueue / step:.2f} of it")
                    claim = f"enqueue of a step of {arguments.model}, {torch.get_num_threads()} threads, clock {way}"
                    arguments.record.add(claim, 1e3 * enqueue, "ms")
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities[: 1 + (ranks.device.type == "cuda")]) as profile:
            engine.train_step(arguments.steps + 1, batch)
        text = functions(engine, batch, arguments.steps + 2)
        if ranks.rank == 0:
            print("\n".join(kernel_lines(profile)))
            print(
                profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=SHOWN, max_name_column_width=48)
            )
            if arguments.functions:
                arguments.functions.write_text(text)
    return 0


def enqueues(engine: Engine, batch: Batch, num_steps: int) -> list[float]:
    """Return the seconds until each of so many steps was enqueued."""
    spent = []
    for step in range(num_steps):
        if batch.tokens.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        running = engine.start_step(step, batch)
        spent.append(time.perf_counter() - begin)
        running.read()
    return spent


@contextmanager
def moments(*, is_on: bool) -> Iterator[None]:
    """Let the clock of waits mark no moment of the GPU's, unless it is on."""
    init = clock.Moment.__init__
    if not is_on:
        clock.Moment.__init__ = lambda self, device: init(self, torch.device("cpu"))  # type: ignore[method-assign]
    try:
        yield
    finally:
        clock.Moment.__init__ = init  # type: ignore[method-assign]


def kernel_lines(profile: torch.profiler.profile) -> list[str]:
    """Return kernels by kind, and for how long there was none, or transfers alone."""
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    computing = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if kind_of(event.name, on_gpu=True) != "transfers" and not getattr(event, "is_user_annotation", False)
    ]
    _kernels, spans = kernels_of(profile)
    lines = table(profile)
    if spans:
        alone = idle_ms(computing) - idle_ms(spans)
        lines.append(f"{'transfers alone':<20} {alone:>9.1f} ms")
    return lines


def functions(engine: Engine, batch: Batch, step: int) -> str:
    """Return the functions of Python in a step, the longest first, by themselves."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        engine.train_step(step, batch)
        profile.enable()
        engine.start_step(step + 1, batch).read()
        profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(2 * SHOWN)
    return text.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
