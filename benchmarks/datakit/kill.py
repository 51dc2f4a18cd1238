"""preprocess, archive, unarchive, convert and merge killed with SIGKILL at random moments, run again: the same bytes.

    PYTHONPATH=. python benchmarks/datakit/kill.py [--rounds 40] [--seed 1]

The rounds go in turn through the commands, on a local disk and, where a command takes a URL, on a real S3 server that
this program starts; files are of several parts of an upload. A run without a kill tells how long a command lives and
what it makes. Of every three kills one hits the command alone, whose workers live on. The same command then runs again
and has to make the same files, byte for byte, and to leave nothing beside them: no hidden file, note, lock or empty
folder in the output, nothing in TMPDIR, no unfinished upload. Prints a table, and what is wrong; exit code 1 where
anything is.
"""

import argparse
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
import xxhash

from benchmarks.killing import kill_after, main_of, wait_until_gone
from datakit import write_store
from threefold.storage import open_storage
from threefold.storage.stale_uploads import abort_stale_uploads

COMMANDS = ("preprocess", "archive", "unarchive", "convert", "merge")
TEXT_BYTES, ITEM_SIZE, NUM_WORKERS = 36_000_000, "11MiB", 2
NUM_SHARDS, SHARD_DOCUMENTS, DOCUMENT_TOKENS = 3, 500, 10_000
VOCAB_SIZE = 300


@dataclass
class Case:
    """One command that writes one output, and what became of its rounds."""

    name: str
    place: str
    words: Callable[[str], list[object]]  # of the output
    start_s: float = 0.0
    life_s: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)
    killed: int = 0
    too_late: int = 0
    faults: list[str] = field(default_factory=list)

    def command(self, output: str) -> list[str]:
        """Return the command line that makes an output."""
        return [sys.executable, "-m", "datakit", *map(str, self.words(output))]

    def live(self, output: str) -> None:
        """Run to the end without a kill, and note what is made."""
        started_s = time.monotonic()
        subprocess.run(self.command(output), check=True, capture_output=True)
        self.life_s = time.monotonic() - started_s
        self.digests = contents(output)
        assert self.digests, f"{self.name} has made nothing"

    def kill_once(self, output: str, rng: random.Random) -> None:
        """One round: killed at a moment between its start and its end, run again, checked."""
        moment_s = rng.uniform(self.start_s, self.life_s)
        command = self.command(output)
        others = kill_after(command, moment_s, command_only=rng.random() < 1 / 3)
        if others is None:  # the machine is quieter than when it lived undisturbed
            self.too_late += 1
            self.life_s = moment_s
        else:
            self.killed += 1
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        wait_until_gone(others or [])
        faults = [] if again.returncode == 0 else [f"it fails: {again.stderr.strip()[-500:]}"]
        found = contents(output)
        faults += [f"{name} is missing" for name in sorted(self.digests.keys() - found.keys())]
        faults += [f"{name} is left" for name in sorted(found.keys() - self.digests.keys())]
        faults += [
            f"{name} has other bytes" for name in sorted(found) if found[name] != self.digests.get(name, found[name])
        ]
        faults += [f"{name} is left in TMPDIR" for name in sorted(os.listdir(tempfile.gettempdir()))]
        if output.startswith("s3://"):
            uploads = abort_stale_uploads(open_storage(output), older_than_s=0.0)
            faults += [f"an unfinished upload of {key} is left" for key in uploads]
        self.faults += [f"after a kill at {moment_s:.2f} s: {fault}" for fault in faults]


def kill_all(folder: Path, arguments: argparse.Namespace) -> int:
    """Run all rounds, print their table and return the exit code."""
    started_s = time.monotonic()
    every = make_cases(folder)
    cases = [case for case in every if case.place in arguments.places and case.name in arguments.commands]
    temporary = folder / "tmp"  # of the commands, and of nobody else
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    print(f"seed {arguments.seed}, {arguments.rounds} kills, {os.cpu_count()} cores", flush=True)
    begun_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "datakit", "--help"], check=True, capture_output=True)
    start_s = time.monotonic() - begun_s
    outputs = {"local": str(folder / "output"), "s3": "s3://test/output"}
    rng = random.Random(arguments.seed)
    for case in cases:
        case.start_s = start_s
        case.live(outputs[case.place])
        remove(outputs[case.place])
    for case in itertools.cycle(cases):
        if sum(each.killed for each in cases) == arguments.rounds:
            break
        case.kill_once(outputs[case.place], rng)
        remove(outputs[case.place])
    print(f"{'command':<12}{'place':<7}{'life':>7}{'killed':>8}{'ended before':>14}{'faults':>8}")
    for case in cases:
        life_s = f"{case.life_s:.1f} s"
        print(f"{case.name:<12}{case.place:<7}{life_s:>7}{case.killed:>8}{case.too_late:>14}{len(case.faults):>8}")
        for fault in case.faults:
            print(f"    {fault}")
    num_faults = sum(len(case.faults) for case in cases)
    print(f"{num_faults} faults (target 0) in {time.monotonic() - started_s:.0f} s")
    arguments.record.add(
        "faults after commands were killed at random moments and run again", num_faults, f"in {arguments.rounds} kills"
    )
    return 1 if num_faults else 0


def make_cases(folder: Path) -> list[Case]:
    """Return the commands, with what they read: a text and its tokenizer, a store and its archive."""
    rng = np.random.default_rng(0)
    text, seed, tokenizer = (folder / name for name in ("text.jsonl", "seed.jsonl", "tok.json"))
    letters = np.full(TEXT_BYTES, ord(" "), np.uint8)
    letters[1::2] = rng.integers(ord("a"), ord("z") + 1, len(letters) // 2)  # one token of two bytes every two bytes
    lines = [orjson.dumps({"text": chunk.tobytes().decode()}) + b"\n" for chunk in np.split(letters, 1000)]
    text.write_bytes(b"".join(lines))
    seed.write_bytes(lines[0])
    store, archived = folder / "store", folder / "archive"
    documents = rng.integers(0, 256, (NUM_SHARDS * SHARD_DOCUMENTS, DOCUMENT_TOKENS))
    write_store(store, documents, vocab_size=VOCAB_SIZE, shard_documents=SHARD_DOCUMENTS)
    run = [sys.executable, "-m", "datakit"]
    train = ["train-tokenizer", seed, "--vocab-size", VOCAB_SIZE, "--output", tokenizer]
    for words in (train, ["archive", store, "--output", archived]):
        subprocess.run([*run, *map(str, words)], check=True, capture_output=True)
    workers = ["--workers", NUM_WORKERS]
    prefixes = [file.with_suffix("") for file in sorted(store.glob("*.bin"))]

    def preprocess(output: str) -> list[object]:
        return ["preprocess", text, "--output", output, "--tokenizer", tokenizer, "--item-size", ITEM_SIZE, *workers]

    def archive(output: str) -> list[object]:
        return ["archive", store, "--output", output, *workers]

    def convert(output: str) -> list[object]:
        return ["convert", *prefixes, "--output", output, "--tokenizer", tokenizer, "--copy"]

    def merge(output: str) -> list[object]:
        return ["merge", store, store, "--output", output, "--copy"]

    return [
        Case("preprocess", "local", preprocess),
        Case("preprocess", "s3", preprocess),
        Case("archive", "local", archive),
        Case("archive", "s3", archive),
        Case("unarchive", "local", lambda output: ["unarchive", archived, "--output", output, *workers]),
        Case("convert", "local", convert),
        Case("convert", "s3", convert),
        Case("merge", "local", merge),
        Case("merge", "s3", merge),
    ]


def contents(output: str) -> dict[str, str]:
    """Return the digest of each file in a place by name; of a local one also the empty folders, which end in "/"."""
    if output.startswith("s3://"):
        storage = open_storage(output)
        return {key: xxhash.xxh3_64_hexdigest(storage.read(key)) for key in storage.list_keys()}
    digests = {}
    for folder, folders, files in os.walk(output):
        for name in files:
            path = Path(folder, name)
            digests[str(path.relative_to(output))] = xxhash.xxh3_64_hexdigest(path.read_bytes())
        if not folders and not files:
            digests[f"{os.path.relpath(folder, output)}/"] = ""
    return digests


def remove(output: str) -> None:
    """Remove what a command has made."""
    if output.startswith("s3://"):
        storage = open_storage(output)
        storage.delete(list(storage.list_keys()))
    else:
        shutil.rmtree(output)


if __name__ == "__main__":
    sys.exit(main_of(__doc__, COMMANDS, kill_all))
