"""Tokens/s of models and layouts on GPUs, by the command that a user types, beside another tree and peers.

Each row trains for some steps on a token store of the standard library's sources; its figures are medians of the
metrics file's steps after the warm-up, "start s" is when the second step's line was there. `--before TREE` trains each
row with that checkout too, in turn. With `--peers FOLDER` each row's peers run after it: `FOLDER/run.sh single COMMAND`
trains one on NPROC GPUs and prints a line `RESULT ... tok/s/gpu=...`. At the end each row is compared with its peers,
and with the row that it should come near to: of one GPU and as large a micro-batch, or of another schedule. `--profile`
profiles a step of each row by kind of kernel (step.py), whose trace is in DIR/ROW.trace.json.gz.

    python benchmarks/trainer/gpu.py --output DIR [--gpus 4 | --rows 1b 350m] [--before TREE] [--peers FOLDER]
"""

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import add_option
from threefold.cli import Parser, run
from threefold.errors import UserError
from threefold.scratch import fresh_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WARMUP_STEPS = 5


@dataclass(frozen=True)
class Row:
    """One line of the table: a model, its batch and its layout; the row that it compares with, and its peers."""

    model: str
    micro_batch_size: int
    global_batch_size: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    more: tuple[object, ...] = ()
    beside: str = ""
    peers: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def sizes(self) -> list[object]:
        sizes = ["--micro-batch-size", self.micro_batch_size, "--global-batch-size", self.global_batch_size]
        layout = ["--tp", self.tp, "--pp", self.pp, "--dp", self.dp]
        if self.cp > 1:  # not a flag of older trees
            layout += ["--cp", self.cp]
        return [*sizes, *layout, *self.more]

    @property
    def flags(self) -> list[object]:
        return [HERE / f"{self.model}.toml", *self.sizes]


TITAN, MCORE = "tt.py --model 1b", "mc.py --model 1b"
TITAN_PP, MCORE_PP = f"{TITAN} --bs 16 --pp 2 --mbs 1", f"{MCORE} --mbs 1 --nmb 16 --pp 2"
ZERO_BUBBLE, TWO_STAGES, IN_PARTS = ("--schedule", "zb-h1"), ("--vpp", 2), ("--tp-overlap-parts", 4)
ZERO_2, ZERO_3 = ("--zero-stage", 2), ("--zero-stage", 3)
NORMS, MLP = ("--recompute", "selective"), ("--recompute", "selective", "--recompute-modules", "norms,mlp")
FULL, KEPT = ("--recompute", "full"), ("--recompute", "full", "--recompute-keep", "attention")
LONG, LONGER = ("--train.seq-length", 65536), ("--train.seq-length", 131072)
DOCUMENTS = ("--data.document-mask", "true")
TITAN_4B, TITAN_8B = "tt.py --model 4b", "tt.py --model 8b"
TITAN_MOE = "tt.py --model moe1 --bs 4 --balanced 1"
TITAN_LONG = f"{TITAN} --bs 1 --seq 65536 --cp 2 --steps 8 --warm 3"
TITAN_LONGER = f"{TITAN_8B} --bs 1 --seq 131072 --cp 4 --ac full --steps 5 --warm 2"
ROWS = {
    "1b": Row("1b", 8, 8, peers=(f"{TITAN} --bs 8", f"{MCORE} --mbs 4")),
    "1b-two": Row("1b", 8, 16),
    "1b-by-1": Row("1b", 1, 16),
    "1b-by-2": Row("1b", 2, 32),
    "1b-by-16": Row("1b", 16, 16),
    "350m": Row("350m", 32, 64),
    "3.8b": Row("3.8b", 16, 32),
    "1b-dp2": Row("1b", 8, 16, dp=2, beside="1b", peers=(f"{TITAN} --bs 8", f"{MCORE} --mbs 4 --nmb 2")),
    "1b-tp2": Row("1b", 16, 16, tp=2, beside="1b-by-16",
                  peers=(f"{TITAN} --bs 16 --tp 2 --pure_bf16 1", f"{MCORE} --mbs 4 --nmb 2 --tp 2")),
    "1b-tp2-by-2": Row("1b", 2, 32, tp=2, beside="1b-by-2"),
    "1b-tp2-parts": Row("1b", 16, 16, tp=2, more=IN_PARTS, beside="1b-tp2"),
    "1b-pp2": Row("1b", 1, 16, pp=2, beside="1b-by-1", peers=(f"{TITAN_PP} --pure_bf16 1", MCORE_PP)),
    "1b-pp2-zb": Row("1b", 1, 16, pp=2, more=ZERO_BUBBLE, beside="1b-pp2"),
    "1b-pp2-vpp2": Row("1b", 1, 16, pp=2, more=TWO_STAGES, beside="1b-pp2", peers=(f"{MCORE_PP} --vpp 2",)),
    "1b-dp4": Row("1b", 8, 32, dp=4, beside="1b", peers=(f"{TITAN} --bs 8", f"{MCORE} --mbs 4 --nmb 2")),
    "1b-dp4-bf16": Row("1b", 8, 32, dp=4, more=("--grad-reduce", "bf16"), beside="1b-dp4"),
    "1b-dp2-tp2": Row("1b", 16, 32, dp=2, tp=2, beside="1b-by-16",
                      peers=(f"{TITAN} --bs 16 --tp 2", f"{MCORE} --mbs 4 --nmb 2 --tp 2")),
    "1b-dp2-tp2-parts": Row("1b", 16, 32, dp=2, tp=2, more=IN_PARTS, beside="1b-dp2-tp2"),
    "1b-dp2-pp2": Row("1b", 1, 32, dp=2, pp=2, beside="1b-by-1", peers=(TITAN_PP, MCORE_PP)),
    "1b-dp2-pp2-zb": Row("1b", 1, 32, dp=2, pp=2, more=ZERO_BUBBLE, beside="1b-dp2-pp2"),
    "1b-dp2-pp2-vpp2": Row("1b", 1, 32, dp=2, pp=2, more=TWO_STAGES, beside="1b-dp2-pp2",
                           peers=(f"{TITAN_PP} --sched Interleaved1F1B", f"{MCORE_PP} --vpp 2")),
    "1b-tp2-pp2": Row("1b", 2, 32, tp=2, pp=2, beside="1b-by-2",
                      peers=(f"{TITAN} --bs 32 --tp 2 --pp 2 --mbs 2 --pure_bf16 1",
                             f"{MCORE} --mbs 2 --nmb 16 --tp 2 --pp 2")),
    "1b-tp2-pp2-parts": Row("1b", 2, 32, tp=2, pp=2, more=IN_PARTS, beside="1b-tp2-pp2"),
    "1b-tp2-pp2-m8": Row("1b", 2, 16, tp=2, pp=2, peers=(f"{MCORE} --mbs 2 --nmb 8 --tp 2 --pp 2",)),
    "1b-tp2-pp2-m8-zb": Row("1b", 2, 16, tp=2, pp=2, more=ZERO_BUBBLE, beside="1b-tp2-pp2-m8"),
    "1b-tp2-pp2-m4": Row("1b", 2, 8, tp=2, pp=2, peers=(f"{MCORE} --mbs 2 --nmb 4 --tp 2 --pp 2",)),
    "1b-tp2-pp2-m4-zb": Row("1b", 2, 8, tp=2, pp=2, more=ZERO_BUBBLE, beside="1b-tp2-pp2-m4"),
    "1b-norms": Row("1b", 8, 8, more=NORMS, beside="1b"),
    "1b-mlp": Row("1b", 8, 8, more=MLP, beside="1b"),
    "1b-kept": Row("1b", 8, 8, more=KEPT, beside="1b"),
    "1b-full": Row("1b", 8, 8, more=FULL, beside="1b"),
    "1b-dp2-zero2": Row("1b", 8, 16, dp=2, more=ZERO_2, beside="1b-dp2"),
    "1b-dp2-zero3": Row("1b", 8, 16, dp=2, more=ZERO_3, beside="1b-dp2"),
    "1b-tp2-long": Row("1b", 1, 1, tp=2, more=LONG),
    "1b-cp2-long": Row("1b", 1, 1, cp=2, more=LONG, beside="1b-tp2-long", peers=(TITAN_LONG,)),
    "1b-cp2-long-documents": Row("1b", 1, 1, cp=2, more=(*LONG, *DOCUMENTS), beside="1b-cp2-long"),
    "4b-zero3": Row("4b", 1, 2, dp=2, more=ZERO_3, peers=(f"{TITAN_4B} --bs 1 --ac op",)),
    "4b-zero3-by-2": Row("4b", 2, 4, dp=2, more=(*ZERO_3, *NORMS), beside="4b-zero3",
                         peers=(f"{TITAN_4B} --bs 2 --ac full",)),
    "8b-zero3": Row("8b", 1, 4, dp=4, more=ZERO_3, peers=(f"{TITAN_8B} --bs 1 --ac op",)),
    "8b-zero3-norms": Row("8b", 1, 4, dp=4, more=(*ZERO_3, *NORMS), beside="8b-zero3"),
    "8b-zero3-mlp": Row("8b", 1, 4, dp=4, more=(*ZERO_3, *MLP), beside="8b-zero3"),
    "8b-zero3-shard2": Row("8b", 1, 4, dp=4, more=(*ZERO_3, *MLP, "--dp-shard", 2), beside="8b-zero3-mlp"),
    "8b-zero3-by-2": Row("8b", 2, 8, dp=4, more=(*ZERO_3, *MLP), beside="8b-zero3"),
    "8b-tp4-longer": Row("8b", 1, 1, tp=4, more=(*LONGER, *KEPT)),
    "8b-cp4-longer": Row("8b", 1, 1, cp=4, more=(*LONGER, *KEPT, *ZERO_3), beside="8b-tp4-longer",
                         peers=(TITAN_LONGER,)),
    "8b-cp4-longer-documents": Row("8b", 1, 1, cp=4, more=(*LONGER, *KEPT, *ZERO_3, *DOCUMENTS),
                                   beside="8b-cp4-longer"),
    "moe1-ep2": Row("moe1", 4, 8, dp=2, more=("--ep", 2), peers=(TITAN_MOE, f"{TITAN_MOE} --ep 2")),
    "moe1-dp2": Row("moe1", 4, 8, dp=2, beside="moe1-ep2"),
    "7b-a1b-ep4": Row("7b-a1b", 4, 64, dp=4, more=("--ep", 4)),
    "3.8b-dp4": Row("3.8b", 16, 128, dp=4, beside="3.8b"),
    "3.8b-tp2-pp2": Row("3.8b", 8, 128, tp=2, pp=2, beside="3.8b"),
}  # fmt: skip


def main() -> int:
    parser = Parser(prog="gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for all that the benchmark makes")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="rows to print; all that this machine's GPUs can hold")
    parser.add_argument("--gpus", type=int, help="the rows of so many GPUs, and those that they are compared with")
    parser.add_argument("--train-steps", type=int, default=20, help="steps of each row, the first five left out")
    parser.add_argument(
        "--before", type=Path, metavar="TREE", help="another checkout, built in place, for each row too"
    )
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="run the peers of each row too, by its run.sh")
    parser.add_argument("--profile", action="store_true", help="profile a step of each row")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Train each row and print the table."""
    output = fresh_folder(arguments.output, "gpu.py")
    import torch  # what refuses flags and folders does not wait for it

    store, num_gpus = make_store(output), torch.cuda.device_count()
    trees = {"": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    table, rates, shares = [], dict[str, float](), dict[str, float]()
    beaten: dict[str, dict[str, float]] = {}  # the rates of a row's peers
    for name in arguments.rows or rows_of(arguments.gpus, num_gpus):
        row = ROWS[name]
        for label, tree in trees.items():
            title = f"{name} {label}".strip()
            flags = ["--data.stores", store, "--train-steps", arguments.train_steps]
            steps, start_s = train(tree, output / f"{title}.jsonl", row, *flags)
            rates[title] = median(steps, "tokens_per_s") / row.num_gpus
            shares[title] = median(steps, "mfu")
            table.append(figures(title, rates[title], steps, start_s))
            print(table[-1], flush=True)
        for command in row.peers if arguments.peers else ():
            table.append(peer(arguments.peers, row.num_gpus, command, output))
            beaten.setdefault(name, {})[command] = rate_of(table[-1])
        claim = f"training of a GPT of {row.model}, row {name}"
        limit = {"of the peak of the card [%]": 100 * shares[name]}
        arguments.record.add(claim, rates[name], "tokens a second of a GPU", peer=beaten.get(name, {}), limit=limit)
        if arguments.profile:
            trace = ["--trace", output / f"{name}.trace.json.gz"]
            finish(python(ROOT, *launcher(row.num_gpus), HERE / "step.py", "--model", row.model, *row.sizes, *trace))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; tokens/s of each GPU")
    titles = "row                       tok/s/gpu  mfu    causal  step ms   comm ms  bubble ms  GiB    plan   start s"
    print(f"{titles}  loss first -> last")
    print("\n".join([*table, "", *ratios(rates, beaten)]))
    return 0


def rows_of(count: int | None, num_gpus: int) -> list[str]:
    """Return the rows of `wanted` GPUs and all that they are compared with, or all rows for `num_gpus` at most."""
    if count is None:
        return [name for name, row in ROWS.items() if row.num_gpus <= num_gpus]
    names = {name for name, row in ROWS.items() if row.num_gpus == count}
    names |= {ROWS[name].beside for name in names}
    return [name for name in ROWS if name in names]


def ratios(rates: dict[str, float], beaten: dict[str, dict[str, float]]) -> list[str]:
    """Return a line for each row: its rate over that of the row it compares with, and over those of its peers."""
    lines = []
    for name, rate in rates.items():
        row = ROWS.get(name)
        others = {f"{name} before": rates.get(f"{name} before", 0.0), **beaten.get(name, {})}
        if row is not None and row.beside:
            others = {row.beside: rates.get(row.beside, 0.0), **others}
        found = [f"{rate / other:.3f} of {title}" for title, other in others.items() if other]
        lines += [f"{name:<25} {'; '.join(found)}"] if found else []
    return lines


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
    start = [*launcher(row.num_gpus), "-m", "trainer", "train", *row.flags, *flags]
    began_s = time.monotonic()
    process = python(tree, *start, "--metrics", metrics)
    while process.poll() is None and len(steps_of(metrics)) < 2:
        time.sleep(0.05)
    start_s = time.monotonic() - began_s
    finish(process)
    return steps_of(metrics), start_s


def launcher(num_ranks: int) -> list[object]:
    """Return the arguments of Python that start so many processes, none for one."""
    if num_ranks == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]


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


def peer(folder: Path, num_gpus: int, command: str, output: Path) -> str:
    """Run a peer; return its line of figures."""
    words = ["bash", str(folder.resolve() / "run.sh"), "single", command]
    variables = os.environ | {"NPROC": str(num_gpus), "OUT": str(output)}
    ended = subprocess.run(words, check=False, capture_output=True, text=True, env=variables)
    found = [line for line in ended.stdout.splitlines() if line.startswith("RESULT")]
    line = found[0] if found else f"{command} failed: {(ended.stderr or ended.stdout)[-300:]!r}"
    print(line, flush=True)
    return line


def rate_of(line: str) -> float:
    """Return the tokens/s of each GPU in a peer's line, 0 if it failed."""
    found = re.search(r"tok/s/gpu= *([0-9.]+)", line)
    return float(found[1]) if found else 0.0


def median(steps: list[dict[str, Any]], key: str) -> float:
    """Return the median of a number of the steps after the warm-up."""
    return statistics.median(step[key] for step in steps[WARMUP_STEPS:])


def figures(name: str, rate: float, steps: list[dict[str, Any]], start_s: float) -> str:
    """Return the line of a row: medians of the steps after the warm-up, and when the second step was there."""
    shares = {key: median(steps, key) for key in ("mfu", "mfu_causal", "step_s", "comm_s", "bubble_s", "memory_gib")}
    return (
        f"{name:<25} {rate:>9,.0f}  {shares['mfu']:.1%}  {shares['mfu_causal']:.1%}   "
        f"{1e3 * shares['step_s']:>7.1f}  {1e3 * shares['comm_s']:>8.1f}  {1e3 * shares['bubble_s']:>9.1f}  "
        f"{shares['memory_gib']:>5.1f}  {steps[-1].get('memory_of_plan', 0):>5.2f}  {start_s:>7.1f}  "
        f"{steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
