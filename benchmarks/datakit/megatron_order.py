"""The order of megatron-core's datasets: cold start to the first batch, and memory, of the peer and of MegatronBlend.

Both read the same shard in processes of their own, by turns, and their first batches must be equal. Seconds are of
processor time, from the library's call to eight samples, imports apart; memory is the highest resident set above that
before the call. The peer saves its indices in a new folder, as its users do. Epochs take the place of documents, which
are slow to write: both orders hold each document once an epoch. --python is an interpreter with megatron-core 0.19.2.

    PYTHONPATH=. python benchmarks/datakit/megatron_order.py --python PEER
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import add_option
from datakit import write_store

SEQ_LENGTH, MIN_SPEED, MAX_MEMORY = 512, 3, 1 / 3
MEASURE = """
import json, re, sys, time
stem, folder, num_stores, num_samples, cache = *sys.argv[1:3], *map(int, sys.argv[3:5]), sys.argv[5]
def kib(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
def measured(make):
    open("/proc/self/clear_refs", "w").write("5")
    before, start = kib("VmRSS"), time.process_time()
    batch = make()
    print(json.dumps([time.process_time() - start, (kib("VmHWM") - before) / 1024, batch]))
"""
OURS = (
    MEASURE
    + """
from datakit import MegatronBlend, MegatronOrder, TokenStore
import numpy.random
def make():
    weights = range(1, num_stores + 1) if num_stores > 1 else ()
    stores = [TokenStore.open(folder) for _ in range(num_stores)]
    order = MegatronOrder(num_samples)
    return MegatronBlend(stores, weights, seq_length=512, seed=1, order=order).batch(range(8)).tokens.tolist()
measured(make)
"""
)
PEER = (
    MEASURE
    + """
import logging; logging.disable(logging.WARNING)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets import helpers
class Tokenizer:
    vocab_size, eod, unique_identifiers = None, -1, "none"
def make():
    weights = list(map(float, range(1, num_stores + 1))) if num_stores > 1 else None
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=512, blend=([stem] * num_stores, weights), split="1,0,0", path_to_cache=cache,
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )
    made = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 1, 1], lambda: True, config).build()[0]
    return [made[number]["tokens"].tolist() for number in range(8)]
measured(make)
"""
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter that has megatron-core")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    add_option(parser)
    arguments = parser.parse_args()
    num_rows = arguments.documents * 64 // SEQ_LENGTH
    print("| stores | samples | peer s | ours s | faster | peer MiB | ours MiB | of its memory |")
    print("|---|---|---|---|---|---|---|---|")
    met = True
    with tempfile.TemporaryDirectory() as name:
        large = write_store(Path(name) / "large", documents(arguments.documents), vocab_size=60000)
        small = write_store(Path(name) / "small", documents(1500), vocab_size=60000)
        for store, num_stores, num_samples in (
            (large, 1, 500 * num_rows), (small, 100, 1_000_000), (small, 1000, 100_000)
        ):  # fmt: skip
            stem = str(store.path / store.manifest.shards[0].name)
            met &= compare(arguments, stem, str(store.path), num_stores, num_samples)
    return 0 if met else 1


def documents(count: int) -> Iterator[Any]:
    """Yield documents of 1 to 127 tokens."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 60000, 127)
    for size in rng.integers(1, 128, count).tolist():
        yield tokens[:size]


def compare(arguments: argparse.Namespace, stem: str, folder: str, num_stores: int, num_samples: int) -> bool:
    """Print and record one blend; return whether the targets are met."""
    costs: dict[str, list[tuple[float, float]]] = {PEER: [], OURS: []}
    for _ in range(arguments.repeats):
        batches = []
        for program, interpreter in ((PEER, arguments.python), (OURS, sys.executable)):
            with tempfile.TemporaryDirectory() as cache:
                command = [interpreter, "-W", "ignore", "-c", program, stem, folder, str(num_stores), str(num_samples)]
                path = os.environ.get("PYTHONPATH", "") if program == OURS else ""
                done = subprocess.run(
                    [*command, cache],
                    env=os.environ | {"PYTHONPATH": path},
                    capture_output=True,
                    text=True,
                    check=False,
                )
            if done.returncode:
                raise SystemExit(done.stderr)
            seconds, mib, batch = json.loads(done.stdout.splitlines()[-1])
            costs[program].append((seconds, mib))
            batches.append(batch)
        assert batches[0] == batches[1], "both read the same samples"
    peer, own = ([statistics.median(column) for column in zip(*costs[each])] for each in (PEER, OURS))
    faster, memory = peer[0] / own[0], own[1] / peer[1]
    print(
        f"| {num_stores:,} | {num_samples:,} | {peer[0]:.2f} | {own[0]:.2f} | {faster:.1f} | {peer[1]:.0f} | "
        f"{own[1]:.0f} | {memory:.2f} |",
        flush=True,
    )
    claim = f"the first batch in Megatron's order, {num_stores:,} stores, {num_samples:,} samples"
    arguments.record.add(claim, own[0], "CPU seconds", peer={"megatron-core": peer[0]})
    arguments.record.add(f"{claim}: memory", own[1], "MiB", peer={"megatron-core": peer[1]})
    return faster >= MIN_SPEED and memory <= MAX_MEMORY


if __name__ == "__main__":
    raise SystemExit(main())
