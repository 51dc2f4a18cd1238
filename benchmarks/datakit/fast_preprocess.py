"""jsonl to tokens with the fast engine: datakit, the engine alone, and both of Megatron-LM's scripts.

The corpus is all text (*.py, *.h, *.md, ...) under some folders, by default this Python's own and /usr/include. Each
program runs as a process of its own on a small and a large part of it and on one document, interleaved: start-up is the
time for one document, the steady rate comes from the difference between large and small. Medians, and ratios within the
run. The peers preprocess_data_fast.py and preprocess_data.py need a checkout of Megatron-LM and a Python that can run
it; the second, some fifty times slower, gets two small corpora of its own.

    PYTHONPATH=. python benchmarks/datakit/fast_preprocess.py [--megatron CHECKOUT --megatron-python PYTHON]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.datakit.preprocess import datakit, resident_bytes
from benchmarks.record import Record, add_option

SUFFIXES = {".py", ".pyi", ".h", ".hpp", ".c", ".cpp", ".md", ".rst", ".txt"}
ENGINE_ALONE = """
import sys
from gigatoken import JsonlFileSource, Tokenizer
tokens = Tokenizer(sys.argv[2]).encode_files(JsonlFileSource([sys.argv[1]]), parallel=True)
"""


@dataclass
class Program:
    """One contender: how it is started on a corpus file, on which three (one document, a smaller and a larger part),
    and what was measured, by corpus.
    """

    name: str
    command: Callable[[Path, Path], Sequence[object]]
    corpora: tuple[str, str, str] = ("one", "small", "large")
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, nargs="+", default=[Path(sys.prefix), Path("/usr/include")])
    parser.add_argument("--small-mb", type=int, default=50)
    parser.add_argument("--large-mb", type=int, default=250)
    parser.add_argument("--slow-mb", type=int, nargs=2, default=[4, 16], help="the two corpora of preprocess_data.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--megatron-python", default=sys.executable, help="Python that can run it")
    add_option(parser)
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes_mb = dict(
            zip(("tiny", "little", "small", "large"), (*arguments.slow_mb, arguments.small_mb, arguments.large_mb))
        )
        corpora = make_corpora(folder, arguments.corpus, {name: size * 10**6 for name, size in sizes_mb.items()})
        tokenizer = folder / "tokenizer.json"
        datakit("train-tokenizer", corpora["small"], "--vocab-size", 32768, "--output", tokenizer)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        programs = [
            Program("engine alone", lambda corpus, _: [sys.executable, "-c", ENGINE_ALONE, corpus, tokenizer]),
            Program("datakit", lambda corpus, out: preprocess_words(corpus, out, tokenizer, arguments.workers)),
        ]
        if arguments.megatron:
            programs.append(Program("preprocess_data_fast", lambda corpus, out: [
                arguments.megatron_python, arguments.megatron / "tools" / "preprocess_data_fast.py", "--input", corpus,
                "--output-prefix", out, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder,
                "--use-gigatoken",
            ]))  # fmt: skip
            programs.append(Program("preprocess_data", lambda corpus, out: [
                arguments.megatron_python, arguments.megatron / "tools" / "preprocess_data.py", "--input", corpus,
                "--output-prefix", out, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder,
                "--workers", arguments.workers,
            ], ("one", "tiny", "little")))  # fmt: skip
        for _ in range(arguments.repeats):
            for corpus, path in corpora.items():
                for program in programs:
                    if corpus in program.corpora:
                        measure(program, corpus, path, folder / "out")
        report(programs, {name: path.stat().st_size / 1e6 for name, path in corpora.items()}, arguments.record)
    return 0


def preprocess_words(source: Path, out: Path, tokenizer: Path, num_workers: int) -> list[object]:
    """Return the command line of datakit preprocess with the fast engine."""
    return [
        sys.executable, "-m", "datakit", "preprocess", source, "--output", out, "--tokenizer", tokenizer,
        "--append-eod", "--workers", num_workers, "--tokenizer-backend", "gigatoken",
    ]  # fmt: skip


def texts_of(roots: Sequence[Path]) -> Iterator[str]:
    """Yield the texts under some folders, in the order of their paths."""
    for root in roots:
        for source in sorted(root.rglob("*")):
            if source.suffix in SUFFIXES and source.is_file():
                yield source.read_text(errors="ignore")


def make_corpora(folder: Path, roots: Sequence[Path], sizes_bytes: dict[str, int]) -> dict[str, Path]:
    """Write jsonl files of the first texts up to each of these sizes, and one of a single document, `one`."""
    limits = {"one": 1, **sizes_bytes}
    paths = {name: folder / f"{name}.jsonl" for name in limits}
    files = {name: path.open("w") for name, path in paths.items()}
    written = 0
    for text in texts_of(roots):
        line = json.dumps({"text": text}) + "\n"
        for name, file in files.items():
            if written < limits[name]:
                file.write(line)
        written += len(line)
        if written >= max(limits.values()):
            break
    for file in files.values():
        file.close()
    return paths


def measure(program: Program, corpus: str, path: Path, out: Path) -> None:
    """Run once on a corpus; note the seconds and the peak of the process tree's resident memory."""
    shutil.rmtree(out, ignore_errors=True)
    command = [str(word) for word in program.command(path, out)]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        program.peak_bytes = max(program.peak_bytes, resident_bytes(process.pid))
        time.sleep(0.02)
    seconds = time.monotonic() - started
    assert process.returncode == 0, f"{program.name}: {process.communicate()[1].decode()[-2000:]}"
    program.seconds.setdefault(corpus, []).append(seconds)


def report(programs: Sequence[Program], sizes_mb: dict[str, float], record: Record) -> None:
    """Print a table with ratios to the engine alone, and datakit's figures beside their targets; record these."""
    print("program               start-up s  steady MB/s  of the engine  peak MiB")
    starts, rates = dict[str, float](), dict[str, float]()
    for program in programs:
        one, small, large = program.corpora
        seconds = {name: statistics.median(found) for name, found in program.seconds.items()}
        starts[program.name] = seconds[one]
        rates[program.name] = rate = (sizes_mb[large] - sizes_mb[small]) / (seconds[large] - seconds[small])
        share, peak_mib = rate / rates["engine alone"], program.peak_bytes / 2**20
        print(f"{program.name:<21} {seconds[one]:>10.2f}  {rate:>11.1f}  {share:>13.2f}  {peak_mib:>8.0f}")
        print(f"    {json.dumps({name: [round(s, 2) for s in found] for name, found in program.seconds.items()})}")
    print(f"datakit's start-up: {starts['datakit']:.2f} s (target <= 0.7 s)")
    targets = {"engine alone": 0.85, "preprocess_data_fast": 2, "preprocess_data": 30}
    for name in rates.keys() & targets.keys():
        ratio = rates["datakit"] / rates[name]
        print(f"datakit's steady rate over that of {name}: {ratio:.2f} (target >= {targets[name]})")
    ours, claim = rates.pop("datakit"), "text to a token store"
    limit = {"the engine alone, nothing written": rates.pop("engine alone")}
    peaks = {program.name: program.peak_bytes / 2**20 for program in programs}
    peers = {name: f"Megatron-LM's {name}.py" for name in rates}
    record.add(claim, ours, "MB/s", peer={title: rates[name] for name, title in peers.items()}, limit=limit)
    memory = {title: peaks[name] for name, title in peers.items()}
    record.add(f"{claim}: memory", peaks["datakit"], "MiB", peer=memory)


if __name__ == "__main__":
    sys.exit(main())
