"""Reshard beside its raw limit, `cp` of the same bytes made durable by `sync -d`, and loads under another layout beside
torch.distributed.checkpoint (DCP) and, where it is installed, torch_checkpointing, all in the same run.

    python -m tools.make_checkpoint /data/run --gib 4
    python benchmarks/ckptkit/reshard.py /data/run --repeats 5 --pair-layouts tp1 tp2 tp8 pp2 tp2-pp2

Timed legs are interleaved, and the page cache of what is read is dropped before every one. Pairs: each rank of the
second layout reads its own elements of what the first one saved, each element by one rank: one rank after the other,
each for itself, or all together over an exchange. Bytes read are those that the system counts (`rchar`). Peers save and
load through their own files and plans. The raw limit of a load is to read all files as they are, past the page cache,
on 4 threads. Prints medians, ratios, peak RSS, and the load of the machine before it began.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from mmap import mmap
from pathlib import Path
from threading import Barrier, local
from typing import Any

import numpy as np
from peer_layouts import PEERS, rank_table

from benchmarks.record import Record, add_option
from ckptkit import ParallelLayout, Piece, Run, restore_from

LEGS = {"tp4-pp8": ("--tp", "4", "--pp", "8"), "tp1": (), "tp8-dp2-pp4": ("--tp", "8", "--pp", "4", "--dp", "2")}
RAW_BYTES = 8 << 20
PAIRS = ("tp1", "tp2", "tp4", "tp8", "pp2", "tp2-pp2", "tp4-pp2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a local run; its newest step is resharded")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pair-layouts", nargs="*", default=PAIRS, help="layouts of which each pair is read")
    parser.add_argument("--pairs-of", type=Path, help="a smaller run for the pairs; default: the run")
    add_option(parser)
    arguments = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f}")
    time_legs(arguments.run, arguments.repeats, arguments.record)
    with tempfile.TemporaryDirectory(prefix="pairs-", dir=arguments.run.absolute().parent) as folder:
        read_pairs(arguments.pairs_of or arguments.run, Path(folder), arguments.pair_layouts)


def time_legs(run: Path, repeats: int, record: Record) -> None:
    """Print how long offline reshards take beside cp."""
    seconds: dict[str, list[float]] = {name: [] for name in ("cp", *LEGS)}
    reports: dict[str, dict] = {}
    rss_bytes = dict.fromkeys(LEGS, 0)
    for _ in range(repeats):
        for name in seconds:
            drop_cache(run)
            with tempfile.TemporaryDirectory(prefix="reshard-", dir=run.absolute().parent) as folder:
                work = Path(folder) / "run"
                started = time.perf_counter()
                if name == "cp":
                    subprocess.run(["cp", "-r", run, work], check=True)
                    subprocess.run(["sync", "-d", *work.rglob("*.safetensors")], check=True)
                else:
                    reports[name], rss = reshard(run, work, LEGS[name])
                    rss_bytes[name] = max(rss_bytes[name], rss)
                seconds[name].append(time.perf_counter() - started)
    copied = statistics.median(seconds["cp"])
    num_bytes = max(report["bytes_written"] for report in reports.values())
    for name, times in seconds.items():
        median = statistics.median(times)
        line = f"{name:<12} {median:6.2f} s  {num_bytes / median / 1e9:5.2f} GB/s  {copied / median:5.2f} of cp"
        if name in reports:
            report = reports[name]
            share = report["bytes_read"] / report["bytes_needed"]
            line += f"  read / needed {share:.4f}  peak RSS {rss_bytes[name] >> 20} MiB"
            claim = f"a reshard of {num_bytes / 1e9:.2f} GB to {name}, every byte verified"
            peer, limit = {"`cp` and `sync`": num_bytes / copied / 1e9}, {"bytes read [of those needed]": share}
            record.add(claim, num_bytes / median / 1e9, "GB/s", peer=peer, limit=limit)
            record.add(f"{claim}: memory", rss_bytes[name] >> 20, "MiB")
        print(line)


def read_pairs(run: Path, folder: Path, names: Sequence[str]) -> None:
    """Print, for each ordered pair of layouts, the bytes read over those needed and the rate, of ours and of peers."""
    layouts = {name: ParallelLayout.parse(name) for name in names}
    loads: dict[str, Callable[[Path, Path, ParallelLayout], int]] = {
        "raw read": read_raw, "ours, a rank": load_ours, "ours, together": load_together,
        **{name: peer.load for name, peer in PEERS.items()},
    }  # fmt: skip
    kinds: dict[str, list[float]] = {kind: [] for kind in loads}
    rates: dict[str, list[float]] = {kind: [] for kind in loads}
    print(f"{'saved':<10} {'read by':<10}", *(f"{kind:>14}" for kind in loads), "  read / needed, GB/s")
    for name, layout in layouts.items():
        reshard(run, folder / name, tuple(f"--{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "dp")))
        with Run(str(folder / name)).open(Run(str(folder / name)).resolve()) as reader:
            for peer in PEERS:
                PEERS[peer].save(reader, layout, folder / f"{name}.{peer}")
    for first, second in product(layouts, repeat=2):
        if first == second:
            continue
        line = f"{first:<10} {second:<10}"
        for kind, load in loads.items():
            place = folder / (f"{first}.{kind}" if kind in PEERS else first)
            drop_cache(place)
            share, rate = measured(load, place, run, layouts[second])
            kinds[kind].append(share)
            rates[kind].append(rate)
            line += f" {share:7.3f} {rate:6.2f}"
        print(line)
    for kind, shares in kinds.items():
        most, usual, rate = max(shares), statistics.median(shares), statistics.median(rates[kind])
        of_raw = statistics.median(each / raw for each, raw in zip(rates[kind], rates["raw read"], strict=True))
        print(
            f"{kind}: {len(shares)} pairs, read / needed at most {most:.3f}, median {usual:.3f}, rate {rate:.2f} GB/s, "
            f"{of_raw:.2f} of raw"
        )


def measured(load: Callable[[Path, Path, ParallelLayout], int], *arguments: Any) -> tuple[float, float]:
    """Return the bytes that the system counts as read over those needed, and the GB/s."""
    before, started = bytes_read(), time.perf_counter()
    needed = load(*arguments)
    return (bytes_read() - before) / needed, needed / (time.perf_counter() - started) / 1e9


def bytes_read() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def read_raw(place: Path, run: Path, layout: ParallelLayout) -> int:
    """Read all files of a step past the page cache, on 4 threads in parts of 8 MiB; return how many bytes those are."""
    del run, layout
    buffers, parts = local(), list[tuple[Path, int]]()
    for path in place.rglob("*"):
        if path.is_file():
            parts += [(path, start) for start in range(0, path.stat().st_size, RAW_BYTES)]

    def read(part: tuple[Path, int]) -> int:
        path, start = part
        memory = vars(buffers).setdefault("memory", mmap(-1, RAW_BYTES))  # begins on a page
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(file, [memory], start)
        finally:
            os.close(file)

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(read, parts))


def load_ours(place: Path, run: Path, layout: ParallelLayout) -> int:
    """Have each rank of a layout open a step and read its own elements; return how many bytes those are."""
    del run
    needed = 0
    source = Run(str(place))
    step = source.resolve()
    for rank in range(layout.world_size):
        with source.open(step) as reader:
            wanted = rank_table(reader, layout, rank)
            memory = np.empty(int(wanted.size_bytes.sum()), np.uint8)
            begins = np.cumsum(wanted.size_bytes) - wanted.size_bytes
            reader.execute(reader.plan(wanted), memory.ctypes.data + begins)
            needed += len(memory)
    return needed


def load_together(place: Path, run: Path, layout: ParallelLayout) -> int:
    """Have all ranks of a layout, threads here, restore their elements together; return how many bytes those are."""
    del run
    source = Run(str(place))
    step = source.resolve()
    ranks = Threads.all_of(layout.world_size)

    def restored(ranks: Threads) -> int:
        with source.open(step, ranks) as reader:
            table = rank_table(reader, layout, ranks.rank)
            pieces = [
                Piece(table.names[tensor], table.box(row), start, stop, np.empty(stop - start, np.float32))
                for row, (tensor, start, stop) in enumerate(
                    zip(table.tensor.tolist(), table.start.tolist(), table.stop.tolist(), strict=True)
                )
            ]
            restore_from(reader, pieces)
            return sum(piece.data.nbytes for piece in pieces)

    with ThreadPoolExecutor(layout.world_size) as pool:
        return sum(pool.map(restored, ranks))


class Threads:
    """The exchange of one of several threads."""

    def __init__(self, rank: int, size: int, boxes: list[Any], barrier: Barrier) -> None:
        self.rank, self.size, self._boxes, self._barrier = rank, size, boxes, barrier

    @classmethod
    def all_of(cls, size: int) -> "list[Threads]":
        boxes, barrier = [None] * size, Barrier(size)
        return [cls(rank, size, boxes, barrier) for rank in range(size)]

    def all_gather(self, data: Any) -> list[Any]:
        self._boxes[self.rank] = data
        self._barrier.wait()
        found = list(self._boxes)
        self._barrier.wait()
        return found

    def all_to_all(self, send: Any) -> list[Any]:
        return [each[self.rank] for each in self.all_gather(list(send))]


def reshard(source: Path, target: Path, axes: tuple[str, ...]) -> tuple[dict, int]:
    command = [sys.executable, "-m", "ckptkit", "reshard", str(source), str(target), *axes, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return json.loads(out), usage.ru_maxrss * 1024


def drop_cache(folder: Path) -> None:
    for path in (*folder.rglob("*.safetensors"), *folder.rglob("*.distcp"), *folder.rglob("*.pt")):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
