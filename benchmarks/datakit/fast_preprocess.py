"""jsonl to tokens with the fast engine: datakit, the engine alone, and Megatron-LM's preprocess_data_fast.

The corpus is all text (*.py, *.h, *.md, ...) under some folders, by default this Python's own and /usr/include. Each
program runs as a process of its own on a small and a large part of it and on one document, interleaved: start-up is the
time for one document, the steady rate comes from the difference between large and small. Medians, and ratios within the
run. The peer needs a checkout of Megatron-LM and a Python that can run it.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.datakit.preprocess import datakit, resident_bytes

SUFFIXES = {".py", ".pyi", ".h", ".hpp", ".c", ".cpp", ".md", ".rst", ".txt"}
ENGINE_ALONE = """
import sys
from gigatoken import JsonlFileSource, Tokenizer
tokens = Tokenizer(sys.argv[2]).encode_files(JsonlFileSource([sys.argv[1]]), parallel=True)
"""


@dataclass
class Program:
    """One contender: how it is started on a corpus file, and what was measured, by corpus."""

    name: str
    command: Callable[[Path, Path], Sequence[object]]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, nargs="+", default=[Path(sys.prefix), Path("/usr/include")])
    parser.add_argument("--small-mb", type=int, default=50)
    parser.add_argument("--large-mb", type=int, default=250)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--megatron-python", default=sys.executable, help="Python that can run it")
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpora = make_corpora(folder, arguments.corpus, arguments.small_mb * 10**6, arguments.large_mb * 10**6)
        tokenizer = folder / "tokenizer.json"
        datakit("train-tokenizer", corpora["small"], "--vocab-size", 32768, "--output", tokenizer)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        programs = [
            Program("engine alone", lambda corpus, _: [sys.executable, "-c", ENGINE_ALONE, corpus, tokenizer]),
            Program("datakit", lambda corpus, out: [
                sys.executable, "-m", "datakit", "preprocess", corpus, "--output", out, "--tokenizer", tokenizer,
                "--append-eod", "--workers", arguments.workers, "--tokenizer-backend", "gigatoken",
            ]),
        ]  # fmt: skip
        if arguments.megatron:
            programs.append(Program("preprocess_data_fast", lambda corpus, out: [
                arguments.megatron_python, arguments.megatron / "tools" / "preprocess_data_fast.py", "--input", corpus,
                "--output-prefix", out, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder,
                "--use-gigatoken",
            ]))  # fmt: skip
        for _ in range(arguments.repeats):
            for corpus, path in corpora.items():
                for program in programs:
                    measure(program, corpus, path, folder / "out")
        extra_mb = (corpora["large"].stat().st_size - corpora["small"].stat().st_size) / 1e6
    report(programs, extra_mb)
    return 0


def make_corpora(folder: Path, roots: Sequence[Path], small_bytes: int, large_bytes: int) -> dict[str, Path]:
    """Three jsonl files: one document, the first small_bytes and the first large_bytes of all texts."""
    paths = {name: folder / f"{name}.jsonl" for name in ("one", "small", "large")}
    limits = {"one": 1, "small": small_bytes, "large": large_bytes}
    files = {name: path.open("w") for name, path in paths.items()}
    written = 0
    for root in roots:
        for source in sorted(root.rglob("*")):
            if source.suffix not in SUFFIXES or not source.is_file() or written >= large_bytes:
                continue
            line = json.dumps({"text": source.read_text(errors="ignore")}) + "\n"
            for name, file in files.items():
                if written < limits[name]:
                    file.write(line)
            written += len(line)
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


def report(programs: Sequence[Program], extra_mb: float) -> None:
    """Print a table; ratios to the engine alone."""
    print("program               start-up s  steady MB/s  of the engine  peak MiB")
    base = 0.0
    for program in programs:
        one, small, large = (statistics.median(program.seconds[name]) for name in ("one", "small", "large"))
        rate = extra_mb / (large - small)
        base = base or rate
        print(
            f"{program.name:<21} {one:>10.2f}  {rate:>11.1f}  {rate / base:>13.2f}  {program.peak_bytes / 2**20:>8.0f}"
        )
        print(f"    {json.dumps({name: [round(s, 2) for s in found] for name, found in program.seconds.items()})}")


if __name__ == "__main__":
    sys.exit(main())
