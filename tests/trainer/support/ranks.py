"""run_ranks: a function on several processes that talk to each other, with a timeout and every rank's traceback."""

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")  # forked from a server that has torch already, and no threads
_CONTEXT.set_forkserver_preload(["torch", "trainer.engine"])


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120, backend: str = "gloo"
) -> list[Any]:
    """Call function(rank, *arguments) on every rank, one thread each; return the results in order of rank.

    With `backend` "nccl" each rank has a GPU of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = _CONTEXT.Queue()
        processes = [
            _CONTEXT.Process(
                target=_run, args=(results, Path(folder), rank, num_ranks, timeout_s, backend, function, arguments)
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(results: Any, processes: list[Any], deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    faults: dict[int, str] = {}
    while len(values) + len(faults) < len(processes):
        try:
            # after a first fault the others hang in a collective: give them a moment to tell theirs
            rank, value, fault = results.get(timeout=2 if faults else max(deadline - time.monotonic(), 0.1))
        except queue.Empty:
            break
        if fault is None:
            values[rank] = value
        else:
            faults[rank] = fault
    if len(values) == len(processes):
        return [values[rank] for rank in range(len(processes))]
    told = [f"rank {rank}:\n{fault}" for rank, fault in sorted(faults.items())]
    silent = [rank for rank in range(len(processes)) if rank not in values and rank not in faults]
    raise AssertionError("\n".join([*told, f"ranks without an answer: {silent}"]))


def _run(
    results: Any,
    folder: Path,
    rank: int,
    num_ranks: int,
    timeout_s: float,
    backend: str,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        if num_ranks > 1:
            store = dist.FileStore(str(folder / "store"), num_ranks)
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        results.put((rank, function(rank, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
