"""Whether training has the bits that it should: of another tree, or of itself with choices that promise the same.

    python benchmarks/trainer/bits.py --output DIR [--device cpu]
    python benchmarks/trainer/bits.py --output DIR --before TREE [--number 30]

Small models train a few steps by the command that a user types, on GPUs with `train.deterministic`, on a CPU with one
thread. Losses, gradient norms and all that a save holds are compared. With `--before` the configurations are drawn at
random: layouts, schedules, precisions, recompute, dropout, documents, and each trains in both trees. Without, pairs of
choices are compared that change no bit: ZeRO stages 2 and 3, overlap on and off, what is made again.
A process has a GPU of its own, as NCCL's kernels of several processes wait for each other on one. Exit code 1 if
anything differs.
"""

import argparse
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu import ROOT, environment, interpreter, launcher, steps_of

from benchmarks.record import add_option
from datakit import write_store
from threefold.cli import Parser, run
from threefold.scratch import fresh_folder

VOCAB_SIZE, SEQ_LENGTH, NUM_STEPS = 61, 64, 6
SIZES = {"model.num_layers": 4, "model.hidden_size": 64, "model.num_heads": 4, "model.ffn_hidden_size": 96}
SIZES |= {"parallel.bucket_mib": 1, "optim.lr": 5e-3, "optim.warmup_steps": 2}
GPT_2 = {"model.norm": "layernorm", "model.position": "learned", "model.activation": "gelu"}
GPT_2 |= {"model.bias": True, "model.tie_embeddings": True}
OF_DOCUMENTS = {"data.document_mask": True, "data.reset_positions": True}
Values = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A small run: its name, and values of options by their dotted names."""

    name: str
    values: Values

    @property
    def num_ranks(self) -> int:
        return int(np.prod([self.values.get(f"parallel.{axis}", 1) for axis in ("tp", "cp", "pp", "dp")]))

    @property
    def flags(self) -> list[str]:
        words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in self.values.items()]
        return [
            word for flag, value in words for word in (flag, value.lower() if value in ("True", "False") else value)
        ]


@dataclass(frozen=True)
class Bits:
    """What a run had: its losses and gradient norms, and the hashes of all that it saved."""

    steps: list[tuple[float, float]]
    hashes: str


class Devices:
    """The GPUs of this machine, or cores, each of which one process has at a time."""

    def __init__(self, count: int) -> None:
        self._free, self._changed = list(range(count)), threading.Condition()

    @contextmanager
    def hold(self, count: int) -> Iterator[list[int]]:
        """Wait for so many, and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            numbers = [self._free.pop(0) for _ in range(count)]
        try:
            yield numbers
        finally:
            with self._changed:
                self._free += numbers
                self._changed.notify_all()


def main() -> int:
    parser = Parser(prog="bits.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for all that the comparison makes")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout, built in place")
    parser.add_argument("--number", type=int, default=30, help="configurations that are drawn for --before")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what trains")
    add_option(parser)
    parser.set_defaults(handler=compare)
    return run(parser)


def compare(arguments: argparse.Namespace) -> int:
    """Train, and print what differs."""
    output = fresh_folder(arguments.output, "bits.py")
    import torch  # what refuses flags and folders does not wait for it

    count = torch.cuda.device_count() if arguments.device == "cuda" else os.cpu_count() or 1
    random_ = np.random.default_rng(0)
    documents = [
        np.r_[(random_.integers(0, 60) + random_.integers(1, 4) * np.arange(length)) % 60, 60]
        for length in random_.integers(20, 120, 300)
    ]
    write_store(output / "store", documents, vocab_size=VOCAB_SIZE, eod_id=60)
    (output / "run.toml").write_text(f"[train]\nseq_length = {SEQ_LENGTH}\n")
    if arguments.before:
        trees = ROOT, arguments.before.resolve()
        cases = drawn(random.Random(arguments.seed), arguments.number, count)
        pairs = [(case.name, (trees[0], case), (trees[1], case)) for case in cases]
    else:
        pairs = [(f"{a.name} = {b.name}", (ROOT, a), (ROOT, b)) for a, b in promised() if a.num_ranks <= count]
    jobs = {(tree, case.name): case for _, *both in pairs for tree, case in both}
    devices = Devices(count)
    with ThreadPoolExecutor(count) as pool:
        trained = pool.map(lambda job: train(output, devices, arguments.device, job[0], jobs[job]), jobs)
        bits = dict(zip(jobs, trained, strict=True))
    differing = [title for title, a, b in pairs if bits[a[0], a[1].name] != bits[b[0], b[1].name]]
    for title in differing:
        print(f"differs: {title}")
    equal = len(pairs) - len(differing)
    print(f"{equal} of {len(pairs)} are equal, on {count} devices of {arguments.device}")
    compared = "as of a tree before" if arguments.before else "as of choices that promise them"
    arguments.record.add(f"training on {arguments.device}, bits {compared}", equal, "pairs", limit={"all": len(pairs)})
    return 1 if differing else 0


def drawn(draw: random.Random, number: int, num_devices: int) -> list[Case]:
    """Return so many configurations, on 1, 2 and 4 ranks in turn as far as there are devices."""
    sizes = [size for size in (1, 2, 4) if size <= num_devices]
    return [Case(f"drawn-{place}", one_of(draw, sizes[place % len(sizes)], place)) for place in range(number)]


def one_of(draw: random.Random, num_ranks: int, seed: int) -> Values:
    """Return a configuration that any tree since the first release of these options takes."""
    layouts = [each for each in itertools.product((1, 2), (1, 2), (1, 2, 4)) if np.prod(each) == num_ranks]
    tp, pp, dp = draw.choice(layouts)
    values = SIZES | {
        "parallel.tp": tp,
        "parallel.pp": pp,
        "parallel.dp": dp,
        "model.num_kv_heads": draw.choice([2, 4]),
    }
    values |= draw.choice([{}, {"model.qk_norm": True}, GPT_2]) | {"model.dropout": draw.choice([0.0, 0.1])}
    values |= {"parallel.zero_stage": draw.choice([0, 1]), "parallel.overlap_grad_reduce": draw.choice([True, False])}
    if tp > 1:
        values["parallel.sequence_parallel"] = draw.choice(["on", "off"])
    if values.get("parallel.sequence_parallel") == "on":
        values["parallel.tp_overlap_parts"] = draw.choice([1, 2])
    if pp > 1:
        schedule, stages = draw.choice([("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zb-h1", 1)])
        values |= {"parallel.schedule": schedule, "parallel.virtual_stages": stages}
    precision, micro = draw.choice(["bf16", "fp32"]), draw.choice([1, 2])
    values |= {"train.precision": precision, "train.micro_batch_size": micro, "train.global_batch_size": 4 * micro * dp}
    values |= {"train.recompute": draw.choice(["none", "full"]), "train.max_logits_gib": draw.choice([1.0, 1e-5])}
    values |= {"train.seed": seed, "data.mask_eod_loss": draw.choice([True, False])}
    if draw.random() < 0.5:
        values |= OF_DOCUMENTS if values.get("model.position") != "learned" else {"data.document_mask": True}
    if precision == "fp32":  # a kernel by time is not the same every time
        values["ops.attention"] = "reference"
    return values


def promised() -> Iterator[tuple[Case, Case]]:
    """Yield pairs of runs on two ranks, or one, whose bits are the same."""
    shared = SIZES | OF_DOCUMENTS | {"model.num_kv_heads": 2, "model.dropout": 0.1}
    shared |= {"train.global_batch_size": 8, "train.micro_batch_size": 2}
    stages: dict[int, Values] = {1: {"parallel.zero_stage": 1}}
    stages |= {stage: {"parallel.zero_stage": stage, "parallel.zero_whole_kib": 0} for stage in (2, 3)}
    choices: dict[str, Values] = {
        "overlap off": {"parallel.overlap_grad_reduce": False, "parallel.overlap_param_gather": False},
        "reshard off": {"parallel.reshard_after_forward": "off"},
    }
    again: dict[str, Values] = {
        "norms": {"train.recompute": "selective"},
        "mlp": {"train.recompute": "selective", "train.recompute_modules": "norms,mlp"},
        "attention": {"train.recompute": "selective", "train.recompute_modules": "attention"},
        "full": {"train.recompute": "full"},
        "full, attention kept": {"train.recompute": "full", "train.recompute_keep": "attention"},
    }
    for precision in ("fp64", "bf16"):
        own = shared | {"train.precision": precision}
        two = own | {"parallel.dp": 2}
        three = Case(f"{precision} zero 3", two | stages[3])
        yield Case(f"{precision} zero 2", two | stages[2]), three
        for name, values in (choices | again).items():
            yield three, Case(f"{precision} zero 3, {name}", three.values | values)
        alone = Case(f"{precision} one", own)
        for name, values in again.items():
            yield alone, Case(f"{precision} one, {name}", own | values)
        whole = two | {"train.micro_batch_size": 4}  # one micro-batch
        yield from itertools.pairwise(
            Case(f"{precision} zero {stage}, whole", whole | stages[stage]) for stage in stages
        )


def train(output: Path, devices: Devices, device: str, tree: Path, case: Case) -> Bits:
    """Train a case in a tree on devices of its own; CalledProcessError if it failed, with what it said printed."""
    run_url = output / f"{case.name.replace(' ', '-').replace(',', '')}-{'now' if tree == ROOT else 'before'}"
    flags = [output / "run.toml", "--data.stores", output / "store", "--train.device", device, "--deterministic"]
    flags += ["--train-steps", NUM_STEPS, "--save", run_url, "--metrics", f"{run_url}.jsonl", *case.flags]
    command = [*launcher(case.num_ranks), "-m", "trainer", "train", *flags]
    with devices.hold(case.num_ranks) as numbers:
        own = {"OMP_NUM_THREADS": "1"} | (
            {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))} if device == "cuda" else {}
        )
        run_python(tree, command, own)
    return Bits(
        [(step["loss"], step["grad_norm"]) for step in steps_of(Path(f"{run_url}.jsonl"))],
        run_python(ROOT, ["-m", "ckptkit", "hash", "--tensors", run_url]),
    )


def run_python(tree: Path, command: Sequence[object], own: dict[str, str] | None = None) -> str:
    """Run Python with the packages of a tree; return what it printed."""
    words = [interpreter(tree), *map(str, command)]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, cwd=tree, env=environment(tree) | (own or {})
    )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
