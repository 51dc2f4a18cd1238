"""Loader: time to the first step, and rows a second beside a raw gather by numpy.

Stores of 64 Mi random tokens (uint16), one of 8 shards and one of 512, hot in the page cache; rows of 4096 tokens. The
raw limit reads the same random rows from one memory map into int64, tokens alone; the loader makes tokens, labels,
positions and loss mask. Repeats are interleaved; ratios hold within a run.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.record import add_option
from datakit import Blend, Cursor, Loader, TokenStore, write_store

SEQ_LENGTH, NUM_TOKENS, ROWS_A_STEP, NUM_STEPS = 4096, 64 << 20, 64, 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    add_option(parser)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    documents = np.split(rng.integers(0, 50257, NUM_TOKENS), 1 << 16)
    with tempfile.TemporaryDirectory() as name:
        for num_shards in (8, 512):
            path = Path(name) / str(num_shards)
            write_store(path, documents, vocab_size=50257, shard_documents=len(documents) // num_shards)
            starts, rates, raw = [], [], []
            for repeat in range(arguments.repeats):
                start_s, rate = load(path, repeat)
                starts.append(start_s)
                rates.append(rate)
                raw.append(raw_rows_per_s(path, repeat))
            rate, limit = statistics.median(rates), statistics.median(raw)
            print(
                f"{num_shards} shards: first step after {1e3 * statistics.median(starts):.1f} ms, loader {rate:,.0f} "
                f"rows/s, raw {limit:,.0f} rows/s of tokens alone, ratio {rate / limit:.2f}"
            )
            claim = f"steps of a loader, {num_shards} shards"
            arguments.record.add(claim, rate, "rows a second", limit={"raw gather, tokens alone": limit})
            arguments.record.add(f"{claim}: the first", 1e3 * statistics.median(starts), "ms")
    return 0


def load(path: Path, seed: int) -> tuple[float, float]:
    """Seconds from opening the store to the first step, far into the stream, and rows a second after it."""
    started_s = time.perf_counter()
    blend = Blend([(TokenStore.open(path), 1.0)], seq_length=SEQ_LENGTH, seed=seed)
    with Loader(blend, ROWS_A_STEP, 1, cursor=Cursor.start(blend, 10**12)) as loader:
        loader.next_step()
        first_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        for _ in range(NUM_STEPS):
            loader.next_step()
    return first_s, ROWS_A_STEP * NUM_STEPS / (time.perf_counter() - started_s)


def raw_rows_per_s(path: Path, seed: int) -> float:
    tokens = np.memmap(sorted(path.glob("*.bin"))[0], np.uint16)
    rows = np.random.default_rng(seed).integers(0, len(tokens) - SEQ_LENGTH, (NUM_STEPS, ROWS_A_STEP))
    started_s = time.perf_counter()
    for step in rows:
        batch = np.empty((ROWS_A_STEP, SEQ_LENGTH), np.int64)
        for row, start in enumerate(step):
            batch[row] = tokens[start : start + SEQ_LENGTH]
    return rows.size / (time.perf_counter() - started_s)


if __name__ == "__main__":
    sys.exit(main())
