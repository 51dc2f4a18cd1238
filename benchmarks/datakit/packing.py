"""Packing: documents a second of processor time, fill and padding, beside best-fit-decreasing of all documents at once.

Lengths are drawn like those of web text, a log-normal of mean about 670 tokens, and like those of source files, of mean
about 1,270. `pack` runs on one thread as `datakit pack --dry-run` does, from opening the store to the counts, and in
windows of 262,144 documents. The reference is best-fit-decreasing of all documents at once, in plain Python, and packs
in the same run. Repeats are interleaved, medians. Each store takes some GB of the temporary folder, one at a time.

    PYTHONPATH=. python benchmarks/datakit/packing.py
"""

import argparse
import statistics
import tempfile
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import add_option
from datakit import pack, write_store

SEQ_LENGTHS = (2048, 8192, 131072)
TARGET_M_PER_S, WITHIN, MAX_PADDING = 10, 1.005, 0.01
KINDS = {"web text": (5.9, 1.1), "source files": (6.3, 1.3)}  # of the lengths' logarithms: mean, standard deviation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1 << 19)
    parser.add_argument("--repeats", type=int, default=5)
    add_option(parser)
    arguments = parser.parse_args()
    print(
        "| documents | row | M documents/s | padding | rows / reference | reference, M documents/s | padding of pad |"
    )
    print("|---|---|---|---|---|---|---|")
    met = True
    for number, (kind, (mean, deviation)) in enumerate(KINDS.items()):
        drawn = np.random.default_rng(number).lognormal(mean, deviation, arguments.documents)
        lengths: list[int] = np.clip(drawn, 1, 1e6).astype(int).tolist()
        longest = np.zeros(max(lengths), np.int64)
        with tempfile.TemporaryDirectory() as name:
            store = write_store(Path(name) / "s", (longest[:length] for length in lengths), vocab_size=9, eod_id=0)
            for seq_length in SEQ_LENGTHS:
                met &= compare(store.path, kind, lengths, seq_length, arguments)
    return 0 if met else 1


def compare(store: Path, kind: str, lengths: list[int], seq_length: int, arguments: argparse.Namespace) -> bool:
    """Print and record one kind of documents and one length of rows; return whether the targets are met."""
    rates, reference = [], []
    for _ in range(arguments.repeats):
        seconds, (_, record) = timed(lambda: pack(store, seq_length=seq_length, dry_run=True))
        rates.append(len(lengths) / seconds / 1e6)
        seconds, num_rows = timed(lambda: best_fit_decreasing(lengths, seq_length))
        reference.append(len(lengths) / seconds / 1e6)
    _, padded = pack(store, seq_length=seq_length, packing="pad", dry_run=True)
    padding, padding_of_pad = (each.num_padding / (each.num_rows * seq_length) for each in (record, padded))
    rate, ratio = statistics.median(rates), record.num_rows / num_rows
    print(
        f"| {kind} | {seq_length:,} | {rate:.1f} | {padding:.4%} | {ratio:.5f} | {statistics.median(reference):.2f} | "
        f"{padding_of_pad:.1%} |",
        flush=True,
    )
    claim, peer = f"{kind} packed into rows of {seq_length:,}", {"best-fit-decreasing": statistics.median(reference)}
    arguments.record.add(claim, rate, "M documents a second of processor time", peer=peer)
    arguments.record.add(f"{claim}: padding", 100 * padding, "%", peer={"no packing": 100 * padding_of_pad})
    return rate >= TARGET_M_PER_S and ratio <= WITHIN and padding < MAX_PADDING


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor time of a call, and what it returned."""
    start = time.process_time()
    found = call()
    return time.process_time() - start, found


def best_fit_decreasing(lengths: Sequence[int], seq_length: int) -> int:
    """Return how many rows best-fit-decreasing fills with pieces of documents of these lengths."""
    pieces = [seq_length] * sum(length // seq_length for length in lengths)
    pieces += filter(None, (length % seq_length for length in lengths))
    spares: list[int] = []  # of all rows, in order
    num_rows = 0
    for piece in sorted(pieces, reverse=True):
        found = bisect_left(spares, piece)
        num_rows += found == len(spares)
        insort(spares, (spares.pop(found) if found < len(spares) else seq_length) - piece)
    return num_rows


if __name__ == "__main__":
    raise SystemExit(main())
