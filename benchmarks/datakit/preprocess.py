"""Preprocess: throughput of one and two workers beside the tokenizer alone, and memory at several sizes of input.

The corpus is the Python standard library's sources, repeated with another first line each time. Prints the peak of the
resident memory of the whole process tree at each size of input, and interleaved repeats at the first size: the
`tokenizers` library alone in one process (the raw limit), one worker, two workers, whose stores must be the same byte
for byte. Ratios hold within a run. Memory alone, with the fast engine:

    PYTHONPATH=. python benchmarks/datakit/preprocess.py --sizes-mb 200 800 3000 --backend gigatoken --repeats 0
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.record import add_option

TOKENIZE_ALONE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer, num_bytes, batch = Tokenizer.from_file(sys.argv[2]), 0, []
started_s = time.monotonic()
with open(sys.argv[1], "rb") as file:
    for line in file:
        num_bytes += len(line)
        batch.append(json.loads(line)["text"])
        if len(batch) == 64:
            tokenizer.encode_batch_fast(batch)
            batch = []
    tokenizer.encode_batch_fast(batch)
print(num_bytes / 1e6 / (time.monotonic() - started_s))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--repeats", type=int, default=3, help="of the rates, at the first size; 0: memory alone")
    parser.add_argument("--backend", default="tokenizers", help="what tokenizes: tokenizers or gigatoken")
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = folder / "tok.json"
        seed = make_corpus(folder / "seed.jsonl", 10**7)
        datakit("train-tokenizer", seed, "--vocab-size", 32768, "--output", tokenizer)
        measure_memory(folder, tokenizer, arguments)
        if arguments.repeats:
            corpus = make_corpus(folder / "rates.jsonl", arguments.sizes_mb[0] * 10**6)
            measure_rates(folder, tokenizer, corpus, arguments)
    return 0


def measure_memory(folder: Path, tokenizer: Path, arguments: argparse.Namespace) -> None:
    """Print and record the peak of two workers and their parent at each size."""
    peaks = []
    for size_mb in arguments.sizes_mb:
        corpus, store = make_corpus(folder / "memory.jsonl", size_mb * 10**6), folder / "memory.store"
        summary, peak = preprocess(corpus, store, tokenizer, workers=2, backend=arguments.backend)
        shutil.rmtree(store)
        corpus.unlink()
        peaks.append(peak)
        print(f"{size_mb} MB: peak {peak / 2**20:.0f} MiB with two workers, {summary['mb_per_s']:.2f} MB/s")
        arguments.record.add(f"memory of preprocess, {size_mb} MB, {arguments.backend}", peak / 2**20, "MiB")
    print(f"memory, most over least: {max(peaks) / min(peaks):.3f} (target <= 1.15)")
    print(f"memory, most: {max(peaks) / 1e9:.2f} GB (target <= 1 GB)")


def measure_rates(folder: Path, tokenizer: Path, corpus: Path, arguments: argparse.Namespace) -> None:
    """Print and record rates of the tokenizer alone, of one worker and of two, and whether all stores are the same."""
    rates: dict[str, list[float]] = {"tokenizers alone": [], "one worker": [], "two workers": []}
    digests = set()
    for repeat in range(arguments.repeats):
        rates["tokenizers alone"].append(tokenize_alone(corpus, tokenizer))
        for what, workers in (("one worker", 1), ("two workers", 2)):
            store = folder / f"{workers}-{repeat}"
            summary, _ = preprocess(corpus, store, tokenizer, workers=workers, backend=arguments.backend)
            rates[what].append(summary["mb_per_s"])
            digests.add(digest(store))
            shutil.rmtree(store)
    for what, values in rates.items():
        print(f"{what}: median {statistics.median(values):.2f} MB/s of {[round(value, 2) for value in values]}")
    alone, one, two = (statistics.median(values) for values in rates.values())
    print(f"two workers over one: {two / one:.2f} (target >= 1.6); one worker over tokenizers alone: {one / alone:.2f}")
    print(f"the bytes of all {2 * arguments.repeats} stores: {'the same' if len(digests) == 1 else 'DIFFERENT'}")
    for what, rate in (("one worker", one), ("two workers", two)):
        claim = f"preprocess by {arguments.backend}, {what}"
        arguments.record.add(claim, rate, "MB/s", limit={"tokenizers alone, one process": alone})


def make_corpus(path: Path, size_bytes: int) -> Path:
    """Write jsonl of about this size; every document is whole."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [source.read_text(errors="ignore") for source in sorted(library.glob("**/*.py"))
             if "site-packages" not in source.parts]  # fmt: skip
    written, copy = 0, 0
    with path.open("w") as file:
        while written < size_bytes:
            for text in texts:
                if written >= size_bytes:
                    break
                written += file.write(json.dumps({"text": f"# copy {copy}\n{text}"}) + "\n")
            copy += 1
    return path


def datakit(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "datakit", *map(str, words)], check=True, stderr=subprocess.DEVNULL)


def preprocess(path: Path, store: Path, tokenizer: Path, *, workers: int, backend: str) -> tuple[dict[str, float], int]:
    """Return the summary of one run, and the peak of its tree's resident memory in bytes."""
    command = [
        sys.executable, "-m", "datakit", "preprocess", path, "--output", store, "--tokenizer", tokenizer,
        "--append-eod", "--workers", workers, "--tokenizer-backend", backend, "--json",
    ]  # fmt: skip
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident_bytes(process.pid))
        time.sleep(0.1)
    assert process.stdout is not None, "stdout is a pipe"
    assert process.returncode == 0, f"preprocess ended with {process.returncode}"
    return json.loads(process.stdout.read()), peak


def resident_bytes(pid: int) -> int:
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0
    return total


def digest(store: Path) -> str:
    """MD5 over the names and bytes of all files of a store."""
    hasher = hashlib.md5()
    for file in sorted(store.rglob("*")):
        hasher.update(f"{file.relative_to(store)}\n".encode())
        if file.is_file():
            with file.open("rb") as stream:
                hasher.update(hashlib.file_digest(stream, "md5").digest())
    return hasher.hexdigest()


def tokenize_alone(path: Path, tokenizer: Path) -> float:
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", TOKENIZE_ALONE, str(path), str(tokenizer)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


if __name__ == "__main__":
    sys.exit(main())
