"""Preprocess killed with SIGKILL at random points and rerun: the same bytes, and how much work is done twice.

Each time the command is killed with all that it started, at a random point of an undisturbed run's time, and the same
command is run to its end. Work done twice is what the killed run had tokenized beyond its sealed items: the tokens on
disk that no record seals, and 1 MiB a file for what was still buffered, over all tokens: an upper bound. It is at most
workers x item / input; an item is the input's 1/32 to 1/16, at least 4 MiB and at most 256 MiB, or --item-size. The
bytes of runs with 1, 2 and 4 workers, and of Ray where it is installed, are compared too.

    PYTHONPATH=. python benchmarks/datakit/lost_work.py
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.datakit.fast_preprocess import make_corpora, preprocess_words
from benchmarks.datakit.preprocess import datakit, digest
from benchmarks.killing import kill_after
from benchmarks.record import add_option

BUFFER_BYTES = 1 << 20
TARGET = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, nargs="+", default=[Path(sys.prefix), Path("/usr/include")])
    parser.add_argument("--input-mb", type=int, default=400)
    parser.add_argument("--item-size", default="", help="of a work item, like 8MiB; default: datakit's own")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    add_option(parser)
    arguments = parser.parse_args()
    extra = ["--item-size", arguments.item_size] if arguments.item_size else []
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpora = make_corpora(folder, arguments.corpus, {"input": arguments.input_mb * 10**6, "seed": 10**7})
        tokenizer, out = folder / "tokenizer.json", folder / "out"
        datakit("train-tokenizer", corpora["seed"], "--vocab-size", 32768, "--output", tokenizer)

        def command(num_workers: int, *more: str) -> list[str]:
            words = preprocess_words(corpora["input"], out, tokenizer, num_workers)
            return [str(word) for word in [*words, *extra, *more, "--json"]]

        started_s = time.monotonic()
        whole = finish(command(arguments.workers))
        undisturbed_s = time.monotonic() - started_s
        expected, total_bytes = digest(out), sum(file.stat().st_size for file in out.glob("*.bin"))
        size_mb = corpora["input"].stat().st_size / 1e6
        print(f"{size_mb:.0f} MB in {whole['num_items']} items, {undisturbed_s:.1f} s with {arguments.workers} workers")
        shares, differing, num_late = [], 0, 0
        while len(shares) < arguments.kills:
            shutil.rmtree(out)
            if kill_after(command(arguments.workers), rng.uniform(0, undisturbed_s)) is None:
                num_late += 1
                continue
            shares.append(unsealed_bytes(out) / total_bytes)
            rerun = finish(command(arguments.workers))
            differing += digest(out) != expected
            print(f"    {rerun['num_items_done_before']} items sealed, {100 * shares[-1]:.2f}% of the work lost")
        print(f"{arguments.kills} runs killed ({num_late} more had ended before): {differing} differ (target 0)")
        print(
            f"work done twice a kill: mean {100 * statistics.mean(shares):.2f}%, most {100 * max(shares):.2f}% "
            f"(target <= {100 * TARGET:.0f}%); bound {100 * arguments.workers / whole['num_items']:.2f}%"
        )
        bound = {"a work item a worker": 100 * arguments.workers / whole["num_items"]}
        arguments.record.add("work done twice after a kill", 100 * statistics.mean(shares), "% of it", limit=bound)
        engines = [("1 worker", command(1)), ("2 workers", command(2)), ("4 workers", command(4))]
        if find_spec("ray"):
            engines.append(("Ray", command(2, "--engine", "ray")))
        for what, words in engines:
            shutil.rmtree(out)
            finish(words)
            print(f"{what}: {'the same bytes' if digest(out) == expected else 'OTHER BYTES'}")
    return 0


def finish(command: list[str]) -> dict[str, int]:
    """Run a command to its end; its summary."""
    result = subprocess.run(command, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()[-2000:]
    summary: dict[str, int] = json.loads(result.stdout)
    return summary


def unsealed_bytes(out: Path) -> int:
    """Bytes of the tokens that a killed run had made for items it did not seal, with what may have been buffered."""
    records = [json.loads(file.read_bytes()) for file in out.glob(".work/items/*.json")]
    sealed = {entry["name"] for record in records for entry in record["shards"][""]}
    lost = [file for file in out.rglob("*.bin") if file.stem not in sealed]
    return sum(file.stat().st_size + BUFFER_BYTES * (file.parent != out) for file in lost)


if __name__ == "__main__":
    sys.exit(main())
