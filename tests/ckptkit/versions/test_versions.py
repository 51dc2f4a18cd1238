"""Programs of different releases act on one run in any order: what a newer one wrote, no older one damages.

Two releases are in turn, chosen by hypothesis: this code beside one of the future, whose versions it cannot read; and
this code, and that of the future, beside two commits of which one has other roots and the other another part index.
Each is a process of its own. What it can read it must read right; what not, it refuses by its version, and changes
nothing.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ckptkit.format.keys import ASIDE_NAME, DAMAGED_ROOT_KEY, ROOT_KEY, step_folder
from tests.ckptkit.versions.program import FAULTS, digest_of
from tests.ckptkit.versions.releases import (
    FIRST,
    HERE,
    NEXT_INDEX,
    NEXT_ROOT,
    SECOND,
    Answer,
    Process,
    Release,
    process_of,
)
from threefold.storage import Storage, open_storage

STEPS = st.integers(1, 4)
TURN = st.integers(0, 1)
VERSION = "has format version"
THERE_ALREADY = "already"


@dataclass
class Held:
    """What a step must hold: a state, in versions of root and index, in files of these digests."""

    value: int
    versions: tuple[int, int]
    files: dict[str, str] = field(default_factory=dict)
    is_pinned: bool = False


class VersionsMachine(RuleBasedStateMachine):
    """A run and its copies, and what each must hold, whichever of two programs acted."""

    programs: tuple[Process, Process]
    place: Callable[[], str]

    @initialize(turns=st.lists(TURN, min_size=1, max_size=4))
    def begin(self, turns: list[int]) -> None:
        self.url = type(self).place()
        self.steps: dict[str, dict[int, Held]] = {"run": {}, "copies": {}}
        self.aside: dict[int, dict[str, Held]] = {}  # what rollbacks set aside of a step, by attempt
        self.numbers = itertools.count(1)
        for step, turn in enumerate(turns, 1):
            self.save(turn, step, dp=1)

    @rule(turn=TURN, step=STEPS, dp=st.integers(1, 2))
    def save(self, turn: int, step: int, dp: int) -> None:
        program, value = self.programs[turn], next(self.numbers)
        answer = program.ask("save", f"{self.url}/run", step, value, dp)
        if step in self.steps["run"]:
            assert THERE_ALREADY in answer.text
        else:
            assert answer.is_done, answer
            self._adopt("run", step, Held(value, program.release.written))

    @rule(turn=TURN, step=STEPS)
    def load(self, turn: int, step: int) -> None:
        step, record = self._pick(step)
        answer = self.programs[turn].ask("load", f"{self.url}/run", step)
        self._check_values(self.programs[turn].release, answer, step, record)

    @rule(turn=TURN)
    def load_newest(self, turn: int) -> None:
        """It is the newest step, or a refusal: never in silence an older one that can be read."""
        answer = self.programs[turn].ask("load", f"{self.url}/run", None)
        newest = max(self.steps["run"])
        self._check_values(self.programs[turn].release, answer, newest, self.steps["run"][newest])

    @rule(turn=TURN, step=STEPS)
    def verify(self, turn: int, step: int) -> None:
        step, record = self._pick(step)
        answer = self._command(turn, "verify", self._step("run", step))
        self._check_done(self.programs[turn].release, answer, record)

    @rule(turn=TURN, keep_last=st.integers(1, 2), sweeps=st.booleans())
    def prune(self, turn: int, keep_last: int, sweeps: bool) -> None:
        """What it cannot read stays, with the newest, what is pinned, and as many as were asked for of the others."""
        release, known = self.programs[turn].release, self.steps["run"]
        words = ["--keep-last", str(keep_last), *(["--orphans-older-than", "0s"] if sweeps else [])]
        answer = self._command(turn, "prune", f"{self.url}/run", *words)
        assert answer.is_done or VERSION in answer.text, answer
        newest = sorted(
            (step for step, record in known.items() if record.versions[0] <= release.reads[0]), reverse=True
        )
        stay = {
            step for step, record in known.items() if record.is_pinned or not record.versions[0] <= release.reads[0]
        }
        stay |= {*newest[:keep_last], max(known)}
        there = set(self._roots("run"))
        assert stay <= there if answer.is_done else there == known.keys(), answer
        self.steps["run"] = {step: record for step, record in known.items() if step in there}
        if sweeps and answer.is_done:
            self.aside = {}

    @rule(turn=TURN, step=STEPS, is_pinned=st.booleans())
    def pin(self, turn: int, step: int, is_pinned: bool) -> None:
        """It needs no root's content, so whoever lists the step can do it."""
        step, record = self._pick(step)
        answer = self._command(turn, "pin" if is_pinned else "unpin", self._step("run", step))
        assert answer.is_done or record.is_pinned == is_pinned, answer
        record.is_pinned = is_pinned

    @rule(turn=TURN, step=STEPS)
    def rollback(self, turn: int, step: int) -> None:
        known, release = self.steps["run"], self.programs[turn].release
        step, _ = self._pick(step)
        if "rollback" in release.lacks:
            return
        newer = {number: record for number, record in known.items() if number > step}
        answer = self._command(turn, "rollback", self._step("run", step))
        if any(record.is_pinned for record in newer.values()):
            assert "pinned" in answer.text or VERSION in answer.text, answer
        elif self._check_done(release, answer, known[step], *newer.values()):
            self.steps["run"] = {number: record for number, record in known.items() if number <= step}
            for number, record in newer.items():
                self.aside.setdefault(number, {})[f"a{record.value}"] = record

    @rule(turn=TURN, step=STEPS)
    def undo_rollbacks(self, turn: int, step: int) -> None:
        """What it brings back is whole; what it cannot read it leaves aside and says so."""
        known, release = self.steps["run"], self.programs[turn].release
        step, _ = self._pick(step)
        aside = {number: tries for number, tries in self.aside.items() if number > step and tries}
        if not aside or "rollback" in release.lacks or known.keys() & aside.keys():
            return
        answer = self._command(turn, "rollback", self._step("run", step), "--undo")
        back = {number: self._attempt("run", number) for number in self._roots("run") if number not in known}
        known |= {number: self.aside[number].pop(attempt) for number, attempt in back.items()}
        if self._check_done(release, answer, *(record for tries in aside.values() for record in tries.values())):
            assert back.keys() == aside.keys()

    @rule(turn=TURN, step=STEPS)
    def copy(self, turn: int, step: int) -> None:
        self._write_copy(turn, step, "copy")

    @rule(turn=TURN, step=STEPS, dp=st.integers(1, 3))
    def reshard(self, turn: int, step: int, dp: int) -> None:
        self._write_copy(turn, step, "reshard", "--dp", str(dp))

    def _write_copy(self, turn: int, step: int, verb: str, *flags: str) -> None:
        """Write a step of the run into the other one, where it is there already or has this release's versions then."""
        (step, record), release = self._pick(step), self.programs[turn].release
        answer = self._command(turn, verb, self._step("run", step), f"{self.url}/copies", *flags)
        if step in self.steps["copies"]:
            assert answer.is_done or THERE_ALREADY in answer.text or VERSION in answer.text, answer
        elif self._check_done(release, answer, record):
            versions = record.versions if verb == "copy" else release.written
            self._adopt("copies", step, Held(record.value, versions))

    @invariant()
    def every_step_is_there_and_as_it_was(self) -> None:
        for run, known in getattr(self, "steps", {}).items():
            assert self._roots(run) == sorted(known)
            for step, record in known.items():
                assert self._files(run, step).items() >= record.files.items(), f"step {step} of {run} changed"

    def teardown(self) -> None:
        """Let the program that reads everything read everything."""
        for run, known in getattr(self, "steps", {}).items():
            for step, record in known.items():
                answers = [program.ask("load", f"{self.url}/{run}", step) for program in self.programs]
                assert f"{step} {digest_of(record.value)}" in [answer.text for answer in answers]

    def _pick(self, number: int) -> tuple[int, Held]:
        """Return a step that the run has, and what it must hold."""
        steps = sorted(self.steps["run"])
        step = steps[number % len(steps)]
        return step, self.steps["run"][step]

    def _command(self, turn: int, *words: str) -> Answer:
        answer = self.programs[turn].ask("command", *words)
        assert "Traceback" not in answer.text, answer.text
        assert answer.is_done or answer.kinds[0] == "Refused", answer
        return answer

    def _check_values(self, release: Release, answer: Answer, step: int, record: Held) -> None:
        if self._check_done(release, answer, record):
            assert answer.text == f"{step} {digest_of(record.value)}"
        else:
            assert "CheckFailed" not in answer.kinds, "it is not damaged"

    def _check_done(self, release: Release, answer: Answer, *needed: Held) -> bool:
        """Return whether something was done: it must be if the release can read all, and is refused by name if not."""
        if all(release.can_read(record.versions) for record in needed):
            assert answer.is_done, answer
        else:
            assert answer.is_done or VERSION in answer.text, answer
            assert release.commit or "is damaged" not in answer.text, answer  # as older releases said of a rollback
        return answer.is_done

    def _step(self, run: str, step: int) -> str:
        return f"{self.url}/{run}/{step_folder(step)}"

    def _adopt(self, run: str, step: int, record: Held) -> None:
        record.files = self._files(run, step)
        self.steps[run][step] = record

    def _storage(self, run: str) -> Storage:
        return open_storage(f"{self.url}/{run}")

    def _files(self, run: str, step: int) -> dict[str, str]:
        """Return the digests of a step's root, and of the files of the attempt that it names."""
        storage, folder = self._storage(run), step_folder(step)
        keys = [f"{folder}/{ROOT_KEY}", *storage.list_keys(f"{folder}/{self._attempt(run, step)}/")]
        digests = {key: hashlib.sha256(storage.read(key)).hexdigest() for key in keys}
        return {key: digest for key, digest in digests.items() if not key.endswith(ASIDE_NAME)}

    def _attempt(self, run: str, step: int) -> str:
        return str(json.loads(self._storage(run).read(f"{step_folder(step)}/{ROOT_KEY}"))["attempt"])

    def _roots(self, run: str) -> list[int]:
        """Return the committed steps; a root that was called damaged is none here."""
        keys = list(self._storage(run).list_keys())
        assert not [key for key in keys if key.endswith(DAMAGED_ROOT_KEY)], "a sound step is called damaged"
        return sorted(int(key.split("/")[0].removeprefix("step-")) for key in keys if key.endswith(f"/{ROOT_KEY}"))


PAIRS = {
    "here and next root": (HERE, NEXT_ROOT),
    "here and next index": (HERE, NEXT_INDEX),
    "first and here": (FIRST, HERE),
    "second and here": (SECOND, HERE),
    "first and second": (FIRST, SECOND),
    "second and next root": (SECOND, NEXT_ROOT),
}


def take_turns(
    pair: tuple[Release, Release], url: str, scratch: Path, examples: int, steps: int, *, shortens: bool = True
) -> None:
    places = (f"{url}/{number}" for number in itertools.count())
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        report_multiple_bugs=False,
        derandomize=not shortens,
        phases=(Phase.generate, Phase.shrink) if shortens else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    with ExitStack() as stack:
        first, second = (stack.enter_context(process_of(release, scratch)) for release in pair)

        class Machine(VersionsMachine):
            programs = (first, second)
            place = staticmethod(lambda: next(places))

        run_state_machine_as_test(Machine, settings=chosen)


@pytest.mark.slow
@pytest.mark.ci
def test_this_code_damages_nothing_of_a_newer_format(tmp_path: Path) -> None:
    for name in ("next index", "next root"):
        take_turns(PAIRS[f"here and {name}"], str(tmp_path / name), tmp_path, 4, 15)


REFUSED = re.escape("has format version 3, this program reads 1 and 2\nhint: install a newer threefold")
VERBS = ("verify", "inspect", "hash", "rollback", "copy OUT", "reshard OUT --tp 2", "diff OLDER", "export OUT --to dcp")


@pytest.mark.parametrize("newer", [NEXT_ROOT, NEXT_INDEX], ids=lambda release: release.name)
def test_each_verb_refuses_a_newer_format_by_its_version(newer: Release, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with process_of(newer, tmp_path) as future, process_of(HERE, tmp_path) as present:
        assert present.ask("save", str(run), 1, 1, 1).is_done
        assert future.ask("save", str(run), 2, 2, 1).is_done
        for line in VERBS:
            if (line, newer) == ("inspect", NEXT_INDEX):
                continue  # it reads the root alone
            verb, *words = line.replace("OUT", str(out)).replace("OLDER", f"{run}/step-000000001").split()
            answer = present.ask("command", verb, f"{run}/step-000000002", *words)
            assert re.match(f"exit code 2: error: .*{REFUSED}", answer.text), (line, answer)
            assert not list(out.glob("*")), line
        assert re.search(REFUSED, present.ask("load", str(run), None).text)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    newer = NEXT_INDEX if fault == "falls_back_from_newer" else NEXT_ROOT
    planted = replace(HERE, name="planted", change=fault)
    with pytest.raises(AssertionError):
        take_turns((planted, newer), str(tmp_path), tmp_path, 100, 25, shortens=False)


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3_url") if request.param == "s3" else str(tmp_path / "places")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("places", ["local", "s3"], indirect=True)
@pytest.mark.parametrize("pair", PAIRS)
def test_releases_take_turns_on_one_run(pair: str, places: str, tmp_path: Path) -> None:
    is_local = places.startswith("/")
    take_turns(PAIRS[pair], places, tmp_path, 40 if is_local else 6, 25)
