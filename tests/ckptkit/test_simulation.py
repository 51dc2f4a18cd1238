"""Two jobs, a pruner, a keeper of pins and a reader on one run, in every order that a seed makes of their requests.

SIMULATION_SEED=N runs one seed alone, the one that a failure names; SIMULATION_SEEDS=N as many as that.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.format.root import Root
from ckptkit.loading.roots import root_key
from ckptkit.runs import pruning
from ckptkit.writer import step as step_module
from tests.ckptkit.support.inline_pools import inline_pools
from tests.ckptkit.support.simulation import Broken, simulate
from threefold.errors import StorageError
from threefold.storage import Storage

SEED = os.environ.get("SIMULATION_SEED")
FAST, SLOW, PLANTED = 50, int(os.environ.get("SIMULATION_SEEDS", "5000")), 1000


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    inline_pools(monkeypatch)


def run_seeds(seeds: range) -> None:
    committed = 0
    for seed in [int(SEED)] if SEED else seeds:
        committed += sum(map(len, simulate(seed).history.values()))
    assert committed


def test_every_interleaving_keeps_what_is_promised() -> None:
    run_seeds(range(FAST))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_interleavings_do() -> None:
    run_seeds(range(FAST, FAST + SLOW))


def test_a_seed_repeats_itself() -> None:
    first, second = simulate(7), simulate(7)
    assert first.trace == second.trace
    assert first.history == second.history


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


@pytest.mark.ci
@pytest.mark.parametrize(
    "plant",
    [
        commits_over_another,
        deletes_data_before_roots,
        pytest.param(looks_for_pins_only_before, marks=pytest.mark.slow),
        pytest.param(forgets_the_newest, marks=pytest.mark.slow),
        pytest.param(clears_after_a_lost_answer, marks=pytest.mark.slow),
        pytest.param(removes_files_that_may_be_named, marks=pytest.mark.slow),
        pytest.param(sweeps_what_is_young, marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Broken) as found:
        run_seeds(range(PLANTED))
    print(f"{plant.__name__}: {found.value}; {found.value.__notes__[-1]}")
