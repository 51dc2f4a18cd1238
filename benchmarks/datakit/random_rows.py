"""Random access: rows a second by one, from 1 store and from 1,000; documents of a sample; shards beyond open files.

Rows of 4,096 tokens are asked for one by one, at random places of the stream, hot in the page cache; repeats are
interleaved, medians. The raw limit copies as many random tokens from memory maps into int64, tokens alone. Then
`datakit inspect --sample` runs on a shard of 50,000 documents from as many files, and a process of at most 256 open
files reads all of a store of 700 shards, through a loader and by `datakit verify`.

    PYTHONPATH=. python benchmarks/datakit/random_rows.py
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.record import add_option
from datakit import Blend, Loader, Recipe, TokenStore, preprocess, train_tokenizer, write_store

SEQ_LENGTH, VOCAB_SIZE = 4096, 50257
NUM_STORES, STORE_ROWS, LARGE_ROWS = 1000, 16, 8192
TARGETS = {1: 20_000, NUM_STORES: 2_000}
NUM_SOURCES, NUM_SHARDS, MAX_OPEN_FILES = 50_000, 700, 256
FEW_FILES = f"""
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_OPEN_FILES}, {MAX_OPEN_FILES}))
from datakit import Blend, Loader, TokenStore, verify
before = len(os.listdir("/proc/self/fd"))
store = TokenStore.open(sys.argv[1])
blend = Blend([(store, 1.0)], seq_length=8)
done = 0
with Loader(blend, 8, 1) as loader:
    while done < blend.rows[0] // 8:
        loader.next_step()
        done += 1
held = len(os.listdir("/proc/self/fd")) - before
print(json.dumps({{"steps": done, "of": int(blend.rows[0] // 8), "held": held, "faults": len(verify(sys.argv[1]))}}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4000, help="a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        large = rng.integers(0, VOCAB_SIZE, LARGE_ROWS * SEQ_LENGTH + 1)
        stores = {1: [write_store(folder / "large", np.array_split(large, 64), vocab_size=VOCAB_SIZE)]}
        stores[NUM_STORES] = [
            write_store(folder / f"small-{i}", [large[i : i + STORE_ROWS * SEQ_LENGTH + 1]], vocab_size=VOCAB_SIZE)
            for i in range(NUM_STORES)
        ]
        met = [rows_per_s(members, arguments) for members in stores.values()]
        inspect_sample(folder / "sources")
        few_files(folder / "shards")
    return 0 if all(met) else 1


def rows_per_s(stores: list[TokenStore], arguments: argparse.Namespace) -> bool:
    """Print and record random rows a second of a blend of stores; return whether they reach the target."""
    blend = Blend([(store, 1.0 + i) for i, store in enumerate(stores)], seq_length=SEQ_LENGTH, seed=1)
    maps = [np.memmap(file, np.uint16) for store in stores for file in sorted(store.path.glob("*.bin"))]
    rng = random.Random(0)
    picks = [(tokens, rng.randrange(len(tokens) - SEQ_LENGTH)) for tokens in rng.choices(maps, k=arguments.rows)]
    samples = [rng.randrange(4 * len(stores) * STORE_ROWS) for _ in range(arguments.rows)]
    runs: dict[str, list[float]] = {"raw": [], "Blend.batch": [], "Loader.sample": []}
    with Loader(blend, 1, 1) as loader:
        for _ in range(arguments.repeats):
            runs["raw"].append(timed(lambda pick: pick[0][pick[1] : pick[1] + SEQ_LENGTH].astype(np.int64), picks))
            runs["Blend.batch"].append(timed(lambda sample: blend.batch([sample]), samples))
            runs["Loader.sample"].append(timed(loader.sample, samples))
    rates = {name: statistics.median(run) for name, run in runs.items()}
    target = TARGETS[len(stores)]
    shown = ", ".join(f"{name} {rate:,.0f} ({rate / rates['raw']:.2f} of raw)" for name, rate in rates.items())
    print(f"{len(stores):,} store{'s' * (len(stores) > 1)}, random rows/s: {shown}; target >= {target:,}", flush=True)
    claim, limit = f"random rows by one, a blend of {len(stores):,}", {"raw, tokens alone": rates["raw"]}
    arguments.record.add(claim, rates["Loader.sample"], "rows a second", limit=limit)
    return min(rates["Blend.batch"], rates["Loader.sample"]) >= target


def timed(work: Callable, items: list) -> float:
    """Return calls of `work` a second, over these items."""
    started_s = time.perf_counter()
    for item in items:
        work(item)
    return len(items) / (time.perf_counter() - started_s)


def inspect_sample(folder: Path) -> None:
    """Print the seconds of `inspect --sample` where each of many documents is a source file of its own."""
    for number in range(NUM_SOURCES):
        path = folder / f"corpus/part-{number // 1000}/text-{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"source {number}")
    tokenizer, store = str(folder / "tok.json"), folder / "store"
    train_tokenizer([str(folder / "corpus/part-0")], tokenizer, vocab_size=300)
    preprocess([str(folder / "corpus")], store, Recipe(tokenizer))
    command = [sys.executable, "-m", "datakit", "inspect", store, "--sample", "3", "--seq-length", str(SEQ_LENGTH)]
    started_s = time.perf_counter()
    result = subprocess.run([*command, "--json"], capture_output=True, check=True)
    elapsed_s = time.perf_counter() - started_s
    num_parts = len(json.loads(result.stdout)["sources"])
    print(f"inspect --sample: {num_parts} documents of {NUM_SOURCES:,} source files in {elapsed_s:.2f} s", flush=True)


def few_files(folder: Path) -> None:
    """Print how far a process of few open files gets with a store of many shards."""
    store = write_store(folder, [range(9)], vocab_size=VOCAB_SIZE)
    [entry] = store.manifest.shards
    names = [f"shard-{number:06}-000" for number in range(NUM_SHARDS)]
    for name in names[1:]:
        for file, _ in store.files(entry):
            (folder / name).with_suffix(file.suffix).hardlink_to(file)
    replace(store.manifest, shards=tuple(replace(entry, name=name) for name in names)).write(folder)
    result = subprocess.run([sys.executable, "-c", FEW_FILES, folder], capture_output=True, text=True, check=False)
    what = f"{NUM_SHARDS} shards, {MAX_OPEN_FILES} open files"
    if result.returncode:
        print(f"{what}: failed: {result.stderr.strip().splitlines()[-1]}")
        return
    found = json.loads(result.stdout)
    print(
        f"{what}: {found['steps']} of {found['of']} steps, {found['held']} descriptors held, "
        f"verify finds {found['faults']} faults"
    )


if __name__ == "__main__":
    sys.exit(main())
