"""How fast a launch-bound loop runs beside a save, as a fraction of its rate alone in the same run.

    python benchmarks/ckptkit/loop_rate.py [--mib 512] [--repeats 15] [--alone-s 0.5] [--cores N] [--url DIR]

The loop is many tiny torch operations on one thread. It runs beside a save of ours and of
`torch.distributed.checkpoint.async_save` with a thread and with a process, in turns, and alone right before and after
each, as a shared machine's clock and caches change from second to second. What counts is the rate from the moment a
save returned until it is durable: the copy before that is `save_stall.py`'s. --cores bounds the processors of all that
runs.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.record import add_option
from ckptkit import Box, Checkpointer, ParallelLayout, Piece, Placement, TensorInfo

NUM_TENSORS = 64
SLICE_OPS = 2000  # about 5 ms: a step, after which a training loop asks how the save is

IsDone = Callable[[], bool]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--alone-s", type=float, default=0.5, help="how long the loop runs alone before and after")
    parser.add_argument("--cores", type=int, help="processors to run on; all if left out")
    parser.add_argument("--url", help="folder to save to; a temporary one if left out")
    add_option(parser)
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="loop-rate-", dir=arguments.url))
    numel = (arguments.mib << 20) // 4 // NUM_TENSORS
    state = {f"layers.{n}.weight": torch.rand(numel) for n in range(NUM_TENSORS)}
    rates: dict[str, list[float]] = {}
    with own_saves(folder / "ckptkit", state) as save, process_group():
        savers = {"ckptkit": save}
        for kind in AsyncCheckpointerType:
            name = f"dcp {kind.value}"
            savers[name] = dcp_saver(folder / name, state, kind)
        for number in range(arguments.repeats + 1):  # the first is for warming up
            for name, start in savers.items():
                before, _ = rate_until(time_is_up(arguments.alone_s))
                beside, seconds = rate_until(start(number))
                after, _ = rate_until(time_is_up(arguments.alone_s))
                shutil.rmtree(folder / name)
                if number:
                    alone = statistics.mean([before, after])
                    rates.setdefault(name, []).append(beside / alone)
                    print(f"{name}: {beside / alone:.3f} of {alone:,.0f} ops/s, for {seconds:.2f} s", flush=True)
    for name, found in rates.items():
        print(f"{name}: median {statistics.median(found):.3f} of its rate alone (lowest {min(found):.3f})")
    shares = {name: 100 * statistics.median(found) for name, found in rates.items()}
    claim = "a launch-bound loop beside a save, until it is durable"
    arguments.record.add(claim, shares.pop("ckptkit"), "% of its rate alone", peer=shares)
    shutil.rmtree(folder)


def time_is_up(seconds: float) -> IsDone:
    """Return whether so many seconds have passed since this was called."""
    deadline = time.perf_counter() + seconds
    return lambda: time.perf_counter() > deadline


def rate_until(is_done: IsDone) -> tuple[float, float]:
    """Operations a second until something is done, and for how long that was."""
    num_ops, started = 0, time.perf_counter()
    x = torch.zeros(16)
    while not is_done():
        for _ in range(SLICE_OPS):
            x.add_(1.0)
        num_ops += SLICE_OPS
    seconds = time.perf_counter() - started
    return num_ops / seconds, seconds


@contextmanager
def own_saves(folder: Path, state: dict[str, torch.Tensor]) -> Iterator[Callable[[int], IsDone]]:
    """Starts a save of ours; gives what tells whether it is durable."""
    tensors = [TensorInfo(name, "F32", tuple(data.shape), Placement(n)) for n, (name, data) in enumerate(state.items())]
    pieces = [Piece.whole(t.name, Box((0,), t.shape), state[t.name]) for t in tensors]
    layout = ParallelLayout()
    with Checkpointer(str(folder), attempt="bench") as checkpointer:
        checkpointer.prepare(pieces, tensors)

        def start(number: int) -> IsDone:
            checkpointer.wait()
            checkpointer.save(number, pieces, tensors=tensors, layout=layout, num_layers=NUM_TENSORS, metadata={})

            def is_done() -> bool:
                reports = checkpointer.poll()
                assert all(report.ok for report in reports), reports
                return bool(reports)

            return is_done

        yield start


@contextmanager
def process_group() -> Iterator[None]:
    """A process group of this process alone, which the peer's process mode wants."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def dcp_saver(folder: Path, state: dict[str, torch.Tensor], kind: AsyncCheckpointerType) -> Callable[[int], IsDone]:
    """Starts `async_save`; gives what tells whether it is done."""

    def start(number: int) -> IsDone:
        path = folder / str(number)
        future: Any = dcp.async_save(
            dict(state), storage_writer=dcp.FileSystemWriter(path), async_checkpointer_type=kind
        )

        def is_done() -> bool:
            if not future.done():
                return False
            future.result()
            return True

        return is_done

    return start


if __name__ == "__main__":
    main()
