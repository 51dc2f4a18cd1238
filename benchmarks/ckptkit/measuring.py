"""Shared by these benchmarks: a GPT's training state, interleaved timing with CPU seconds, and cold page caches."""

import argparse
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import Record, add_option
from ckptkit import Box, Cut, Piece, Placement, TensorInfo

KINDS = ("master", "exp_avg", "exp_avg_sq")
RAW_BLOCK_BYTES = 16 << 20


@dataclass
class Timing:
    """Seconds and CPU seconds of each repeat of one way to do it."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class State:
    """fp32 master weights and Adam moments of a GPT as pieces of one rank."""

    tensors: list[TensorInfo]
    pieces: list[Piece]
    num_layers: int

    @property
    def num_bytes(self) -> int:
        return sum(info.size_bytes for info in self.tensors)

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        return {piece.name: piece.data for piece in self.pieces}


def parse_arguments(description: str, **more: dict[str, Any]) -> argparse.Namespace:
    """Return the arguments of a benchmark of a state on a local disk; `more` are flags besides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of the disk to measure; a temporary one is made there")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    for name, options in more.items():
        parser.add_argument(f"--{name}", **options)
    add_option(parser)
    return parser.parse_args()


def gpt_state(*, hidden: int, num_layers: int, vocab: int = 32768, device: str = "cpu", fill: bool = True) -> State:
    """Return a state of about 12 * (12 * hidden^2 * num_layers + 2 * vocab * hidden) bytes, random or zero."""
    shapes: list[tuple[str, tuple[int, ...], Placement]] = [
        ("embed.weight", (vocab, hidden), Placement("first", (Cut(0),)))
    ]
    for layer in range(num_layers):
        cuts = {
            "attn.q": (hidden, hidden),
            "attn.k": (hidden, hidden),
            "attn.v": (hidden, hidden),
            "attn.out": (hidden, hidden),
            "mlp.up": (4 * hidden, hidden),
            "mlp.down": (hidden, 4 * hidden),
        }
        for name, shape in cuts.items():
            shapes.append((f"layers.{layer}.{name}.weight", shape, Placement(layer, (Cut(0),))))
            shapes.append((f"layers.{layer}.{name}.bias", shape[:1], Placement(layer)))
    shapes.append(("head.weight", (vocab, hidden), Placement("last", (Cut(0),))))
    tensors = [
        TensorInfo(f"optim.{kind}/{name}", "F32", shape, place) for kind in KINDS for name, shape, place in shapes
    ]
    make = torch.rand if fill else torch.zeros
    pieces = [
        Piece.whole(info.name, Box((0,) * len(info.shape), info.shape), make(info.numel, device=device))
        for info in tensors
    ]
    return State(tensors, pieces, num_layers)


def interleaved(ways: dict[str, Callable[[], object]], repeats: int, before: Callable[[], object]) -> dict[str, Timing]:
    """Run each way `repeats` times in turn; `before` runs, not timed, ahead of each.

    Every second turn goes backwards, so that none is always behind one that warmed what lies below the page cache.
    """
    timings = {name: Timing() for name in ways}
    for turn in range(repeats):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            before()
            cpu, started = cpu_seconds(), time.perf_counter()
            ways[name]()
            timings[name].seconds.append(time.perf_counter() - started)
            timings[name].cpu_s.append(cpu_seconds() - cpu)
    return timings


def show(timings: dict[str, Timing], num_bytes: int) -> None:
    """One line a way: rate, ratio to the first (the raw limit), CPU seconds a GB, spread."""
    base = next(iter(timings.values())).median_s
    for name, timing in timings.items():
        rate, cpu = num_bytes / timing.median_s / 1e9, statistics.median(timing.cpu_s) / num_bytes * 1e9
        low, high = (num_bytes / edge / 1e9 for edge in (max(timing.seconds), min(timing.seconds)))
        print(
            f"{name:<22} {rate:6.2f} GB/s ({low:.2f} to {high:.2f})  {base / timing.median_s:5.2f} of raw  "
            f"{cpu:.2f} CPU-s/GB",
            flush=True,
        )


def add_claim(record: Record, claim: str, way: str, timings: dict[str, Timing], num_bytes: int) -> None:
    """Record the rate of one way beside those of the others, the first of which is the raw limit."""
    rates = {name: num_bytes / timing.median_s / 1e9 for name, timing in timings.items()}
    raw, value = next(iter(rates)), rates.pop(way)
    record.add(claim, value, "GB/s", limit={raw: rates.pop(raw)}, peer=rates)


def cpu_seconds() -> float:
    """CPU time of this process and of its children that ended."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def drop_caches(folder: Path) -> None:
    """Take every file below a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read tensors, as a training step does."""
    for tensor in tensors:
        tensor.sum().item()


def sync(*paths: Path) -> None:
    """Make files durable, where a peer leaves that to its user."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def dd(source: Path, target: Path, num_bytes: int, *flags: str, streams: int) -> None:
    """The raw limit: O_DIRECT in large blocks and without checksums, several streams side by side."""
    blocks = -(-num_bytes // RAW_BLOCK_BYTES)
    share = -(-blocks // streams)
    is_read = target == Path("/dev/null")
    processes = []
    for first in range(0, blocks, share):
        places = [f"skip={first}"] if is_read else [f"skip={first}", f"seek={first}", "conv=notrunc,fsync"]
        words = [
            f"if={source}",
            f"of={target}",
            f"bs={RAW_BLOCK_BYTES}",
            f"count={share}",
            "status=none",
            *places,
            *flags,
        ]
        processes.append(subprocess.Popen(["dd", *words]))
    for process in processes:
        assert process.wait() == 0, "dd failed"


def files_below(folder: Path) -> Iterable[Path]:
    """Return the files of a folder."""
    return (path for path in folder.rglob("*") if path.is_file())
