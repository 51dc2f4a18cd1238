"""A checkpoint of very many tensors: reshard, verify of the manifest alone, and the plan of a reshard for many ranks.

    python benchmarks/ckptkit/many_tensors.py [--tensors 60000] [--ranks 4096] [--repeats 3] [--module 20000]

Saves so many tensors of 1 KiB into a temporary folder, then runs both verbs as a user does, in fresh processes: medians
of seconds and CPU seconds, and peak RSS. The raw limit of reshard is `cp` and `sync -d` of the same bytes, that of
verify one json.loads of the root. The plan is that of 2,000 large tensors, cut by tp 8 and ZeRO over the other ranks.

With --module only `ckptkit.torch.Run` of a module of so many parameters of 4 KiB is measured, in this process: how long
its first and its second save hold the program, and until they are durable, beside torch.save with a sync of the file
and its folder; Run.load beside safetensors' load_file and load_state_dict; a Run that saves one tensor and is closed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckptkit
from benchmarks.record import Record, add_option
from ckptkit import Box, Cut, ParallelLayout, Partition, Piece, Placement, TensorInfo, plan_files

SIZE, PER_LAYER, KINDS = 16, 10, ("master", "exp_avg", "exp_avg_sq")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=60_000, help="a multiple of 3")
    parser.add_argument("--ranks", type=int, default=4096, help="a multiple of 8, for the plan")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--module", type=int, default=0, help="parameters of a module that a Run saves, and nothing else"
    )
    add_option(parser)
    arguments = parser.parse_args()
    if arguments.module:
        measure_module(arguments.module, arguments.repeats, arguments.record)
        return
    with tempfile.TemporaryDirectory(prefix="many-tensors-") as folder:
        run = Path(folder) / "run"
        save(run, arguments.tensors)
        verbs = {
            "reshard": lambda: verb("reshard", run, Path(folder) / f"out-{time.monotonic_ns()}", "--tp=4", "--dp=2"),
            "cp, sync -d": lambda: copy(run, Path(folder) / f"copy-{time.monotonic_ns()}"),
            "verify --manifest": lambda: verb("verify", run, "--manifest"),
            "json.loads(root)": lambda: parse(run),
        }
        print(f"{arguments.tensors:,} tensors of {SIZE * SIZE * 4:,} bytes")
        found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in verbs}
        for _ in range(arguments.repeats):
            for name, work in verbs.items():
                found[name].append(work())
        claim, times = f"of {arguments.tensors:,} tensors", {}
        for name, runs in found.items():
            seconds, cpu_s, rss = (statistics.median(column) for column in zip(*runs, strict=True))
            times[name] = seconds
            print(
                f"  {name:<18} {seconds:7.2f} s {cpu_s:7.2f} CPU s" + (f"  peak RSS {rss / 2**20:5.0f} MiB" * (rss > 0))
            )
        for name, limit in (("reshard", "cp, sync -d"), ("verify --manifest", "json.loads(root)")):
            arguments.record.add(f"`ckptkit {name}` {claim}", times[name], "s", limit={limit: times[limit]})
    seconds, cpu_s, num_files = plan(arguments.ranks)
    print(f"plan of a reshard to {arguments.ranks:,} ranks, {num_files:,} files of 2,000 tensors")
    print(f"  {'plan':<18} {seconds:7.2f} s {cpu_s:7.2f} CPU s  peak RSS {peak_rss() / 2**20:5.0f} MiB")


def save(run: Path, num_tensors: int) -> None:
    infos = [
        TensorInfo(f"optim.{kind}/layers.{n // PER_LAYER}.block{n % PER_LAYER}.weight", "F32", (SIZE, SIZE),
                   Placement(n // PER_LAYER, (Cut(0),)))
        for n in range(num_tensors // len(KINDS)) for kind in KINDS
    ]  # fmt: skip
    data = np.zeros(SIZE * SIZE, np.float32)
    pieces = [Piece.whole(info.name, Box((0, 0), info.shape), data) for info in infos]
    num_layers = num_tensors // len(KINDS) // PER_LAYER + 1
    ckptkit.save(str(run), 1, pieces, tensors=infos, layout=ParallelLayout(), num_layers=num_layers, metadata={})


def verb(*words: object) -> tuple[float, float, int]:
    """Seconds, CPU seconds and peak RSS of a verb in a process of its own."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "ckptkit", *map(str, words)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"ckptkit {' '.join(map(str, words))} failed")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10


def copy(run: Path, target: Path) -> tuple[float, float, int]:
    started = time.perf_counter()
    subprocess.run(["cp", "-r", run, target], check=True)
    subprocess.run(["sync", "-d", *target.rglob("*.safetensors")], check=True)
    return time.perf_counter() - started, 0.0, 0


def parse(run: Path) -> tuple[float, float, int]:
    [root] = run.rglob("root.json")
    started, cpu_started = time.perf_counter(), time.process_time()
    json.loads(root.read_bytes())
    return time.perf_counter() - started, time.process_time() - cpu_started, 0


def plan(num_ranks: int) -> tuple[float, float, int]:
    """Seconds, CPU seconds and the number of files."""
    infos = [
        TensorInfo(f"optim.{KINDS[n % 3]}/layers.{n // 9}.block{n % 9 // 3}.weight", "F32", (8192, 8192),
                   Placement(n // 9, (Cut(n % 2),)))
        for n in range(2000)
    ]  # fmt: skip
    layout = ParallelLayout(tp=8, dp=num_ranks // 8)
    started, cpu_started, num_files = time.perf_counter(), time.process_time(), 0
    partition = Partition(infos, 2000 // 9 + 1, layout)
    for rank in range(num_ranks):
        chunks = partition.table(layout.coords(rank))
        num_files += len(plan_files(chunks, np.arange(len(chunks))).files)
    return time.perf_counter() - started, time.process_time() - cpu_started, num_files


def measure_module(num_parameters: int, repeats: int, record: Record) -> None:
    """Print medians of a Run and its peers, interleaved, and the ratios that count."""
    import torch
    from safetensors.torch import load_file, save_file

    from ckptkit.torch import Run

    torch.set_num_threads(1)
    model = torch.nn.Module()
    for number in range(num_parameters):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.randn(32, 32)))
    times: dict[str, list[tuple[float, float]]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        started, cpu_started = time.perf_counter(), time.process_time()
        work()
        seconds = time.perf_counter() - started, time.process_time() - cpu_started
        times.setdefault(name, []).append(seconds)

    with tempfile.TemporaryDirectory(prefix="many-tensors-") as folder:
        for repeat in range(repeats):
            place = Path(folder) / str(repeat)
            place.mkdir()
            timed("torch.save, sync", lambda place=place: torch_save(model, place / "torch.pt"))
            run = Run(place / "run")
            timed("Run.save, the first", lambda run=run: run.save(1, {"model": model}))
            timed("  until it is durable", run.wait)
            timed("Run.save, the second", lambda run=run: run.save(2, {"model": model}))
            timed("  until it is durable", run.wait)
            run.close()
            save_file(model.state_dict(), place / "model.safetensors")
            timed("load_file", lambda place=place: load_file(place / "model.safetensors"))
            timed(
                "load_file, load_state_dict",
                lambda place=place: model.load_state_dict(load_file(place / "model.safetensors")),
            )
            with Run(place / "run") as run:
                timed("Run.load", lambda run=run: run.load({"model": model}))
            timed("Run of one tensor", lambda place=place: save_one(Run(place / "small")))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    print(f"a module of {num_parameters:,} parameters of 4 KiB, {repeats} repeats")
    for name, (seconds, cpu_s) in medians.items():
        print(f"  {name:<28} {seconds:7.2f} s {cpu_s:7.2f} CPU s")
    for name, peer in (
        ("Run.save, the first", "torch.save, sync"), ("Run.save, the second", "torch.save, sync"),
        ("Run.load", "load_file, load_state_dict"), ("Run.load", "load_file"),
    ):  # fmt: skip
        ratios = [a / b for a, b in zip(medians[name], medians[peer], strict=True)]
        print(f"  {name} / {peer}: {ratios[0]:.2f} of the time, {ratios[1]:.2f} of the CPU time")
    for verb, name, peer in (
        ("first save", "Run.save, the first", "torch.save, sync"),
        ("second save", "Run.save, the second", "torch.save, sync"),
        ("load", "Run.load", "load_file, load_state_dict"),
    ):
        claim = f"a {verb} of {num_parameters:,} tensors by `ckptkit.torch.Run`"
        record.add(claim, medians[name][0], "s", peer={peer: medians[peer][0]})


def torch_save(model: Any, path: Path) -> None:
    """Save as torch does, durably."""
    import torch

    with path.open("wb") as file:
        torch.save(model.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def save_one(run: Any) -> None:
    """Open a run, save one tensor, and close it."""
    import torch

    with run:
        run.save(1, {"x": torch.zeros(1)})


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    main()
