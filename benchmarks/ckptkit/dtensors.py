"""Durable save, stall and load of DTensors on two gloo processes by `ckptkit.torch.Run`, beside its peers.

    python benchmarks/ckptkit/dtensors.py /data --repeats 5

Each tensor is cut by rows, as FSDP2 does. A save counts until all is durable: peers' files are synced after it, and a
load is cold. The raw copy is one of a rank's bytes into memory that was touched before, and the stall of ckptkit is how
long `save` keeps the program; the raw save is `dd` of as many bytes past the page cache, two streams a rank. Prints
medians of the slower rank; torch_checkpointing is measured where it is installed.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from measuring import dd, drop_caches, files_below, parse_arguments, sync
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.record import Record
from ckptkit.torch import Run

WORLD_SIZE = 2


def main() -> None:
    arguments = parse_arguments(__doc__)
    with tempfile.TemporaryDirectory(prefix="dtensors-", dir=arguments.folder) as folder:
        mp.spawn(rank_main, (arguments, Path(folder)), nprocs=WORLD_SIZE)


def rank_main(rank: int, arguments: argparse.Namespace, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/group", rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    rows = 4 * arguments.hidden // WORLD_SIZE
    state = {
        f"layers.{layer}.{name}": DTensor.from_local(torch.rand(rows, arguments.hidden), mesh, [Shard(0)])
        for layer in range(arguments.layers)
        for name in ("weight", "exp_avg", "exp_avg_sq")
    }
    num_bytes = sum(each.numel() * each.element_size() for each in state.values())
    times: dict[str, list[float]] = {}
    with Run(str(work / "run")) as run:
        for turn in range(arguments.repeats + 1):  # the first warms up
            for name, way in ways(run, work, state, turn).items():
                if name.endswith("load") and rank == 0:
                    drop_caches(work)
                seconds = timed(way)
                if turn:
                    times.setdefault(name, []).append(seconds)
    if rank == 0:
        show(times, num_bytes, arguments.record)
    dist.destroy_process_group()


def ways(run: Run, work: Path, state: dict[str, DTensor], turn: int) -> dict[str, Callable[[], object]]:
    """Return each way to copy, save or load, in the order in which they are timed."""
    copies = [each.to_local().clone() for each in state.values()]
    place = work / f"dcp-{turn}"

    def copy() -> None:
        for target, each in zip(copies, state.values(), strict=True):
            target.copy_(each.to_local())

    def save_by_dcp() -> None:
        dcp.save(dict(state), checkpoint_id=place)
        if dist.get_rank() == 0:
            sync(*files_below(place), place)

    def save_raw() -> None:
        num_bytes = sum(each.numel() * each.element_size() for each in copies)
        dd(Path("/dev/zero"), work / f"raw-{dist.get_rank()}", num_bytes, "oflag=direct", streams=2)

    by_name: dict[str, Callable[[], object]] = {
        "raw copy": copy,
        "raw save": save_raw,
        "ckptkit stall": lambda: run.save(turn + 1, {"model": state}),
        "ckptkit rest of save": run.wait,
        "DCP save": save_by_dcp,
        "ckptkit load": lambda: run.load({"model": state}, turn + 1),
        "DCP load": lambda: dcp.load(dict(state), checkpoint_id=place),
    }
    if find_spec("torch_checkpointing") is not None:
        by_name |= by_torch_checkpointing(work / f"tc-{turn}", state)
    return by_name


def timed(way: Callable[[], object]) -> float:
    """Return the seconds until the slower rank is done."""
    dist.barrier()
    started = time.perf_counter()
    way()
    seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def by_torch_checkpointing(place: Path, state: dict[str, DTensor]) -> dict[str, Callable[[], object]]:
    """Return its synchronous save, with the files made durable, and its load."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()

    def save() -> None:
        manager.save(str(place), {"model": state})
        dist.barrier()
        if dist.get_rank() == 0:
            sync(*files_below(place), place)

    return {
        "torch_checkpointing save": save,
        "torch_checkpointing load": lambda: manager.load(str(place), into={"model": state}),
    }


def show(times: dict[str, list[float]], num_bytes: int, record: Record) -> None:
    """Print the medians of each way, and what they are of those of ckptkit; record the rates of save and load."""
    times["ckptkit save"] = [
        a + b for a, b in zip(times["ckptkit stall"], times.pop("ckptkit rest of save"), strict=True)
    ]
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        base = "raw copy" if name == "ckptkit stall" else f"ckptkit {name.split()[-1]}"
        ratio = f"  {seconds / medians[base]:5.2f} of {base}" if base in medians and base != name else ""
        print(f"{name:<26} {seconds:6.3f} s  {num_bytes / seconds / 1e9:6.2f} GB/s{ratio}")
    for kind in ("save", "load"):
        rates = {name: num_bytes / seconds / 1e9 for name, seconds in medians.items() if name.endswith(kind)}
        value, raw = rates.pop(f"ckptkit {kind}"), rates.pop(f"raw {kind}", None)
        limit = {} if raw is None else {f"raw {kind}": raw}
        record.add(f"a {kind} of DTensors on two processes", value, "GB/s", peer=rates, limit=limit)


if __name__ == "__main__":
    main()
