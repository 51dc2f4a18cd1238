"""A trainer of one rank for the tests: saves steps of a table's values and does to itself what the test asks for.

    python -m tests.ckptkit.support.rank_program URL [--rank R --layout tp2-dp2] [--steps 1,2]
        [--then kill|fork-kill|hold|exit] [--tier URL,every=2] [--nodes 2] [--window-blocks N] [--keep-last N]

Prints `writer PID`, then a JSON report a save (unless it is killed first); with `--then hold` `told` once its writer
knows of the save, and then nothing.
"""

import argparse
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable

from ckptkit.handoff.block_layout import BLOCK_BYTES
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.retention import Retention
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.saving.staging import Staging
from ckptkit.tiers.tier import nodes_of, parse_tiers
from tests.ckptkit.support.model_tables import gpt_tensors
from tests.ckptkit.support.saves import save_one


def die_within(_staging: Staging, room: Callable[[], int]) -> None:
    """Instead of staging a save: hand two blocks over, and die when the writer has taken one of them."""
    _staging._arena.signals.staged.add(2)
    room()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--layout", default="tp1")
    parser.add_argument("--steps", default="1")
    parser.add_argument("--dtype", default="F32")
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--kv", type=int, default=8)
    parser.add_argument("--attempt", default="program")
    parser.add_argument("--tier", action="append", default=[], help="a slower tier")
    parser.add_argument("--nodes", type=int, default=0, help="how many nodes the ranks are on, n0, n1, ...")
    parser.add_argument("--then", default="exit", choices=["exit", "kill", "fork-kill", "kill-within", "hold"])
    parser.add_argument("--keep-last", type=int, default=0, help="in the first tier")
    parser.add_argument("--window-blocks", type=int, default=0)
    arguments = parser.parse_args()
    layout = ParallelLayout.parse(arguments.layout)
    tensors = gpt_tensors(dtype=arguments.dtype, hidden=arguments.hidden, kv=arguments.kv)
    tiers = parse_tiers([arguments.url, *arguments.tier])
    if arguments.nodes:
        on_node = layout.world_size // arguments.nodes
        starts = [rank // on_node * on_node for rank in range(layout.world_size)]
        nodes = nodes_of([f"n{start // on_node}" for start in starts], starts)
        tiers = dataclasses.replace(tiers, node=nodes[arguments.rank])
    checkpointer = Checkpointer(
        tiers.own_urls[0], rank=arguments.rank, world_size=layout.world_size, attempt=arguments.attempt,
        options=CheckpointerOptions(
            deadline_s=20.0, window_bytes=arguments.window_blocks * BLOCK_BYTES, tiers=tiers.destinations,
            node=tiers.node, retention=Retention(keep_last=arguments.keep_last),
        ),
    )  # fmt: skip
    if arguments.then == "kill-within":
        Staging.run = die_within  # type: ignore[method-assign]
    print("writer", checkpointer.writer_pid, flush=True)
    for step in map(int, arguments.steps.split(",")):
        save_one(checkpointer, step, tensors, layout, arguments.rank, scale=step)
        if arguments.then == "fork-kill" and os.fork() == 0:
            time.sleep(30)  # holds the pipe to the writer open
            os._exit(0)
        if arguments.then == "hold":
            print("told", flush=True)
            time.sleep(60)
        if arguments.then != "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        for report in checkpointer.wait():
            print(json.dumps(dataclasses.asdict(report)), flush=True)
    for report in checkpointer.close():
        print(json.dumps(dataclasses.asdict(report)), flush=True)


if __name__ == "__main__":
    main()
