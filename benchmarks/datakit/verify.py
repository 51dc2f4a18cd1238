"""Verify beside one sequential read of the same files (the raw limit) and beside md5, what is done without it.

The store is made of the texts of fast_preprocess.py and then merged with itself, with copies, to its size. Every read
is in a process of its own, which times itself without its start; cold means that the files were dropped from the page
cache before. Interleaved repeats, medians, ratios within the run; the processor's seconds (user and system) a GB hold
on a busy machine too.

    PYTHONPATH=. python benchmarks/datakit/verify.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.datakit.fast_preprocess import make_corpora, preprocess_words
from benchmarks.datakit.preprocess import datakit
from benchmarks.record import Record, add_option

TARGET = 0.8
TIMED = """
import json, os, sys, time
from pathlib import Path
{imports}
files = sorted(path for path in Path(sys.argv[1]).iterdir())
before, started_s = os.times(), time.perf_counter()
{work}
elapsed_s, after = time.perf_counter() - started_s, os.times()
print(json.dumps([elapsed_s, after.user - before.user, after.system - before.system]))
"""
READ = """
block = bytearray(8 << 20)
for file in files:
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(block):
            pass
"""
MD5 = """
for file in files:
    with file.open("rb") as stream:
        hashlib.file_digest(stream, "md5").hexdigest()
"""
PROGRAMS = {
    "raw read, 8 MiB blocks": TIMED.format(imports="", work=READ),
    "datakit verify": TIMED.format(imports="from datakit import verify", work="assert not verify(sys.argv[1])"),
    "md5 of every file": TIMED.format(imports="import hashlib", work=MD5),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, nargs="+", default=[Path(sys.prefix), Path("/usr/include")])
    parser.add_argument("--text-mb", type=int, default=400)
    parser.add_argument("--copies", type=int, default=8, help="of the texts' store, in the store that is read")
    parser.add_argument("--repeats", type=int, default=7)
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        store = make_store(Path(name), arguments.corpus, arguments.text_mb * 10**6, arguments.copies)
        size_gb = sum(file.stat().st_size for file in store.iterdir()) / 1e9
        print(f"{size_gb:.2f} GB in {len(list(store.iterdir()))} files")
        for is_cold in (True, False):
            outcome: dict[str, list[list[float]]] = {what: [] for what in PROGRAMS}
            for _ in range(arguments.repeats):
                for what, program in PROGRAMS.items():
                    if is_cold:
                        drop(store)
                    command = [sys.executable, "-c", program, str(store)]
                    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    outcome[what].append(json.loads(result.stdout))
            report("cold" if is_cold else "warm", outcome, size_gb, arguments.record)
    return 0


def make_store(folder: Path, roots: list[Path], text_bytes: int, num_copies: int) -> Path:
    corpus = make_corpora(folder, roots, {"texts": text_bytes, "seed": 10**7})
    tokenizer, once, store = folder / "tokenizer.json", folder / "once", folder / "store"
    datakit("train-tokenizer", corpus["seed"], "--vocab-size", 32768, "--output", tokenizer)
    command = [str(word) for word in preprocess_words(corpus["texts"], once, tokenizer, 2)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    merged = [sys.executable, "-m", "datakit", "merge", *[str(once)] * num_copies, "--output", str(store), "--copy"]
    subprocess.run(merged, check=True, stdout=subprocess.DEVNULL)
    return store


def drop(store: Path) -> None:
    """Have the system forget what it read of a store's files."""
    for file in store.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def report(state: str, times: dict[str, list[list[float]]], size_gb: float, record: Record) -> None:
    """Print a table; ratios to the raw read."""
    rates = dict[str, float]()
    print(f"{state:<24}  GB/s  of the raw read  user s/GB  system s/GB")
    base = 0.0
    for what, runs in times.items():
        elapsed_s, user_s, system_s = (statistics.median(column) for column in zip(*runs, strict=True))
        rates[what] = rate = size_gb / elapsed_s
        base = base or rate
        target = f"  (target >= {TARGET})" if what == "datakit verify" else ""
        cpu = f"{user_s / size_gb:>8.3f}  {system_s / size_gb:>11.3f}"
        print(f"{what:<24}  {rate:>4.2f}  {rate / base:>15.2f}  {cpu}{target}")
    ours, md5 = rates["datakit verify"], rates["md5 of every file"]
    record.add(f"`datakit verify`, {state}", ours, "GB/s", peer={"md5": md5}, limit={"raw read": base})


if __name__ == "__main__":
    sys.exit(main())
