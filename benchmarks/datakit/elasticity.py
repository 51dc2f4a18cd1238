"""A blend of 1,000 stores, and a run at 1 T tokens that goes on with 8, then 3, then 16 data-parallel ranks.

Each of the 1,000 stores holds one shard of 2,000 documents, or two, hard-linked; weights are drawn. A sample's cost is
that of its store, number and row, in lists of 4,096, also of random ones. The run is at sample 10^8 of a store of
15,000 shards. It reads three steps with each number of ranks, in micro-batches of other sizes, and every row is
compared with the stream as one process reads it. A resume is from the stores, open, to the first step of a rank. Each
repeat is a new process; medians of the wall clock.

    PYTHONPATH=. python benchmarks/datakit/elasticity.py
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.datakit.huge import documents, linked
from benchmarks.record import add_option
from datakit import write_store

NUM_STORES, NUM_SHARDS = 1000, 15_000
HEAD = """
import json, sys, time
import numpy as np
from datakit import Blend, Cursor, Loader, TokenStore
folder = sys.argv[1]
found = {}
def timed(name, work, count=1, unit=1e3):
    started_s = time.perf_counter()
    made = work()
    found.setdefault(name, []).append(unit * (time.perf_counter() - started_s) / count)
    return made
"""
BLEND = """
stores = timed("1,000 stores open, ms", lambda: [TokenStore.open(f"{folder}/{n}") for n in range(int(sys.argv[2]))])
weights = np.random.default_rng(0).uniform(0.1, 10, len(stores)).tolist()
blend = timed("blend of them, ms", lambda: Blend(list(zip(stores, weights)), seq_length=4096))
timed("first sample, ms", lambda: blend.addresses([0]))
few, many = np.random.default_rng(1).integers(0, 10**5, 4096), np.random.default_rng(1).integers(0, 10**9, 4096)
blend.addresses(few)
timed("samples in order, us each", lambda: blend.addresses(range(10**5, 10**5 + 4096)), 4096, 1e6)
timed("random samples, us each", lambda: blend.addresses(few), 4096, 1e6)
timed("random samples of 10^9, us each", lambda: blend.addresses(many), 4096, 1e6)
timed("store of random samples, us each", lambda: blend.locate(many), 4096, 1e6)
print(json.dumps(found))
"""
RESUMES = """
blend = Blend([(TokenStore.open(folder), 1.0)], seq_length=4096, seed=3)
first, rows = 10**8, 48
for dp_size in (8, 3, 16):
    cursor = Cursor.from_json(json.loads(json.dumps(Cursor.start(blend, first).to_json())))
    share = rows // dp_size // (2 if dp_size == 8 else 1)  # of 8 ranks each has two micro-batches
    steps = []
    for rank in range(dp_size):
        def resume():
            loader = Loader(blend, share, rows // dp_size // share, rank, dp_size, cursor)
            return loader, loader.next_step()
        loader, step = timed("resume, ms", resume)
        steps.append([step, loader.next_step(), loader.next_step()])
        after = loader.cursor
        loader.close()
    for number in range(3):  # micro-batch m of rank r is part m * dp_size + r of a step
        parts = np.stack([steps[rank][number].tokens for rank in range(dp_size)], 1).reshape(rows, 4096)
        begin = first + number * rows
        assert (parts == blend.batch(range(begin, begin + rows)).tokens).all(), (dp_size, number)
    first += 3 * rows
    assert after.num_samples == first
print(json.dumps(found))
"""
TARGETS = {
    "1,000 stores open, ms": 500, "blend of them, ms": 20, "samples in order, us each": 2,
    "random samples, us each": 2, "store of random samples, us each": 2, "resume, ms": 10,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    add_option(parser)
    arguments = parser.parse_args()
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        small = write_store(Path(name) / "small", [np.arange(1000) for _ in range(2000)], vocab_size=50257)
        (Path(name) / "many").mkdir()
        for number in range(NUM_STORES):
            linked(small, Path(name) / "many" / str(number), 1 + number % 2)  # of two contents
        large = linked(write_store(Path(name) / "one", documents(), vocab_size=50257), Path(name) / "1T", NUM_SHARDS)
        for _ in range(arguments.repeats):
            for program, folder in ((BLEND, Path(name) / "many"), (RESUMES, large)):
                command = [sys.executable, "-c", HEAD + program, folder, str(NUM_STORES)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                for what, values in json.loads(done.stdout).items():
                    figures.setdefault(what, []).extend(values)
    print("| what | median | lowest to highest | target |\n|---|---|---|---|")
    met = True
    for what, values in figures.items():
        median, target = statistics.median(values), TARGETS.get(what)
        met &= target is None or median <= target
        print(f"| {what} | {median:.2f} | {min(values):.2f} to {max(values):.2f} | {target or ''} |")
        name, _, unit = what.rpartition(", ")
        arguments.record.add(f"{name}: of {NUM_STORES:,} stores, and at 1 T tokens", median, unit)
    print("The rows of 8, 3 and 16 ranks are those of one process.")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
