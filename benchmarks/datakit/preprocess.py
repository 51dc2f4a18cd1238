"""Preprocess: throughput of one and two workers beside the tokenizer alone, and memory at two sizes of input.

The corpus is the Python standard library's sources, repeated with another first line each time. Prints the peak of the
resident memory of the whole process tree at 0.1 and 1 GB of input, and interleaved repeats at 0.1 GB: the `tokenizers`
library alone in one process (the raw limit), one worker, two workers, whose stores must be the same byte for byte.
Ratios hold within a run. Ends with exit code 1 where memory grows by 15% or two workers are less than 1.6 times one.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil

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
    parser.add_argument("--small-mb", type=int, default=100)
    parser.add_argument("--large-mb", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="tokenizers", help="what tokenizes: tokenizers or gigatoken")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = make_corpus(folder / "small.jsonl", arguments.small_mb * 10**6)
        large = make_corpus(folder / "large.jsonl", arguments.large_mb * 10**6)
        tokenizer = folder / "tok.json"
        seed = make_corpus(folder / "seed.jsonl", 10**7)
        datakit("train-tokenizer", seed, "--vocab-size", 32768, "--output", tokenizer)
        peaks = {}
        for path in (small, large):
            store = folder / f"{path.stem}.store"
            summary, peaks[path] = preprocess(path, store, tokenizer, workers=2, backend=arguments.backend)
            size = f"{path.stat().st_size / 1e6:.0f} MB"
            print(f"{size}: peak {peaks[path] / 2**20:.0f} MiB with two workers, {summary['mb_per_s']:.2f} MB/s")
        growth = peaks[large] / peaks[small]
        print(f"memory at the large over the small input: {growth:.3f}")
        rates: dict[str, list[float]] = {"tokenizers alone": [], "one worker": [], "two workers": []}
        digests = set()
        for repeat in range(arguments.repeats):
            rates["tokenizers alone"].append(tokenize_alone(small, tokenizer))
            for what, workers in (("one worker", 1), ("two workers", 2)):
                store = folder / f"{workers}-{repeat}"
                summary, _ = preprocess(small, store, tokenizer, workers=workers, backend=arguments.backend)
                rates[what].append(summary["mb_per_s"])
                digests.add(digest(store))
    for what, values in rates.items():
        print(f"{what}: median {statistics.median(values):.2f} MB/s of {[round(value, 2) for value in values]}")
    alone, one, two = (statistics.median(values) for values in rates.values())
    print(f"two workers over one: {two / one:.2f}; one worker over tokenizers alone: {one / alone:.2f}")
    print(f"the bytes of all {2 * arguments.repeats} stores: {'the same' if len(digests) == 1 else 'DIFFERENT'}")
    return 0 if abs(growth - 1) < 0.15 and two / one >= 1.6 and len(digests) == 1 else 1


def make_corpus(path: Path, size_bytes: int) -> Path:
    """jsonl of about this size; every document is whole."""
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
    """The summary of one run, and the peak of its tree's resident memory in bytes."""
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
