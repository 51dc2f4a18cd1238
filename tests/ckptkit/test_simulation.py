"""Two jobs, a pruner, a keeper of pins and a reader on one run, in every order that a seed makes of their requests.

SIMULATION_SEED=N runs one seed alone, the one that a failure names; SIMULATION_SEEDS=N as many as that.
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.format.root import Root
from ckptkit.loading.roots import root_key
from ckptkit.runs import pruning, rollback
from ckptkit.writer import commit
from ckptkit.writer import step as step_module
from tests.ckptkit import simulate as command
from tests.ckptkit.support.inline_pools import inline_pools
from tests.ckptkit.support.programs import Hung
from tests.ckptkit.support.simulated_time import SimulatedTime, simulated_time
from tests.ckptkit.support.simulation import Broken, simulate
from tests.ckptkit.support.situations import SITUATIONS
from threefold.errors import StorageError
from threefold.storage import Storage

SEED = os.environ.get("SIMULATION_SEED")
FAST, SLOW, PLANTED = 12, int(os.environ.get("SIMULATION_SEEDS", "3000")), 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    inline_pools(monkeypatch)
    return simulated_time(monkeypatch)


def run_seeds(seeds: range, clock: SimulatedTime, hang_s: float = 60.0) -> None:
    for seed in [int(SEED)] if SEED else seeds:
        assert simulate(seed, clock, hang_s=hang_s).run_place.history


def test_every_interleaving_keeps_what_is_promised(clock: SimulatedTime) -> None:
    run_seeds(range(FAST), clock)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_interleavings_do(clock: SimulatedTime) -> None:
    run_seeds(range(FAST, FAST + SLOW), clock)


def test_a_seed_repeats_itself(clock: SimulatedTime) -> None:
    first, second = simulate(7, clock), simulate(7, clock)
    assert first.trace == second.trace
    assert first.run_place.history == second.run_place.history
    assert first.situations.counts == second.situations.counts


Plant = Callable[[pytest.MonkeyPatch], None]


def commits_over_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit without `if_absent`."""
    monkeypatch.setattr(
        step_module, "commit_root", lambda storage, root: storage.write(root_key(root.step), root.to_bytes())
    )


def deletes_data_before_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune whose roots go last."""

    def delete_steps(self: pruning._Pruning, batch: list, newest_good: int) -> None:
        doomed = [each for each in map(self._look, batch) if each is not None]
        self._storage.delete([key for each in doomed for key in each.own])
        self._storage.delete([root_key(each.record.step) for each in doomed])

    monkeypatch.setattr(pruning._Pruning, "_delete_steps", delete_steps)


def looks_for_pins_only_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune that does not look for pins once the roots went."""
    monkeypatch.setattr(pruning, "pin_key", lambda step: f"step-{step:09d}/nothing")


def forgets_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune that keeps nothing."""

    def expire(self: pruning._Pruning, listed: Any, records: Any, policy: Any, *_: Any) -> Any:
        found = pruning.judged(records.of(listed), records, policy)
        self.delete(found, listed, max((record.step for record in found if record.is_good), default=-1))
        return found

    monkeypatch.setattr(pruning._Pruning, "expire", expire)


def clears_after_a_lost_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose lost answer counts as a refusal, and a clean-up that does not look for the root."""
    commit = step_module.commit_root

    def commit_root(storage: Storage, root: Root) -> None:
        try:
            commit(storage, root)
        except StorageError as error:
            raise step_module.NotCommitted(error.message) from error

    monkeypatch.setattr(step_module, "commit_root", commit_root)
    monkeypatch.setattr(step_module, "committed_attempt", lambda storage, step, *_: None)


def removes_files_that_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that fails after its last index was put and removes its files all the same."""
    clean_up = step_module._clean_up
    monkeypatch.setattr(step_module, "_clean_up", lambda *arguments, **_: clean_up(*arguments))


def sweeps_what_is_young(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that takes files of any age."""
    monkeypatch.setattr("ckptkit.runs.debris.SAFE_AGE_S", -3600.0)


def goes_back_without_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback that does not look, once a root went, for the step that it goes back to."""
    set_aside = rollback._set_aside
    monkeypatch.setattr(
        rollback, "_set_aside", lambda storage, step, attempt, _: set_aside(storage, step, attempt, None)
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "plant",
    [
        commits_over_another,
        deletes_data_before_roots,
        pytest.param(goes_back_without_a_second_look, marks=pytest.mark.slow),
        pytest.param(looks_for_pins_only_before, marks=pytest.mark.slow),
        pytest.param(forgets_the_newest, marks=pytest.mark.slow),
        pytest.param(clears_after_a_lost_answer, marks=pytest.mark.slow),
        pytest.param(removes_files_that_may_be_named, marks=pytest.mark.slow),
        pytest.param(sweeps_what_is_young, marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found(plant: Plant, clock: SimulatedTime, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Broken) as found:
        run_seeds(range(PLANTED), clock)
    print(f"{plant.__name__}: {found.value}; {found.value.__notes__[-1]}")


def waits_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that waits for another one, which was killed, whatever its deadline."""
    looks = commit._looks
    monkeypatch.setattr(commit, "_looks", lambda patience_s, *args, **more: looks(lambda: 1e12, *args, **more))


def stops_in_a_prune(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune that waits for a lock that nobody releases."""
    monkeypatch.setattr("ckptkit.runs.debris.Debris.orphans", lambda *_: threading.Event().wait())


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (waits_without_end, r"^[abz]\.[01](\.tier)? does not end its (save|tier) of step [1-4]"),
        (stops_in_a_prune, r"^\S+ asks for nothing any more in its (prune|tier) of step \d"),
    ],
)
def test_a_planted_hang_is_named(
    plant: Plant, name: str, clock: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Hung, match=name):
        run_seeds(range(PLANTED), clock, hang_s=1.0)


def test_parts_of_a_night_are_added_and_what_was_never_reached_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = tmp_path / "night.json"
    assert [command.main(["--seeds", "1", "--tally", str(tally)]) for _ in range(2)] == [0, 0]
    counts = json.loads(tally.read_text())
    assert counts["seeds"] == 2
    missing = {line.split(": ")[1] for line in capsys.readouterr().out.splitlines()[-len(SITUATIONS) :] if ": " in line}
    assert missing == {name for name, count in counts["situations"].items() if not count}


def test_a_night_ends_at_what_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits_over_another(monkeypatch)
    tally = tmp_path / "night.json"
    assert command.main(["--seeds", "1000", "--tally", str(tally)]) == 1
    begun = json.loads(tally.read_text())["seeds"]
    assert command.main(["--seeds", "1", "--tally", str(tally)]) == 1, "the same seed once more"
    assert json.loads(tally.read_text())["seeds"] == begun
