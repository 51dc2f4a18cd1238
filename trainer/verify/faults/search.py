"""How a fault is looked for: its check passes without it, and fails while it is planted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Literal

from trainer.config import Config
from trainer.verify.bench import Bench
from trainer.verify.checks import CHECKS, run_check
from trainer.verify.faults.fault import Fault, config_of
from trainer.verify.faults.planting import Patches
from trainer.verify.result import Result
from trainer.verify.shrink import Shrunk

State = Literal["found", "NOT FOUND", "not run"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a planted fault: whether its check failed, and what that said."""

    name: str
    check: str
    state: State
    reason: str = ""
    seconds: float = 0.0


def look_for(faults: Sequence[Fault], deadline: float) -> Iterator[Finding]:
    """Plant one fault after the other, and yield what its check said; none is begun behind the deadline.

    A check that fails without the fault has found nothing.
    """
    sound: dict[tuple[Config, Config, str], Result] = {}
    for fault in faults:
        if perf_counter() >= deadline:
            yield Finding(fault.name, fault.seen_by, "not run", "the time was over")
            continue
        begin = perf_counter()
        with TemporaryDirectory(prefix="trainer-faults-") as folder:
            small, run = config_of(fault), run_of(fault)
            key = small, run, fault.seen_by
            if key not in sound:
                sound[key] = _checked(fault, Path(folder) / "sound")
            with Patches() as patch:
                fault.plant(patch)
                planted = _checked(fault, Path(folder) / "planted")
        yield replace(_finding(fault, sound[key], planted), seconds=perf_counter() - begin)


def run_of(fault: Fault) -> Config:
    """Return the run that the small one of a fault is of: in its own precision, with what is in eight bits."""
    small = config_of(fault)
    parallel = replace(small.parallel, grad_reduce=fault.grad_reduce)
    return replace(small, train=replace(small.train, precision=fault.precision), fp8=fault.fp8, parallel=parallel)


def _checked(fault: Fault, folder: Path) -> Result:
    folder.mkdir()
    bench = Bench(Shrunk(config_of(fault), ()), run_of(fault), folder)
    return run_check(fault.seen_by, CHECKS[fault.seen_by], bench)


def _finding(fault: Fault, sound: Result, planted: Result) -> Finding:
    if sound.state != "ok":
        return Finding(fault.name, fault.seen_by, "NOT FOUND", f"{sound.state} without it: {sound.text}")
    is_found = planted.state == "FAILED"
    return Finding(fault.name, fault.seen_by, "found" if is_found else "NOT FOUND", planted.text)
