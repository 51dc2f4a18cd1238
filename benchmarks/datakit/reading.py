"""Rows a second of batches, mapped and with pread, hot and cold, beside a raw gather and four peers.

Rows of 4,096 tokens at random places of two stores (uint16, documents of about 670 tokens). The raw limit copies as
many random tokens from one memory map into int64 [rows, L + 1], tokens alone. Ours are batches of 64 rows, of which
tokens and labels are views of such an array, positions and loss mask constants; with "all arrays" these are written
out too, 28 bytes a token. They are the blend's samples in order, or random ones, also row by row. Hot, all that is read
was read once before by the same process, so that its pages are mapped: some 100 MB. Cold, the files are dropped from
the page cache before each batch, and the limit is 16 threads that read 8 KiB each. Every program is a process of its
own; repeats are interleaved, medians.

    PYTHONPATH=. python benchmarks/datakit/reading.py --python PEER

PEER is an interpreter that has megatron-core 0.19.2, litdata, MosaicML streaming and Grain; one that lacks some leaves
these out.
"""

import argparse
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

HEAD = """
import os, random, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
folder, repeat, L, ROWS = sys.argv[1], int(sys.argv[2]), 4096, 64
rng = random.Random(repeat)
bins = [f"{folder}/{name}/shard-000000-000.bin" for name in "ab"]
def timed(work, count, rows, before=None):
    for _ in range(1 if before else 2):  # the first time maps the pages that the second one reads
        spent = 0.0
        rng.seed(repeat)
        for number in range(count):
            if before:
                before()
            started = time.perf_counter()
            work(number)
            spent += time.perf_counter() - started
    print(count * rows / spent)
def cold():
    for name in bins:
        with open(name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
def blend(reading):
    from datakit import Blend, TokenStore
    stores = [TokenStore.open(f"{folder}/{name}", reading=reading) for name in "ab"]
    return Blend([(store, 1.0) for store in stores], seq_length=L, seed=repeat)
def megatron(is_mapped):
    import logging; logging.disable(logging.WARNING)
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    class Tokenizer:
        vocab_size, eod, unique_identifiers = None, -1, "none"
    config = GPTDatasetConfig(
        random_seed=repeat, sequence_length=L, blend=([path[:-4] for path in bins], [1.0, 1.0]), split="1,0,0",
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, path_to_cache=f"{folder}/cache-{repeat}", mmap_bin_files=is_mapped,
    )
    made = BlendedMegatronDatasetBuilder(GPTDataset, [20_000, 1, 1], lambda: True, config).build()[0]
    return made
def without_torchvision():  # which streaming imports for its image data sets, and few releases of torch have
    import types
    from importlib.machinery import ModuleSpec
    names = {"datasets": "VisionDataset", "transforms": "to_tensor", "transforms.functional": "to_tensor"}
    for name, inside in {"": "datasets", **names}.items():
        name = f"torchvision.{name}".rstrip(".")
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, inside, object)
"""
PROGRAMS = {
    "raw gather": """
tokens = np.memmap(bins[0], np.uint16)
out = np.empty((ROWS, L + 1), np.int64)
def work(number):
    for row in range(ROWS):
        start = rng.randrange(len(tokens) - L)
        out[row] = tokens[start : start + L + 1]
timed(work, 200, ROWS)
""",
    "ours, batches": """
stream = blend("mmap")
out = np.empty(stream.num_bytes((ROWS, L)), np.uint8)
timed(lambda number: stream.batch(range(number * ROWS, (number + 1) * ROWS), out=out), 200, ROWS)
""",
    "ours, all arrays": """
stream = blend("mmap")
from datakit import HostBatch
out = np.empty(HostBatch.num_bytes((ROWS, L)), np.uint8)
timed(lambda number: stream.batch(range(number * ROWS, (number + 1) * ROWS), out=out), 200, ROWS)
""",
    "ours, random rows": """
stream = blend("mmap")
out = np.empty(stream.num_bytes((ROWS, L)), np.uint8)
timed(lambda number: stream.batch([rng.randrange(10**6) for _ in range(ROWS)], out=out), 200, ROWS)
""",
    "ours, row by row": """
stream = blend("mmap")
timed(lambda number: stream.batch([rng.randrange(10**6)]), 12_000, 1)
""",
    "ours, pread": """
stream = blend("pread")
out = np.empty(stream.num_bytes((ROWS, L)), np.uint8)
timed(lambda number: stream.batch(range(number * ROWS, (number + 1) * ROWS), out=out), 200, ROWS)
""",
    "megatron-core": "made = megatron(True)\ntimed(lambda number: made[rng.randrange(20_000)], 6000, 1)",
    "megatron-core, mmap off": "made = megatron(False)\ntimed(lambda number: made[rng.randrange(20_000)], 3000, 1)",
    "litdata": """
import litdata
def dataset():
    from litdata.streaming.item_loader import TokensLoader
    return litdata.StreamingDataset(f"{folder}/lit", item_loader=TokensLoader(block_size=L + 1), shuffle=False)
made = dataset()
size = len(made)
timed(lambda number: made[rng.randrange(size)].long(), 12_000, 1)
""",
    "MosaicML streaming": """
without_torchvision()
from streaming import LocalDataset
made = LocalDataset(f"{folder}/mds")
size = len(made)
timed(lambda number: made[rng.randrange(size)]["tokens"].astype(np.int64), 12_000, 1)
""",
    "Grain": """
import grain
tokens = np.memmap(bins[0], np.uint16)
class Rows:
    def __len__(self): return (len(tokens) - 1) // L
    def __getitem__(self, number): return tokens[number * L : number * L + L + 1].astype(np.int64)
made = grain.MapDataset.source(Rows()).seed(repeat).shuffle().repeat().batch(ROWS)
timed(lambda number: made[number], 200, ROWS)
""",
    "raw reads, cold": """
files = [os.open(name, os.O_RDONLY) for name in bins]
sizes = [os.fstat(file).st_size for file in files]
pool = ThreadPoolExecutor(16)
def read(at): return os.pread(files[at % 2], 8192, at % (sizes[at % 2] - 8192))
def work(number):
    for _ in pool.map(read, [rng.randrange(1 << 40) for _ in range(ROWS)]):
        pass
timed(work, 25, ROWS, cold)
""",
    "ours, pread, cold": """
stream = blend("pread")
timed(lambda number: stream.batch(range(number * ROWS, (number + 1) * ROWS)), 25, ROWS, cold)
""",
    "ours, mapped, cold": """
stream = blend("mmap")
timed(lambda number: stream.batch(range(number * ROWS, (number + 1) * ROWS)), 10, ROWS, cold)
""",
}
PEERS = {"megatron-core", "megatron-core, mmap off", "litdata", "MosaicML streaming", "Grain"}
TARGETS = [  # what, its yardstick, at least so many times it
    ("ours, batches", "raw gather", 0.6), ("ours, random rows", "raw gather", 0.4),
    ("ours, batches", "megatron-core", 20), ("ours, batches", "litdata", 3),
    ("ours, batches", "MosaicML streaming", 3), ("ours, batches", "Grain", 3),
    ("ours, pread", "megatron-core, mmap off", 10), ("ours, pread, cold", "raw reads, cold", 0.7),
    ("ours, mapped, cold", "ours, pread, cold", 0.5),
]  # fmt: skip
MAKE_LITDATA = """
import sys, numpy as np, torch, litdata
from litdata.streaming.item_loader import TokensLoader
def documents(part):
    tokens = np.fromfile(sys.argv[1] + "/a/shard-000000-000.bin", np.uint16)
    for piece in np.array_split(tokens, 1000):
        yield torch.from_numpy(piece.astype(np.int32))
if __name__ == "__main__":
    litdata.optimize(documents, [0], sys.argv[1] + "/lit", num_workers=1, chunk_size=4097 * 1024,
                     item_loader=TokensLoader())
"""


MAKE_MOSAIC = """
without_torchvision()
from streaming import MDSWriter
tokens = np.fromfile(bins[0], np.uint16)
with MDSWriter(out=f"{folder}/mds", columns={"tokens": "ndarray:uint16:4097"}, size_limit=1 << 26) as writer:
    for start in range(0, len(tokens) - L, L):
        writer.write({"tokens": tokens[start : start + L + 1]})
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="", help="interpreter that has the peers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mib", type=int, default=128, help="size of each store")
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for store in "ab":
            write_store(Path(name) / store, documents(arguments.mib << 20, ord(store)), vocab_size=50257)
        program = Path(name) / "litdata_store.py"
        program.write_text(MAKE_LITDATA)
        if arguments.python:
            subprocess.run([arguments.python, program, name], capture_output=True, check=False)
            mosaic = [arguments.python, "-W", "ignore", "-c", HEAD + MAKE_MOSAIC, name, "0"]
            subprocess.run(mosaic, capture_output=True, check=False)
        rates: dict[str, list[float]] = {}
        for repeat in range(arguments.repeats):
            for what, text in PROGRAMS.items():
                rate = run(arguments.python if what in PEERS else sys.executable, text, name, repeat)
                if rate:
                    rates.setdefault(what, []).append(rate)
    medians = {what: statistics.median(found) for what, found in rates.items()}
    print("| what | rows/s | lowest to highest |\n|---|---|---|")
    for what, found in rates.items():
        print(f"| {what} | {medians[what]:,.0f} | {min(found):,.0f} to {max(found):,.0f} |")
    for way, program, raw in (
        ("as batches", "ours, batches", "raw gather"),
        ("cold, by pread", "ours, pread, cold", "raw reads, cold"),
    ):
        peers = {name: medians[name] for name in medians if name in PEERS and raw == "raw gather"}
        claim = f"rows of 4,096 tokens out of a store, {way}"
        arguments.record.add(claim, medians[program], "rows a second", peer=peers, limit={raw: medians[raw]})
    print("\n| ratio | measured | target |\n|---|---|---|")
    met = True
    for what, other, least in TARGETS:
        if other in medians:
            ratio = medians[what] / medians[other]
            met &= ratio >= least
            print(f"| {what} / {other} | {ratio:.2f} | {least:g} |")
    return 0 if met else 1


def documents(num_bytes: int, seed: int) -> Iterator[Any]:
    """Yield documents of about 670 tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50257, 1 << 22, np.uint16)
    for size in (rng.lognormal(5.9, 1.1, num_bytes // 2 // 670).astype(int) + 1).tolist():
        start = int(rng.integers(0, len(tokens) // 2))
        yield tokens[start : start + min(size, len(tokens) // 2)]


def run(python: str, program: str, folder: str, repeat: int) -> float | None:
    """Return the rows a second that a program prints, None if it cannot run."""
    if not python:
        return None
    environment = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "") if python == sys.executable else ""}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", HEAD + program, folder, str(repeat)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(f"left out: {program.strip().splitlines()[0]}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    sys.exit(main())
