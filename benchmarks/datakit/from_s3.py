"""Read stores from S3 with a cache of a tenth of the store: fetched bytes beside used ones, and the time steps wait.

SeaweedFS serves a store of random tokens, and an archive of it, on this machine. Two rates are those of 8 threads on
the windows of 8 MiB that the stream reads: bare GETs, whose bytes are dropped, and fetches, which are checked and kept
in a cache of the same size. Both have the machine for themselves. Then one epoch is read with `shuffle = "blocks"`, at
half the rate of fetches: a step is taken when it is due, and what it takes then is waiting. The same store, mapped from
the disk and read at the rate of the archive, shows how much of that is the machine's. Store, archive and disk take
turns; lines are medians. With `--ranks` several processes share the cache, and take each step together.

    PYTHONPATH=. python benchmarks/datakit/from_s3.py
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Record, add_option
from datakit import Blend, Loader, TokenStore, archive, write_store
from threefold.storage import open_storage
from tools.s3_server import start, stop

SEQ_LENGTH, MIB, WINDOW_BYTES = 4096, 1 << 20, 8 << 20
MAX_FETCHED, MAX_WAITING = 1.3, 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the store")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the cache")
    parser.add_argument("--rows", type=int, default=256, help="rows a step of each rank")
    parser.add_argument("--of-rate", type=float, default=0.5, help="part of the rate of fetches that is consumed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--read", nargs=5, help=argparse.SUPPRESS)
    add_option(parser)
    arguments = parser.parse_args()
    if arguments.read:
        url, cache, rate, rank, size = arguments.read
        read(url, cache, float(rate), int(rank), int(size), arguments.mib, arguments.rows)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = make_store(folder / "store", arguments.mib)
        server = start(folder / "s3")
        os.environ |= server.environment
        try:
            upload(store, f"s3://{server.bucket}/store")
            archive(store.path, f"s3://{server.bucket}/archive")
            os.sync()  # what was uploaded is not written to the disk beside what is measured
            rates = {}
            for kind in ("store", "archive"):
                url = f"s3://{server.bucket}/{kind}"
                rates[url] = get_rate(url), fetch_rate(url, folder / f"fetched-{kind}", arguments.mib)
            rates[str(store.path)] = 0.0, rates[url][1]
            outcome: dict[str, list[dict[str, float]]] = {url: [] for url in rates}
            for repeat in range(arguments.repeats):
                for number, (url, (_, fetched)) in enumerate(rates.items()):
                    cache = folder / f"cache-{number}-{repeat}"
                    outcome[url].append(read_by_ranks(url, cache, arguments, fetched * arguments.of_rate))
                    shutil.rmtree(cache, ignore_errors=True)
            met = show(outcome, rates, arguments.of_rate, arguments.record)
        finally:
            stop(folder / "s3")
    return 0 if met else 1


def make_store(path: Path, mib: int) -> TokenStore:
    """Documents of about 650 tokens, in shards of 64 MiB."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(5.9, 1.1, mib * MIB // 2 // 670).astype(int) + 1
    tokens = rng.integers(0, 50257, 1 << 22, np.uint16)
    starts = rng.integers(0, len(tokens) // 2, len(sizes))
    documents = (tokens[start : start + min(size, len(tokens) // 2)] for start, size in zip(starts, sizes))
    return write_store(path, documents, vocab_size=50257, shard_documents=len(sizes) * 64 // mib)


def upload(store: TokenStore, url: str) -> None:
    storage = open_storage(url)
    for path in sorted(store.path.iterdir()):
        storage.write(path.name, path.read_bytes())


def read_by_ranks(url: str, cache: Path, arguments: argparse.Namespace, rate: float) -> dict[str, float]:
    """Read one epoch on all ranks, and return what was seen, of times the longest of all ranks."""
    num_ranks = arguments.ranks
    sizes = ["--mib", str(arguments.mib), "--rows", str(arguments.rows)]
    command = [sys.executable, __file__, *sizes, "--read", url, str(cache), str(rate / num_ranks)]
    Path(f"{cache}.steps").write_bytes(bytes(8 * num_ranks))
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(num_ranks)], **pipes) for rank in range(num_ranks)]
    for process in ranks:
        process.stdout.readline()  # its first step is there
    started_s = time.monotonic()
    for process in ranks:
        print(started_s, file=process.stdin, flush=True)
    found = [json.loads(process.communicate()[0]) for process in ranks]
    fetched, used, consumed = (sum(each[key] for each in found) for key in ("fetched", "used", "consumed"))
    times = {key: max(each[key] for each in found) for key in ("first_s", "waiting", "longest_s")}
    return {"consumed": consumed, "fetched": fetched / used, **times}


def show(
    reads: dict[str, list[dict[str, float]]], rates: dict[str, tuple[float, float]], of_rate: float, record: Record
) -> bool:
    """Print and record each place; return whether those behind S3 meet the targets."""
    print(
        "| of the rate of fetches | read from | bare GETs, MB/s | fetches, MB/s | asked, MB/s | consumed, MB/s "
        "| fetched / used | first step s | waits | lowest to highest | longest s |\n" + "|---" * 11 + "|"
    )
    met = True
    for url, runs in reads.items():
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        waits, (bare, fetches) = sorted(run["waiting"] for run in runs), rates[url]
        is_remote = "://" in url
        place = f"S3, {url.rpartition('/')[2]}" if is_remote else "disk, mapped"
        costs = f"{bare / 1e6:,.0f} | {fetches / 1e6:,.0f}" if is_remote else " | "
        is_met = medians["fetched"] <= MAX_FETCHED and medians["waiting"] <= MAX_WAITING
        print(
            f"| {of_rate} | {place} | {costs} | {fetches * of_rate / 1e6:,.0f} | {medians['consumed'] / 1e6:,.0f} "
            f"| {medians['fetched']:.2f} | {medians['first_s']:.2f} "
            f"| {medians['waiting']:.2%}{': missed' * (not is_met)} "
            f"| {waits[0]:.2%} to {waits[-1]:.2%} | {medians['longest_s']:.3f} |"
        )
        met &= is_met or not is_remote
        claim, limit = (
            f"a stream from {place}, at {of_rate} of the rate of fetches",
            {"fetches [MB/s]": fetches / 1e6},
        )
        record.add(f"{claim}: waiting", 100 * medians["waiting"], "% of the time", limit=limit)
        record.add(f"{claim}: fetched", medians["fetched"], "bytes for one that is used")
    return met


def get_rate(url: str) -> float:
    """Return bytes a second of bare GETs of a window, 8 threads, the median of three tries over all token files."""
    storage = open_storage(url)
    objects = [each for each in storage.list() if ".bin" in each.key]
    ranges = [
        (each.key, at, min(at + WINDOW_BYTES, each.size_bytes))
        for each in objects
        for at in range(0, each.size_bytes, WINDOW_BYTES)
    ]
    return median_rate(ranges, lambda one: len(storage.read_ranges(one[0], [one[1:]])[0]))


def fetch_rate(url: str, cache: Path, mib: int) -> float:
    """Return bytes a second that 8 threads fetch into a cache, checked and written, of all windows, likewise."""
    store = TokenStore.open(url, cache=cache, cache_mib=mib // 10)
    shards, runs = store.shards.cached, []
    for shard, entry in enumerate(store.manifest.shards):
        for first in range(0, entry.bin.size_bytes, WINDOW_BYTES):
            stop = min(first + WINDOW_BYTES, entry.bin.size_bytes)
            numbers = shards.blocks(shard, np.array([first]), np.array([stop]))
            runs.append([shards.block(shard, number) for number in numbers])

    def fetch(run: list[Any]) -> int:
        shards.fetch_run(run)
        return sum(block.size_bytes for block in run)

    return median_rate(runs, fetch)


def median_rate(things: list[Any], get: Callable[[Any], int]) -> float:
    """Return bytes a second of 8 threads that get things, each a window or its rest, the median of thirds of them."""
    rates = []
    with ThreadPoolExecutor(8) as pool:
        for part in range(3):
            started_s = time.monotonic()
            num_bytes = sum(pool.map(get, things[part::3]))
            rates.append(num_bytes / (time.monotonic() - started_s))
    return statistics.median(rates)


def read(url: str, cache: str, rate: float, rank: int, num_ranks: int, mib: int, rows: int) -> None:
    """Read one epoch on one rank at a rate of bytes a second, and print what was seen."""
    begun_s = time.monotonic()
    is_remote = "://" in url
    store = TokenStore.open(url, cache=cache, cache_mib=mib // 10) if is_remote else TokenStore.open(url)
    blend = Blend([(store, 1.0)], seq_length=SEQ_LENGTH, block_tokens=1 << 22)
    step_bytes = rows * SEQ_LENGTH * store.itemsize
    num_steps = int(blend.rows[0]) // (rows * num_ranks)
    waits = []
    with Loader(blend, rows, 1, rank, num_ranks) as loader:
        loader.next_step()
        first_s = time.monotonic() - begun_s
        print("first step", flush=True)
        started_s = float(sys.stdin.readline())
        steps = np.memmap(f"{cache}.steps", np.int64, "r+")
        for step in range(1, num_steps):
            steps[rank] = step
            while steps.min() < step:  # as in training, no rank begins a step before all have ended the one before
                time.sleep(5e-5)
            time.sleep(max(0.0, started_s + step * step_bytes / rate - time.monotonic()))
            asked_s = time.monotonic()
            loader.next_step()
            waits.append(time.monotonic() - asked_s)
        elapsed_s = time.monotonic() - started_s
    report = {
        "fetched": store.cache.bytes_added if store.cache is not None else 0,
        "used": num_steps * step_bytes,
        "first_s": first_s,
        "waiting": sum(waits) / elapsed_s,
        "longest_s": max(waits),
        "consumed": (num_steps - 1) * step_bytes / elapsed_s,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
