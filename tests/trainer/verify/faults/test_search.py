"""Each named fault is found by its check while it is planted, and only then; a subset is drawn for quick runs."""

import random
import re
import subprocess
import sys
from dataclasses import replace
from time import perf_counter

import pytest

from trainer.verify.checks import CHECKS
from trainer.verify.faults import named
from trainer.verify.faults.fault import Fault
from trainer.verify.faults.named import FAULTS, faults_named
from trainer.verify.faults.planting import Patches
from trainer.verify.faults.search import Finding, look_for
from trainer.verify.threads import ThreadTransport

DRAWN = random.Random(1).sample(sorted(FAULTS), 66)  # the first few are for quick runs
QUICK, MORE = DRAWN[:4], DRAWN[4:]


def findings(faults: list[Fault]) -> list[Finding]:
    return list(look_for(faults, perf_counter() + 1000))


def missed(names: list[str]) -> list[Finding]:
    return [finding for finding in findings([FAULTS[name] for name in names]) if finding.state != "found"]


def test_a_few_faults_are_found() -> None:
    assert missed(QUICK) == []


@pytest.mark.slow
@pytest.mark.ci
def test_more_faults_are_found() -> None:
    assert missed(MORE) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_faults_are_found() -> None:
    assert missed(list(FAULTS)) == []


@pytest.mark.slow
@pytest.mark.ci
def test_faults_are_found_where_assertions_are_left_out() -> None:
    names = [name for name, fault in FAULTS.items() if fault.trips] + QUICK
    words = ["-O", "-m", "trainer", "verify", "--faults", *names, "--seconds", "300"]
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count("found ") == len(names)


def test_what_is_not_planted_is_not_found() -> None:
    fault = replace(FAULTS["clip-by-rank"], plant=lambda patch: None)
    assert [(finding.state, finding.reason) for finding in findings([fault])] == [("NOT FOUND", "")]


def test_a_check_that_fails_anyway_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadTransport, "send", None)
    [finding] = findings([FAULTS["tied-not-summed"]])
    assert finding.state == "NOT FOUND"
    assert finding.reason.startswith("FAILED without it: ")


def test_names_and_checks_of_faults_are_sound() -> None:
    assert len(named._ALL) == len(FAULTS) >= 90
    assert [fault.name for fault in FAULTS.values() if not re.fullmatch("[a-z0-9-]{5,30}", fault.name)] == []
    assert {fault.seen_by for fault in FAULTS.values()} <= CHECKS.keys()
    peers = {fault.peer for fault in FAULTS.values()} - {""}
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+#\d+", peer) for peer in peers)
    assert [fault.text for fault in faults_named(["tied-not-summed", "tied-not-summed"])] == [
        "tied gradients are not summed over the ends"
    ]


class Owner:
    @classmethod
    def name(cls) -> str:
        return cls.__name__


class Heir(Owner):
    pass


def test_what_was_there_is_put_back() -> None:
    before = dict(vars(Owner))
    with Patches() as patch:
        patch.setattr(Owner, "name", lambda: "other")
        patch.setattr(Heir, "name", lambda: "heir")
        patch.setattr(Owner, "young", 1, raising=False)
        assert (Owner.name(), Heir.name()) == ("other", "heir")
        with pytest.raises(AttributeError):
            patch.setattr(Owner, "nothing", 1)
    assert dict(vars(Owner)) == before
    assert "name" not in vars(Heir)
    assert (Owner.name(), Heir.name()) == ("Owner", "Heir")
