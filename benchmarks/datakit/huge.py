"""Stores of 33 G and of 1 T tokens: opening and the first batch, memory, resume, which documents a step read.

One shard of 100,000 documents of about 660 tokens is hard-linked 500 times to a store of 50 million documents, and
15,000 times to one of 1 T tokens. Each figure is of a new process, whose page cache is warm; repeats are interleaved,
medians. Milliseconds are of the wall clock, memory is the resident set above an interpreter with numpy. The command
line's figure holds the start of Python too.

    PYTHONPATH=. python benchmarks/datakit/huge.py
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.record import add_option
from datakit import TokenStore, pack, write_store

SEQ_LENGTH, DOCUMENTS, TOKENS = 4096, 100_000, 660
SIZES = {"33 G": 500, "1 T": 15_000}
HEAD = """
import json, re, sys, time
import numpy as np
folder, L = sys.argv[1], 4096
def rss(): return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
before = rss()
import datakit
from datakit import Blend, Cursor, Loader, PackedStore, TokenStore, blame, where
found = {}
def timed(name, work):
    started = time.perf_counter()
    made = work()
    found[name] = 1e3 * (time.perf_counter() - started)
    return made
def first(store):
    blend = Blend([(store, 1.0)], seq_length=L)
    return blend, blend.batch(range(8))
"""
PROGRAMS = {
    "concat": """
blend, _ = timed("open + first batch, ms", lambda: first(TokenStore.open(folder)))
found["open + first batch, MiB"] = rss() - before
def resume():
    loader = Loader(blend, 8, 1, cursor=Cursor.start(blend, 10**8))
    loader.next_step()
    return loader
timed("resume with stores open, ms", resume).close()
far = range(10**7, 10**7 + 512)
blame(blend, range(512))
passages = timed("blame of 512 rows, ms", lambda: blame(blend, far))
timed("where of a document, ms", lambda: where(blend, 0, int(passages.documents[0]), 10**8))
print(json.dumps(found))
""",
    "packed": """
store = lambda: PackedStore.of(folder, packing="best_fit", seq_length=L)
timed("packed: open + first batch, ms", lambda: first(store()))
found["packed: open + first batch, MiB"] = rss() - before
print(json.dumps(found))
""",
}
TARGETS = {
    "open + first batch, ms": 30, "open + first batch, MiB": 60, "packed: open + first batch, ms": 30,
    "packed: open + first batch, MiB": 60, "resume with stores open, ms": 10, "blame of 512 rows, ms": 50,
    "where of a document, ms": 50, "datakit blame, ms": 500,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--packed", action="store_true", help="pack the store of 50 million documents too")
    add_option(parser)
    arguments = parser.parse_args()
    met = True
    with tempfile.TemporaryDirectory() as name:
        one = write_store(Path(name) / "one", documents(), vocab_size=50257)
        stores = {size: linked(one, Path(name) / size.replace(" ", ""), count) for size, count in SIZES.items()}
        if arguments.packed:
            pack(stores["33 G"], seq_length=SEQ_LENGTH, packing="best_fit")
        rows: dict[tuple[str, str], list[float]] = {}
        for _ in range(arguments.repeats):
            for size, path in stores.items():
                for kind, program in PROGRAMS.items():
                    if kind == "packed" and not (arguments.packed and size == "33 G"):
                        continue
                    done = subprocess.run(
                        [sys.executable, "-c", HEAD + program, path], capture_output=True, text=True, check=True
                    )
                    for what, value in json.loads(done.stdout).items():
                        rows.setdefault((size, what), []).append(value)
                rows.setdefault((size, "datakit blame, ms"), []).append(verb_ms(path))
        print("| tokens | what | median | lowest to highest | target |\n|---|---|---|---|---|")
        for (size, what), values in rows.items():
            median = statistics.median(values)
            met &= median <= TARGETS[what]
            print(f"| {size} | {what} | {median:.1f} | {min(values):.1f} to {max(values):.1f} | {TARGETS[what]} |")
            name, _, unit = what.rpartition(", ")
            arguments.record.add(f"a store of {size} tokens: {name}", median, unit)
    return 0 if met else 1


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50257, 1 << 20, np.uint16)
    sizes = rng.lognormal(5.9, 1.05, DOCUMENTS)
    sizes = np.maximum(1, sizes * TOKENS / sizes.mean()).astype(int)
    return [tokens[: min(size, len(tokens))] for size in sizes.tolist()]


def linked(one: TokenStore, folder: Path, count: int) -> Path:
    """Make a store of many links to one shard."""
    folder.mkdir()
    [entry] = one.manifest.shards
    names = [f"shard-{number:06}-000" for number in range(count)]
    for name in names:
        for file, _ in one.files(entry):
            (folder / name).with_suffix(file.suffix).hardlink_to(file)
    replace(one.manifest, shards=tuple(replace(entry, name=name) for name in names)).write(folder)
    return folder


def verb_ms(path: Path) -> float:
    """Return the milliseconds of `datakit blame` of a step of 512 rows."""
    config = path.with_suffix(".toml")
    config.write_text(
        f'[data]\nstores = ["{path}"]\n[train]\nseq_length = 4096\nglobal_batch_size = 512\ntrain_steps = 9000\n'
    )
    started_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "datakit", "blame", config, "--step", "7000"], capture_output=True, check=True
    )
    return 1e3 * (time.perf_counter() - started_s)


if __name__ == "__main__":
    sys.exit(main())
