"""What sinks cost the thread that trains: the time of a step's line with the metrics file alone, and with four sinks.

    python benchmarks/trainer/sinks.py [--lines 2000] [--record FILE]

Sinks are processes that read their lines, or that SIGSTOP holds: then lines wait, and are lost once 1 MiB does. The
three are measured in turn, a line each, with a pause between two lines in which the threads of sinks have their turn.
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.record import add_option
from threefold.cli import Parser
from trainer.observe.feed import Feed, close_all
from trainer.observe.json_lines import JsonLines
from trainer.observe.metrics import Log, StepMetrics
from trainer.observe.sinks.sink import Opening

NUM_SINKS, PAUSE_S, STEP_S = 4, 0.002, 0.415  # the last is a step of 1b on one H200
WAITING_BYTES = 1 << 20


def line(step: int) -> StepMetrics:
    """Return a step's line, of which the values do not matter."""
    waits = ("data_wait_s", "comm_s", "comm_tp_s", "comm_cp_s", "comm_dp_s", "bubble_s")
    times = dict.fromkeys(("step_s", *waits), 0.1 + step / 1e6)
    rates = dict.fromkeys(("tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu"), 1e4 / 3)
    shares = dict.fromkeys(("mfu", "mfu_with_embeddings", "mfu_causal", "memory_of_plan"), 1 / 3)
    return StepMetrics(
        step=step,
        loss=2.5,
        grad_norm=1 / 3,
        lr=1e-3,
        tokens=step * 4096,
        loss_tokens=4096,
        **times,
        **rates,
        **shares,
        checkpoint_stall_s=0.0,
        memory_gib=2.5,
    )


def feeds(*, stopped: bool) -> list[Feed]:
    """Return sinks whose processes read what they are fed, or are stopped."""
    how = {"command": "true"}  # of an event that does not come
    group = [
        Feed("on-event", Opening("run", 0), how, lambda _: None, most_bytes=WAITING_BYTES) for _ in range(NUM_SINKS)
    ]
    time.sleep(1.0)
    for feed in group if stopped else ():
        os.kill(feed.pid, signal.SIGSTOP)
    return group


def main(arguments: argparse.Namespace) -> int:
    """Measure, print and record."""
    with tempfile.TemporaryDirectory() as folder:
        sinks = {"the file alone": [], "four sinks": feeds(stopped=False), "four that hang": feeds(stopped=True)}
        logs = {
            name: Log(
                JsonLines(str(Path(folder) / name), start_step=0, say=print), group, train_steps=10**9, interval=10**9
            )
            for name, group in sinks.items()
        }
        times = measured(logs, arguments.lines)
        lost = {name: sum(loss.lost for loss in close_all(group, 0.5)) for name, group in sinks.items()}
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        share = (seconds - medians["the file alone"]) / STEP_S
        print(f"{name}: {seconds * 1e6:,.0f} us a line, {share:.3%} of a step of {STEP_S:g} s more; {lost[name]} lost")
    more = {name: (seconds - medians["the file alone"]) * 1e6 for name, seconds in medians.items()}
    alone = medians["the file alone"] * 1e6
    arguments.record.add("a line for four sinks, beside the file's", more["four sinks"], "us", peer={"the file": alone})
    arguments.record.add(
        "a line for four sinks that hang, beside the file's", more["four that hang"], "us", peer={"the file": alone}
    )
    return 0


def measured(logs: dict[str, Log], num_lines: int) -> dict[str, list[float]]:
    """Return the seconds of each line, by how it is written."""
    times: dict[str, list[float]] = {name: [] for name in logs}
    for step in range(2, num_lines + 2):
        metrics = line(step)
        for name, log in logs.items():
            began_s = time.perf_counter()
            log.step(metrics)
            times[name].append(time.perf_counter() - began_s)
            time.sleep(PAUSE_S)
    return times


if __name__ == "__main__":
    parser = Parser(prog="python benchmarks/trainer/sinks.py", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=2000, metavar="N", help="lines of each")
    add_option(parser)
    raise SystemExit(main(parser.parse_args()))
