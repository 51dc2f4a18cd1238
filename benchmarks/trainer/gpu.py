"""Tokens/s of models and layouts on GPUs, by the command that a user types, beside another tree and peers.

Each row trains for some steps on a token store of the standard library's sources; its figures are medians of the
metrics file's steps after the warm-up, "start s" is when the second step's line was there. `--before TREE` trains each
row with that checkout too, in turn; each `--peer` is a command that prints a line `RESULT ...`, run before the first
row and after the last. The last call of one GPU profiles a step of the 1b model by kind of kernel (step.py).

    python benchmarks/trainer/gpu.py --output DIR [--rows 1b 350m] [--before TREE] [--peer "COMMAND"]...
"""

import argparse
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.cli import Parser, run
from threefold.errors import UserError
from threefold.scratch import fresh_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WARMUP_STEPS = 5


@dataclass(frozen=True)
class Row:
    """One line of the table: a model, its batch and its layout."""

    model: str
    micro_batch_size: int
    global_batch_size: int
    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> list[object]:
        sizes = ["--micro-batch-size", self.micro_batch_size, "--global-batch-size", self.global_batch_size]
        return [HERE / f"{self.model}.toml", *sizes, "--tp", self.tp, "--pp", self.pp, "--dp", self.dp]


ROWS = {
    "1b": Row("1b", 8, 8),
    "1b-two": Row("1b", 8, 16),
    "350m": Row("350m", 32, 64),
    "3.8b": Row("3.8b", 16, 32),
    "1b-dp2": Row("1b", 8, 16, dp=2),
    "1b-tp2": Row("1b", 16, 16, tp=2),
    "1b-pp2": Row("1b", 1, 16, pp=2),
    "1b-dp4": Row("1b", 8, 32, dp=4),
    "1b-dp2-tp2": Row("1b", 16, 32, dp=2, tp=2),
    "1b-dp2-pp2": Row("1b", 1, 32, dp=2, pp=2),
    "1b-tp2-pp2": Row("1b", 2, 32, tp=2, pp=2),
}


def main() -> int:
    parser = Parser(prog="gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for all that the benchmark makes")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="rows to print; all that this machine's GPUs can hold")
    parser.add_argument("--train-steps", type=int, default=20, help="steps of each row, the first five left out")
    parser.add_argument(
        "--before", type=Path, metavar="TREE", help="another checkout, built in place, for each row too"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="COMMAND", help="prints a line `RESULT ...`")
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Train each row and print the table."""
    output = fresh_folder(arguments.output, "gpu.py")
    import torch  # what refuses flags and folders does not wait for it

    store, num_gpus = make_store(output), torch.cuda.device_count()
    rows = arguments.rows or [name for name, row in ROWS.items() if row.num_gpus <= num_gpus]
    trees = {"": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    table = [peer(command) for command in arguments.peer]
    for name in rows:
        for label, tree in trees.items():
            title = f"{name} {label}".strip()
            flags = ["--data.stores", store, "--train-steps", arguments.train_steps]
            steps, start_s = train(tree, output / f"{title}.jsonl", ROWS[name], *flags)
            table.append(figures(title, ROWS[name].num_gpus, steps, start_s))
            print(table[-1], flush=True)
    table += [peer(command) for command in arguments.peer]
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; tokens/s of each GPU")
    titles = "row                       tok/s/gpu  mfu    causal  step ms   comm ms  bubble ms  GiB    start s"
    print(f"{titles}  loss first -> last")
    print("\n".join(table))
    if num_gpus == 1:
        finish(python(ROOT, HERE / "step.py"))
    return 0


def make_store(output: Path) -> Path:
    """Return a token store of the standard library's sources."""
    library, corpus = Path(sysconfig.get_paths()["stdlib"]), output / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as out:
        for source in sorted(library.glob("**/*.py")):
            text = source.read_text(encoding="utf-8", errors="replace")
            if text.strip() and "site-packages" not in source.parts and "dist-packages" not in source.parts:
                out.write(json.dumps({"text": text}) + "\n")
    tokenizer, store = output / "tokenizer.json", output / "store"
    datakit = ROOT, "-m", "datakit"
    finish(python(*datakit, "train-tokenizer", corpus, "--vocab-size", 8192, "--output", tokenizer))
    flags = ["--tokenizer", tokenizer, "--append-eod", "--workers", os.cpu_count()]
    finish(python(*datakit, "preprocess", corpus, "--output", store, *flags))
    return store


def train(tree: Path, metrics: Path, row: Row, *flags: object) -> tuple[list[dict[str, Any]], float]:
    """Train a row with the code of `tree`; return the steps of its metrics file, and when the second was there.

    That is in seconds after the command was started.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", row.num_gpus]
    start = [*(launcher if row.num_gpus > 1 else []), "-m", "trainer", "train", *row.flags, *flags]
    began_s = time.monotonic()
    process = python(tree, *start, "--metrics", metrics)
    while process.poll() is None and len(steps_of(metrics)) < 2:
        time.sleep(0.05)
    start_s = time.monotonic() - began_s
    finish(process)
    return steps_of(metrics), start_s


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the steps of a metrics file; one that is being written is left out."""
    texts = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    lines = [json.loads(text) for text in texts if text.endswith("\n")]
    return [line for line in lines if "event" not in line]


def python(tree: Path, *arguments: object) -> "subprocess.Popen[bytes]":
    """Start Python with the packages of `tree`."""
    words = [interpreter(tree), *map(str, arguments)]
    print("+", " ".join(Path(word).name for word in words[1:]), flush=True)
    return subprocess.Popen(words, env=environment(tree), cwd=tree)


def finish(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a process; raise CalledProcessError if it failed."""
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)


@functools.cache
def interpreter(tree: Path) -> str:
    """Return the Python of a tree: its own where it has one, else this one if it imports the tree's packages."""
    own = tree / ".venv/bin/python"
    found = str(own) if own.exists() else sys.executable
    words = [found, "-c", "import trainer; print(trainer.__file__)"]
    imported = subprocess.run(words, env=environment(tree), cwd=tree, capture_output=True, text=True).stdout.strip()
    if not Path(imported).is_relative_to(tree):
        raise UserError(f"{found} in {tree} imports {imported or 'no trainer'} (hint: make setup in that tree)")
    return found


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}


def peer(command: str) -> str:
    """Run a peer; return its line of figures."""
    output = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    found = [line for line in output.stdout.splitlines() if line.startswith("RESULT")]
    line = found[0] if found else f"{shlex.split(command)[0]} failed: {(output.stderr or output.stdout)[-300:]!r}"
    print(line, flush=True)
    return line


def figures(name: str, num_gpus: int, steps: list[dict[str, Any]], start_s: float) -> str:
    """Return the line of a row: medians of the steps after the warm-up, and when the second step was there."""

    def median(key: str) -> float:
        return statistics.median(step[key] for step in steps[WARMUP_STEPS:])

    return (
        f"{name:<25} {median('tokens_per_s') / num_gpus:>9,.0f}  {median('mfu'):.1%}  {median('mfu_causal'):.1%}   "
        f"{1e3 * median('step_s'):>7.1f}  {1e3 * median('comm_s'):>8.1f}  {1e3 * median('bubble_s'):>9.1f}  "
        f"{median('memory_gib'):>5.1f}  {start_s:>7.1f}  {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
