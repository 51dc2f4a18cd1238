"""A trainer of one rank for the tests: saves steps of a table's values and does to itself what the test asks for.

    python -m tests.ckptkit.rank_program URL [--rank R --layout tp2-dp2] [--steps 1,2] [--then kill|fork-kill|exit]
        [--window-blocks N]

Prints `writer PID`, then a JSON report a save (unless it is killed first).
"""

import argparse
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable

from ckptkit.layout import ParallelLayout
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.saving.staging import Staging
from ckptkit.saving.stream import BLOCK_BYTES
from tests.ckptkit.model_tables import gpt_tensors
from tests.ckptkit.saves import save_one


def die_within(_staging: Staging, room: Callable[[], int]) -> None:
    """Instead of staging a save: hand two blocks over, and die when the writer has taken one of them."""
    _staging._arena.handover.staged.add(2)
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
    parser.add_argument("--then", default="exit", choices=["exit", "kill", "fork-kill", "kill-within"])
    parser.add_argument("--window-blocks", type=int, default=0)
    arguments = parser.parse_args()
    layout = ParallelLayout.parse(arguments.layout)
    tensors = gpt_tensors(dtype=arguments.dtype, hidden=arguments.hidden, kv=arguments.kv)
    checkpointer = Checkpointer(
        arguments.url, rank=arguments.rank, world_size=layout.world_size, attempt=arguments.attempt,
        options=CheckpointerOptions(deadline_s=20.0, window_bytes=arguments.window_blocks * BLOCK_BYTES),
    )  # fmt: skip
    if arguments.then == "kill-within":
        Staging.run = die_within  # type: ignore[method-assign]
    print("writer", checkpointer.writer_pid, flush=True)
    for step in map(int, arguments.steps.split(",")):
        save_one(checkpointer, step, tensors, layout, arguments.rank, scale=step)
        if arguments.then == "fork-kill" and os.fork() == 0:
            time.sleep(30)  # holds the pipe to the writer open
            os._exit(0)
        if arguments.then != "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        for report in checkpointer.wait():
            print(json.dumps(dataclasses.asdict(report)), flush=True)
    checkpointer.close()


if __name__ == "__main__":
    main()
