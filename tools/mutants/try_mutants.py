"""Draw mutants of the trainer, and let the checks of `trainer verify` find them, each on a small run that is drawn too.

    python -m tools.mutants.try_mutants --seed 1 --number 200 --report mutants.json

A mutant is of a line that its run reaches. Each is a process, forked before anything of the trainer is imported. One
that changes no number of its run is equal; of the others those that no check finds survive. A report that is there goes
on behind its last mutant.
"""

import argparse
import importlib.abc
import importlib.util
import json
import math
import os
import pickle
import select
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from tools.mutants.reached import Line, lines_reached
from tools.mutants.sites import Mutant, all_mutants, drawn

ROOT = Path(__file__).parents[2]
ROOMS = ("parallel", "store", "pipeline", "model", "linear", "engine.py")
PLACES = tuple(f"trainer/{room}" for room in ROOMS)
TOO_LONG_S = 120.0
ROUNDING = 1e-12  # of what differs by less only the order of sums changed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant: equal, found (with the check), or survived (with the largest difference)."""

    mutant: str
    kind: str
    run: str
    state: str
    check: str = ""
    gap: float = 0.0


class Changed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from a source that was changed."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = mutant.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(ROOT / self._mutant.path))

    def get_filename(self, fullname: str) -> str:
        return str(ROOT / self._mutant.path)

    def get_data(self, path: str | bytes) -> bytes:
        return self._mutant.source.encode()


def in_a_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own, or None if it ended without or took too long."""
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reads)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            data = pickle.dumps(function())
            with os.fdopen(writes, "wb") as pipe:
                pipe.write(data)
        finally:
            os._exit(0)
    os.close(writes)
    parts, deadline = list[bytes](), monotonic() + TOO_LONG_S
    try:
        while select.select([reads], [], [], max(deadline - monotonic(), 0))[0]:
            if not (part := os.read(reads, 1 << 20)):
                break
            parts.append(part)
    finally:
        os.close(reads)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return pickle.loads(b"".join(parts)) if parts else None  # of our own child


def preload() -> None:
    """Import what no mutant is of, so that forks have it already."""
    import torch

    import ckptkit  # noqa: F401
    import datakit  # noqa: F401
    import trainer.mesh.mesh
    import trainer.ops.native  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # the first one imports for seconds
    is_early = [
        name
        for name in sys.modules
        if name.startswith(tuple(place.removesuffix(".py").replace("/", ".") for place in PLACES))
    ]
    if is_early:
        raise RuntimeError(f"{is_early[0]} is imported already: a mutant of it would not be seen")


def names_of_runs() -> list[str]:
    """Return the named faults whose small runs are drawn from."""
    from trainer.verify.faults.named import FAULTS

    return [name for name, fault in FAULTS.items() if fault.fp8.recipe == "off"]


def judged(name: str, mutant: Mutant, baseline: Any) -> tuple[str, str, float]:
    """Return the state of a mutant in a run, the check that finds it, and by how much a number differs."""
    sys.meta_path.insert(0, Changed(mutant))
    try:
        from trainer.verify.checks import CHECKS, run_check
    except Exception as error:
        return "found", f"an import: {type(error).__name__}", math.inf
    with TemporaryDirectory(prefix="trainer-mutant-") as folder:
        bench = bench_of(name, folder)
        try:
            gap = _gap(numbers_of(bench), baseline)
        except Exception:
            gap = math.inf  # the checks say so
        if gap == 0:
            return "equal", "", gap
        for check, compare in CHECKS.items():
            if run_check(check, compare, bench).state == "FAILED":
                return "found", check, gap
    return "survived" if gap > ROUNDING else "rounding", "", gap


def baseline_of(name: str) -> tuple[Any, set[Line]]:
    """Return the numbers of a run without a mutant, and the lines that it reaches."""
    numbers = list[dict[str, Any]]()
    with TemporaryDirectory(prefix="trainer-mutant-") as folder:
        lines = lines_reached(lambda: numbers.extend(numbers_of(bench_of(name, folder))), ROOT, PLACES)
    return numbers, lines


def bench_of(name: str, folder: str) -> Any:
    """Return the bench of a named fault's small run."""
    from trainer.verify.bench import Bench
    from trainer.verify.faults.fault import config_of
    from trainer.verify.faults.named import FAULTS
    from trainer.verify.shrink import Shrunk

    config = config_of(FAULTS[name])
    return Bench(Shrunk(config, ()), config, Path(folder))


def numbers_of(bench: Any) -> list[dict[str, Any]]:
    """Return the numbers of a bench's trials: the layout, one process, few steps, and those from a saved one on."""
    from trainer.verify.bench import SAVED_AT
    from trainer.verify.trial import try_steps

    trials = [bench.layout, bench.reference, try_steps(bench.config, bench.stream, SAVED_AT)]
    trials.append(try_steps(bench.config, bench.stream, 2, start=bench.start))
    return [_numbers(trial) for trial in trials]


def _numbers(trial: Any) -> dict[str, Any]:
    seen = {
        f"{name} of rank {rank}": [float(value) for value in getattr(each, name)]
        for rank, each in enumerate(trial.ranks)
        for name in ("losses", "norms", "num_tokens", "evaluation")
    }
    return seen | {name: tensor.flatten().tolist() for name, tensor in trial.whole().items()}


def _gap(numbers: Any, baseline: Any) -> float:
    """Return the largest difference, infinite where there is nothing to compare."""
    largest = 0.0
    for own, other in zip(numbers, baseline, strict=True):
        if own.keys() != other.keys():
            return math.inf
        for name, values in own.items():
            if len(values) != len(other[name]):
                return math.inf
            for value, expected in zip(values, other[name], strict=True):
                gap = abs(value - expected)
                largest = max(largest, gap if gap == gap else math.inf)
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no mutant after so many seconds")
    parser.add_argument("--report", type=Path, default=Path("mutants.json"))
    options = parser.parse_args()
    preload()
    deadline, baselines = monotonic() + options.seconds, dict[str, tuple[Any, set[Line]]]()
    mutants, runs = all_mutants(ROOT, PLACES), in_a_fork(names_of_runs)
    outcomes = [Outcome(**each) for each in json.loads(options.report.read_text())] if options.report.exists() else []
    while len(outcomes) < options.number and monotonic() < deadline:
        seed = f"{options.seed} {len(outcomes)}"
        run = Random(seed).choice(runs)
        if run not in baselines:
            baselines[run] = in_a_fork(lambda run=run: baseline_of(run))
        numbers, lines = baselines[run]
        mutant = drawn(mutants, lines, seed, {outcome.mutant for outcome in outcomes})
        result = in_a_fork(lambda run=run, mutant=mutant, numbers=numbers: judged(run, mutant, numbers))
        state, check, gap = result or ("found", "it ended, or took too long", math.inf)
        outcomes.append(Outcome(str(mutant), mutant.kind, run, state, check, gap))
        print(f"{state:<9} {run:<28} {mutant}  {check}", flush=True)
        options.report.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    states = Counter(outcome.state for outcome in outcomes)
    changing = states["found"] + states["survived"]
    print(f"{len(outcomes)} of {options.number} mutants: {dict(states)}")
    print(f"found of those that change a number by more than rounding: {states['found']} of {changing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
