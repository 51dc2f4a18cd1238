"""Every fault of every request of programs on an object store: the promises of a power loss hold there too."""

import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from ckptkit.writer import step as step_module
from tests.ckptkit.support.inline_pools import inline_pools
from tests.ckptkit.support.programs import Killed
from tests.power_loss.bucket import Bucket, Place, in_memory
from tests.power_loss.bucket_programs import BUCKET_PROGRAMS, COMPLETE
from tests.power_loss.program import Program
from tests.power_loss.states_of_bucket import Fault, random_faults, single_faults
from threefold.errors import UserError
from threefold.storage import open_storage
from tools.power_loss.calls import ACKNOWLEDGED

NUM_RANDOM = int(os.environ.get("BUCKET_STATES", "200"))
EVERYTHING = Retention(keep_last=99)
WORD = "s3://bucket/run/step-000000001/try/part-00000.failed"  # that the root may come; it stays if that came
QUICK = ("pin",)
SLOW = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.ci]) for name in BUCKET_PROGRAMS if name not in QUICK]


class Explorer:
    """Runs a program on buckets in memory, each time with other faults, and looks at what is left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bucket = Bucket()
        inline_pools(monkeypatch)
        in_memory(lambda: self.bucket, monkeypatch)

    def begun(self, program: Program) -> None:
        """Make what is there before a program."""
        self.bucket = Bucket()
        with redirect_stdout(io.StringIO()):
            program.begin(Place())
        self.bucket.settle()

    def run(self, program: Program, faults: Mapping[int, Fault], times: int = 1) -> list[str]:
        """Run a program; return what it promised before its end."""
        self.bucket.faults, output = faults, io.StringIO()
        try:
            with redirect_stdout(output), redirect_stderr(io.StringIO()):
                program.work(Place(times=times))
        except (Killed, UserError, AssertionError):
            pass
        lines = [line.encode() for line in output.getvalue().splitlines()]
        return [line.removeprefix(ACKNOWLEDGED).decode() for line in lines if line.startswith(ACKNOWLEDGED)]

    def fault_of(self, name: str, faults: Mapping[int, Fault], left: set[str]) -> str:
        """Return what is wrong after a program with faults, or after the same one once more."""
        program = BUCKET_PROGRAMS[name]
        self.begun(program)
        promises = [*program.promised, *self.run(program, faults)]
        lands_late = len(self.bucket.requests) % 2 == 0  # before the same work is done once more, or after it
        self.bucket.end(lands=not lands_late)
        if fault := program.fault_of(Place(), promises):
            return fault
        if program.is_repeatable:
            promises += self.run(program, {}, times=2)
            self.bucket.end(lands=False)
            if missing := {*COMPLETE[name]} - {*promises}:
                return f"once more: {missing} was not promised"
        before = self._names()
        self.bucket.end(lands=True)
        late = {name for name in self._names() - before if "/.work/" in name}  # a note of work that is done by then
        if fault := program.fault_of(Place(), promises):
            return f"in the end: {fault}"
        for run in program.runs:
            prune(open_storage(str(Place() / run)), EVERYTHING, orphans_older_than_s=0)
            self.bucket.abort_uploads(open_storage(str(Place() / run)))
        debris = sorted(self._names() - left - late - {WORD}) if program.is_repeatable else []
        return f"{debris[0]} is left" if debris else ""

    def explored(self, name: str, num_random: int) -> tuple[Counter[str], int]:
        """Try every fault alone, and some draws of several; return what is wrong, and how many there were."""
        program = BUCKET_PROGRAMS[name]
        self.begun(program)
        promises = self.run(program, {})
        assert {*promises} >= {*COMPLETE[name]}
        requests, left = list(self.bucket.requests), self._names()
        wrong, count = Counter[str](), 0
        for faults in self._draws(requests, num_random):
            count += 1
            if fault := self.fault_of(name, faults, left):
                wrong[f"{fault}: {[(number, faults[number]) for number in sorted(faults)]}"] += 1
        return wrong, count

    def _names(self) -> set[str]:
        """Return what is there, whichever try of a save it is of."""
        return {re.sub("/([a-d]|reshard-[0-9a-f]+)/", "/try/", key) for key in self.bucket.names()}

    def _draws(self, requests: list[Any], num_random: int) -> Iterator[Mapping[int, Fault]]:
        yield from single_faults(requests)
        yield from random_faults(requests, num_random)


@pytest.fixture
def explorer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Explorer:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Explorer(monkeypatch)


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_every_fault_of_every_request_keeps_what_was_promised(name: str, explorer: Explorer) -> None:
    wrong, count = explorer.explored(name, NUM_RANDOM if name not in QUICK else 20)
    print(f"{name}: {count} states")
    assert wrong == {}
    assert count > 30


Plant = Callable[[pytest.MonkeyPatch], None]


def commits_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first writer that does not wait for the others."""
    commit = step_module.wait_for_parts

    def wait_for_parts(storage: Any, seat: Any, patience_s: Any, **more: Any) -> Any:
        try:
            return commit(storage, seat, patience_s, **more)
        except UserError:
            return ()

    monkeypatch.setattr(step_module, "wait_for_parts", wait_for_parts)


def acknowledges_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose error counts as success."""
    commit = step_module.commit_root

    def commit_root(storage: Any, root: Any) -> None:
        with suppress(UserError):
            commit(storage, root)

    monkeypatch.setattr(step_module, "commit_root", commit_root)


def removes_what_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that got no answer and takes its files away."""
    monkeypatch.setattr(step_module, "report_failed", lambda storage, seat, reason: step_module.clear(storage, seat))
    monkeypatch.setattr(step_module, "committed_attempt", lambda *_: None)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("plant", [commits_first, acknowledges_an_error, removes_what_may_be_named])
def test_a_planted_fault_of_a_commit_is_found(
    plant: Plant, explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert explorer.explored("two writers", 0)[0]
