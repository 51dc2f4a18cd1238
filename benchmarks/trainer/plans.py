"""Plans against steps: the time and the memory that `trainer plan` says, and those that `step.py` measures.

    python benchmarks/trainer/plans.py predict plans.json --calibration gpu.json
    python benchmarks/trainer/plans.py measure plans.json --calibration gpu.json [--gpus 1] [--steps 8]
    python benchmarks/trainer/plans.py pick picks.json --calibration gpu.json [--gpus 2] [--models 1b 4b] [--steps 6]

Eight runs are fixed. Four are drawn by the commit of the planner from all layouts of these models on one and two GPUs
that fit, so a planner that is changed has others to hold for. `predict` writes what is planned before anything is
measured. `measure` plans the same runs again by the calibration of its own card, times a step of each that this machine
has GPUs for, and prints how far plans are off: memory is what torch allocates. `pick` times what the planner takes for
each model on so many GPUs, then at least six others, of each layout that fits first the one that is planned fastest,
and prints the rate of the pick over that of the best; what it measured it writes.
"""

import argparse
import json
import random
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from step import HERE, configured

from benchmarks.record import Record, add_option
from threefold.cli import Parser, run
from threefold.errors import UserError
from threefold.flags import Settings, add_settings, settings_of
from trainer.config import Config
from trainer.plan.calibration import read_calibration
from trainer.plan.rates import Rates
from trainer.plan.search import (
    USABLE,
    Candidate,
    Planned,
    best_plans,
    candidates_of,
    fixed_plan,
    largest_memory,
    layout_settings,
    without_fault,
)
from trainer.run.memory_check import flags_of

FIXED = (
    (1, "350m", ""),
    (1, "1b", "--micro-batch-size 8 --global-batch-size 8"),
    (1, "1b", "--micro-batch-size 1 --global-batch-size 16"),
    (2, "1b", "--tp 2 --micro-batch-size 8 --global-batch-size 16"),
    (2, "1b", "--pp 2 --schedule zb-h1 --micro-batch-size 1 --global-batch-size 16"),
    (2, "1b", "--dp 2 --micro-batch-size 4 --global-batch-size 16"),
    (2, "4b", "--tp 2 --micro-batch-size 1 --global-batch-size 4"),
    (2, "3.8b", "--tp 2 --micro-batch-size 4 --global-batch-size 16"),
)
PICKED, OTHERS = {"1b": 16, "4b": 8}, 6  # samples a step of models that are picked for; layouts beside the pick
MODELS, GPUS, BATCH = ("350m", "1b", "3.8b", "4b"), (1, 2), 16  # one run of each model is drawn
NODE: dict[str, Any] = {"network": 50e9, "node": 8}
MEASURED = re.compile(r"([\d.]+) ms, .* tok/s, ([\d.]+) GiB")


@dataclass(frozen=True)
class Run:
    """A model of this folder with flags on so many GPUs."""

    num_gpus: int
    model: str
    flags: str

    def config(self) -> Config:
        """Return its configuration."""
        parser = argparse.ArgumentParser()
        add_settings(parser, Config, is_shown=False)
        return configured(self.model, settings_of(parser.parse_args(shlex.split(self.flags))), self.num_gpus)

    def __str__(self) -> str:
        return f"{self.num_gpus} x {self.model} {self.flags}"

    def planned(self, rates: Rates) -> Planned:
        """Return its plan."""
        return fixed_plan(self.config(), self.num_gpus, rates)

    def step(self, num_steps: int) -> tuple[float, float] | None:
        """Return the milliseconds of a step and the bytes at its peak; None, and say why, if it fails."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.num_gpus)]
        words = [sys.executable, *launcher, str(HERE / "step.py"), "--model", self.model, "--steps", str(num_steps)]
        done = subprocess.run([*words, *shlex.split(self.flags)], capture_output=True, text=True, check=False)
        figures_of_step = MEASURED.search(done.stdout)
        if done.returncode or figures_of_step is None:
            lines = done.stderr.strip().splitlines()
            reasons = [line for line in lines if re.search(r"^\S*(?:[Ee]rror|Exception):", line)] or lines[-1:]
            print(f"{self}: failed: {' '.join(reasons[:1])}", flush=True)
            return None
        return float(figures_of_step[1]), float(figures_of_step[2]) * 2**30


def main() -> int:
    parser = Parser(prog="plans.py", description=__doc__.splitlines()[0])
    verbs = ("predict", "measure", "pick")
    parser.add_argument(
        "verb", choices=verbs, help="write plans, or hold them to steps, or the planner's pick to others"
    )
    parser.add_argument("plans", metavar="PLANS.json", help="the runs and what is planned, or was measured, of them")
    parser.add_argument("--calibration", required=True, help="figures of `trainer bench gpu`")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="leave out runs on more")
    parser.add_argument("--models", nargs="+", default=list(PICKED), help="models whose layouts are picked")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Plan, or measure."""
    rates = Rates.of_calibration(read_calibration(arguments.calibration), **NODE)
    if arguments.verb == "predict":
        commit = planner_commit()
        runs = [Run(*each) for each in FIXED] + list(drawn(commit, rates))
        rows = [asdict(each) | figures(each.planned(rates)) for each in runs]
        Path(arguments.plans).write_text(json.dumps({"commit": commit, "card": rates.name, "runs": rows}, indent=1))
        for row in rows:
            print(f"{row['num_gpus']} x {row['model']} {row['flags']}: {1e3 * row['seconds']:.1f} ms, ", end="")
            print(f"{row['bytes'] / 1e9:.2f} GB")
        return 0
    if arguments.verb == "pick":
        rows = [row for model in arguments.models for row in pick_rows(model, arguments, rates)]
        Path(arguments.plans).write_text(json.dumps({"commit": planner_commit(), "runs": rows}, indent=1))
        return 0
    known = json.loads(Path(arguments.plans).read_text())
    runs = [Run(row["num_gpus"], row["model"], row["flags"]) for row in known["runs"]]
    measure([each for each in runs if each.num_gpus <= arguments.gpus], rates, arguments.steps, arguments.record)
    return 0


def planner_commit() -> str:
    """Return the last commit that changed the planner."""
    words = ["git", "-C", str(HERE), "log", "-1", "--format=%H", "--", str(HERE.parents[1] / "trainer" / "plan")]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    if not commit:
        raise UserError("the commit of the planner is not known: a clone has its history")
    return commit


def drawn(commit: str, rates: Rates) -> Iterator[Run]:
    """Yield runs that a commit draws of all candidates that fit, each of another model."""
    batch: Settings = {"train.global_batch_size": BATCH, "train.micro_batch_size": 1}
    configs = {model: configured(model, batch) for model in MODELS}
    pairs = [
        (model, num_gpus, candidate)
        for model, num_gpus in product(MODELS, GPUS)
        for candidate in candidates_of(configs[model], num_gpus, rates)
    ]
    random.Random(commit).shuffle(pairs)
    left = list(MODELS)
    for model, num_gpus, candidate in pairs:
        if model in left and fits(configs[model], candidate, num_gpus, rates):
            left.remove(model)
            yield run_of(num_gpus, model, BATCH, candidate)


def run_of(num_gpus: int, model: str, batch: int, candidate: Candidate) -> Run:
    """Return the run of a candidate."""
    settings = {name: value for name, value in candidate.settings.items() if value not in ((), "nothing", 0)}
    return Run(num_gpus, model, f"--global-batch-size {batch} {flags_of(settings)}")


def pick_rows(model: str, arguments: argparse.Namespace, rates: Rates) -> list[dict[str, Any]]:
    """Return rows of what the planner picks for a model and of others, with measured steps, and print their ratio."""
    batch = PICKED.get(model, BATCH)
    config = configured(model, {"train.global_batch_size": batch, "train.micro_batch_size": 1})
    plans = [plan for plan in best_plans(config, arguments.gpus, rates, "time") if plan.fits]
    firsts = {layout_settings(plan.candidate): plan for plan in reversed(plans)}.values()
    rest = [plan for plan in plans if not any(plan is first for first in firsts)]
    chosen = sorted(firsts, key=plans.index) + rest
    rows = list[dict[str, Any]]()
    for plan in chosen[: max(len(firsts), OTHERS + 1)]:
        own = run_of(arguments.gpus, model, batch, plan.candidate)
        step = own.step(arguments.steps)
        rows.append(asdict(own) | {"seconds": plan.time.total, "measured": step and step[0] / 1e3})
        if step is not None:
            print(f"{own}: {1e3 * plan.time.total:.1f} planned, {step[0]:.1f} ms", flush=True)
    times = [row["measured"] for row in rows if row["measured"]]
    if rows[0]["measured"] and len(times) > 1:
        ratio = min(times) / times[0]
        print(f"{model} on {arguments.gpus}: the pick has {ratio:.3f} of the rate of the best of {len(times)} layouts")
        claim = f"step of the planner's pick, {rows[0]['num_gpus']} x {model}"
        arguments.record.add(claim, 1e3 * times[0], "ms", peer={"best measured": 1e3 * min(times)})
    return rows


def fits(config: Config, candidate: Candidate, num_gpus: int, rates: Rates) -> bool:
    """Return whether a candidate is a run that fits."""
    resolved = without_fault(config, candidate, num_gpus)
    return resolved is not None and largest_memory(resolved).total <= USABLE * rates.capacity


def figures(plan: Planned) -> dict[str, float]:
    """Return what a plan says."""
    return {"seconds": plan.time.total, "bytes": plan.memory.of_torch}


def measure(runs: list[Run], rates: Rates, num_steps: int, record: Record) -> None:
    """Print plans, steps, and how far these are from those."""
    errors: dict[str, list[float]] = {"time": [], "memory": []}
    for own in runs:
        plan = figures(own.planned(rates))
        if (step := own.step(num_steps)) is None:
            continue
        step_ms, peak = step
        off = {"time": 1e3 * plan["seconds"] / step_ms - 1, "memory": plan["bytes"] / peak - 1 if peak else 0.0}
        for kind, value in off.items():
            errors[kind].append(value)
        print(f"{own}: {1e3 * plan['seconds']:.1f} for {step_ms:.1f} ms, {off['time']:+.1%}; ", end="")
        print(f"{plan['bytes'] / 1e9:.2f} for {peak / 1e9:.2f} GB, {off['memory']:+.1%}", flush=True)
        record.add(f"step planned, {own}", 1e3 * plan["seconds"], "ms", peer={"measured": step_ms})
    for kind, values in errors.items():
        sizes = [abs(value) for value in values] or [0.0]
        print(f"{kind}: {statistics.median(sizes):.1%} off in the median, {max(sizes):.1%} at most")


if __name__ == "__main__":
    raise SystemExit(main())
