"""A run under saves, failures, kills, prunes, pins, copies, reshards, removals, rollbacks and two writers in any order,
against a dict.

Whatever came before: every listed step is whole, what retention keeps is there, and a restore returns the dict's bytes.
One process and no waiting, so that hypothesis tries hundreds of orders and shortens the one that breaks something.
"""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckptkit.format.keys import ROOT_KEY, Seat, aside_key, attempt_of, step_folder
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import latest_step, read_root, root_info
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.copy import copy_step
from ckptkit.rewrite.reshard import reshard
from ckptkit.runs.catalogue import committed_steps, pin, unpin
from ckptkit.runs.pruning import prune, remove
from ckptkit.runs.record import what_is_wrong
from ckptkit.runs.retention import Retention
from ckptkit.runs.rollback import rollback, undo_rollback
from tests.ckptkit.support.inline_pools import inline_pools
from tests.ckptkit.support.programs import Killed
from tests.ckptkit.support.run_model import Step, faulty, kept_steps
from tests.ckptkit.support.small_steps import LAYOUTS, half_of, hash_of, restored_value, save_rank, save_ranks
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import AlreadyExists, Storage
from threefold.storage.memory import MemoryStorage

STEPS = st.integers(1, 6)
NO_STEP = "holds no committed step|nothing is stored"
RUNS = st.sampled_from(["run", "other"])
A_LAYOUT = st.sampled_from(LAYOUTS)
FAULTS = st.builds(
    lambda kind, after, served, times: (kind, after, served, times),
    st.sampled_from(["refused", "busy", "killed"]),
    st.integers(0, 25),
    st.booleans(),
    st.integers(1, 3),
)
POLICIES = st.builds(Retention, keep_last=st.integers(0, 3), keep_every=st.sampled_from([0, 0, 2, 3])).filter(
    lambda policy: policy.has_rules
)


class RunMachine(RuleBasedStateMachine):
    """Two runs, and what each must hold."""

    make_storage: Callable[[str], Storage] = MemoryStorage

    @initialize()
    def begin(self) -> None:
        self.storages = {name: type(self).make_storage(f"memory://{name}") for name in ("run", "other")}
        self.steps: dict[str, dict[int, Step]] = {"run": {}, "other": {}}
        self.aside: dict[str, dict[int, dict[str, Step]]] = {"run": {}, "other": {}}  # by attempt, the last at the end
        self.numbers = itertools.count(1)

    @rule(run=RUNS, step=STEPS, layout=A_LAYOUT)
    def save(self, run: str, step: int, layout: ParallelLayout) -> None:
        value = next(self.numbers)
        if step in self.steps[run]:
            with pytest.raises(AlreadyExists):
                save_ranks(self.storages[run], step, f"s{value}", layout, value)
            return
        save_ranks(self.storages[run], step, f"s{value}", layout, value)
        self.steps[run][step] = Step(value, layout)

    @rule(run=RUNS, step=STEPS, layout=A_LAYOUT, fault=FAULTS)
    def save_under_a_fault(
        self, run: str, step: int, layout: ParallelLayout, fault: tuple[str, int, bool, int]
    ) -> None:
        """It commits the step whole, or not at all; a root whose answer was lost may be there."""
        value = next(self.numbers)
        is_done = self._survives(
            lambda: save_ranks(faulty(self.storages[run], fault), step, f"f{value}", layout, value)
        )
        if step not in self.steps[run]:
            assert not is_done or root_info(self.storages[run], step), "it returned, and committed nothing"
            if root_info(self.storages[run], step):
                self.steps[run][step] = Step(value, layout)

    @rule(run=RUNS, step=STEPS, layout=A_LAYOUT, order=st.randoms(use_true_random=False))
    def save_from_two_jobs(self, run: str, step: int, layout: ParallelLayout, order: object) -> None:
        """Two jobs save one step at a time, their writers in any order: one of them commits it."""
        values = next(self.numbers), next(self.numbers)
        jobs = [(value, rank) for value in values for rank in range(1, layout.world_size)]
        order.shuffle(jobs)  # type: ignore[attr-defined]
        leaders = [(value, 0) for value in values]
        order.shuffle(leaders)  # type: ignore[attr-defined]
        won = []
        for value, rank in jobs + leaders:
            seat = Seat("", step, f"j{value}", rank, layout.world_size)
            try:
                save_rank(self.storages[run], seat, layout, value, awaits_commit=False)
            except AlreadyExists:
                continue
            won += [value] if rank == 0 else []
        assert len(won) == (step not in self.steps[run])
        if won:
            self.steps[run][step] = Step(won[0], layout)

    @rule(run=RUNS, policy=POLICIES)
    def prune(self, run: str, policy: Retention) -> None:
        stay = kept_steps(self.steps[run], policy)
        report = prune(self.storages[run], policy)
        assert set(report.deleted) == self.steps[run].keys() - stay
        self.steps[run] = {step: known for step, known in self.steps[run].items() if step in stay}

    @rule(run=RUNS, policy=POLICIES, fault=FAULTS)
    def prune_under_a_fault(self, run: str, policy: Retention, fault: tuple[str, int, bool, int]) -> None:
        """Steps go that need not stay, all or some of them."""
        stay = kept_steps(self.steps[run], policy)
        self._survives(lambda: prune(faulty(self.storages[run], fault), policy))
        there = set(committed_steps(self.storages[run]))
        assert stay <= there <= self.steps[run].keys()
        self.steps[run] = {step: known for step, known in self.steps[run].items() if step in there}

    @rule(run=RUNS)
    def sweep(self, run: str) -> None:
        """While nobody saves a sweep leaves nothing but committed steps and pins."""
        storage = self.storages[run]
        prune(storage, Retention(), orphans_older_than_s=0)
        named = {f"{step_folder(step)}/{read_root(storage, step).attempt}/" for step in self.steps[run]}
        for key in storage.list_keys():
            folder, _, name = key.partition("/")
            known = self.steps[run].get(int(folder.removeprefix("step-")))
            assert known is not None, f"{key} of no step"
            assert attempt_of(name) is None or key.startswith(tuple(named)), f"{key} of no committed attempt"
        self.aside[run] = {}

    @rule(run=RUNS, step=STEPS)
    def pin(self, run: str, step: int) -> None:
        if step not in self.steps[run]:
            with pytest.raises(UserError, match="holds no committed step"):
                pin(self.storages[run], step)
            return
        pin(self.storages[run], step, "kept")
        self.steps[run][step].is_pinned = True

    @rule(run=RUNS, steps=st.sets(STEPS, min_size=1, max_size=3), newest_too=st.booleans(), fault=st.none() | FAULTS)
    def remove(self, run: str, steps: set[int], newest_too: bool, fault: tuple[str, int, bool, int] | None) -> None:
        """All of them go, or none as one is refused; under a fault some."""
        known, storage = self.steps[run], self.storages[run]
        refused = (
            NO_STEP if steps - known.keys()
            else "pinned" if any(known[step].is_pinned for step in steps)
            else "is the (only|newest good) step" if max(known) in steps and not newest_too
            else ""
        )  # fmt: skip
        if refused:
            with pytest.raises(UserError, match=refused):
                remove(storage, steps, newest_too=newest_too)
        elif fault is None:
            assert set(remove(storage, steps, newest_too=newest_too).deleted) == steps
            self.steps[run] = {step: each for step, each in known.items() if step not in steps}
        else:
            self._survives(lambda: remove(faulty(storage, fault), steps, newest_too=newest_too))
            there = set(committed_steps(storage))
            assert known.keys() - steps <= there <= known.keys()
            self.steps[run] = {step: each for step, each in known.items() if step in there}

    @rule(run=RUNS, step=STEPS, fault=st.none() | FAULTS)
    def rollback(self, run: str, step: int, fault: tuple[str, int, bool, int] | None) -> None:
        """Newer steps are set aside, newest first; under a fault some of them."""
        known, storage = self.steps[run], self.storages[run]
        newer = {each for each in known if each > step}
        if step not in known or any(known[each].is_pinned for each in newer):
            with pytest.raises(UserError, match="pinned" if step in known else NO_STEP):
                rollback(storage, step)
            return
        attempts = {each: read_root(storage, each).attempt for each in newer}
        if fault is None:
            assert set(rollback(storage, step).set_aside) == newer
        else:
            self._survives(lambda: rollback(faulty(storage, fault), step))
        there = set(committed_steps(storage))
        gone = newer - there
        assert there == known.keys() - gone
        assert max(newer & there, default=0) < min(gone, default=9)
        assert fault is not None or gone == newer
        for each in gone:
            assert storage.info(aside_key(each, attempts[each]))
            found = self.aside[run].setdefault(each, {})
            found.pop(attempts[each], None)
            found[attempts[each]] = known.pop(each)

    @rule(run=RUNS, step=STEPS, fault=st.none() | FAULTS)
    def undo_rollback(self, run: str, step: int, fault: tuple[str, int, bool, int] | None) -> None:
        """What was set aside last of each newer step comes back, unless one of them was saved again."""
        known, storage = self.steps[run], self.storages[run]
        expected: dict[int, str] = {}
        for number, tries in self.aside[run].items():
            for attempt in [*tries]:
                if storage.info(aside_key(number, attempt)) is None:  # committed by a copy, and then deleted
                    del tries[attempt]
            if number <= step or not tries:
                continue
            if number not in known:
                expected[number] = [*tries][-1]
            elif storage.info(aside_key(number, read_root(storage, number).attempt)) is None:
                with pytest.raises(UserError, match="was saved again"):
                    undo_rollback(storage, step)
                return
        if fault is None:
            assert set(undo_rollback(storage, step).brought_back) >= expected.keys()
        else:
            self._survives(lambda: undo_rollback(faulty(storage, fault), step))
        there = set(committed_steps(storage))
        assert known.keys() <= there <= known.keys() | expected.keys()
        for number in there - known.keys():
            known[number] = self.aside[run][number].pop(expected[number])

    @rule(run=RUNS, step=STEPS)
    def unpin(self, run: str, step: int) -> None:
        assert unpin(self.storages[run], step) == (step in self.steps[run] and self.steps[run][step].is_pinned)
        if step in self.steps[run]:
            self.steps[run][step].is_pinned = False

    @precondition(lambda self: self.steps["run"])
    @rule(data=st.data(), fault=st.none() | FAULTS)
    def copy(self, data: st.DataObject, fault: tuple[str, int, bool, int] | None) -> None:
        """A copy commits the same bytes elsewhere, beside nothing else."""
        step = data.draw(st.sampled_from(sorted(self.steps["run"])))
        target = self.storages["other"]
        is_free = step not in self.steps["other"]
        is_same = is_free or self._root("run", step) == self._root("other", step)

        def work() -> None:
            with CheckpointReader(self.storages["run"], step) as reader:
                copy_step(reader, faulty(target, fault) if fault else target, verify=True)

        if is_same:
            is_done = self._survives(work) if fault else work() is None
            self._adopt("other", step, self.steps["run"][step], is_done=is_done and is_free)
        else:
            with pytest.raises(
                (UserError, Killed), match="already holds another checkpoint" if fault is None else None
            ):
                work()

    @precondition(lambda self: self.steps["run"])
    @rule(data=st.data(), layout=A_LAYOUT, fault=st.none() | FAULTS)
    def reshard(self, data: st.DataObject, layout: ParallelLayout, fault: tuple[str, int, bool, int] | None) -> None:
        """A reshard commits the same state for other ranks; what is there already stays."""
        step = data.draw(st.sampled_from(sorted(self.steps["run"])))
        target = self.storages["other"]

        def work() -> None:
            with CheckpointReader(self.storages["run"], step) as reader:
                reshard(reader, faulty(target, fault) if fault else target, layout, slab_bytes=1 << 20)

        was_there = step in self.steps["other"]
        try:
            is_done = self._survives(work) if fault else work() is None
        except UserError:
            assert was_there
            return
        if not was_there:
            self._adopt("other", step, Step(self.steps["run"][step].value, layout), is_done=is_done)
            if step in self.steps["other"]:
                assert hash_of(target, step) == hash_of(self.storages["run"], step)

    @precondition(lambda self: self.steps["run"] or self.steps["other"])
    @rule(data=st.data(), layout=A_LAYOUT)
    def restore(self, data: st.DataObject, layout: ParallelLayout) -> None:
        run = data.draw(st.sampled_from([name for name, steps in self.steps.items() if steps]))
        step = data.draw(st.sampled_from(sorted(self.steps[run])))
        assert restored_value(self.storages[run], step, layout) == self.steps[run][step].value

    @invariant()
    def committed_steps_are_the_dicts_and_whole(self) -> None:
        for run, storage in getattr(self, "storages", {}).items():
            known = self.steps[run]
            assert committed_steps(storage) == sorted(known)
            assert latest_step(storage) == max(known, default=None)
            for step, each in known.items():
                root = read_root(storage, step)
                assert (root.metadata["value"], str(root.layout)) == (each.value, str(each.layout))
                assert not half_of(storage, step, root)

    def teardown(self) -> None:
        """Look at each step as a prune does, with all that its root names."""
        for run, storage in getattr(self, "storages", {}).items():
            for step in self.steps[run]:
                assert not what_is_wrong(storage, step, root_info(storage, step))

    def _survives(self, work: Callable[[], object]) -> bool:
        """Whether a piece of work under a fault came to its end."""
        try:
            work()
        except CheckFailed:
            raise
        except (StorageError, Killed):
            return False
        return True

    def _adopt(self, run: str, step: int, known: Step, *, is_done: bool) -> None:
        """Note a step that was to be made elsewhere, if it is there."""
        is_there = root_info(self.storages[run], step) is not None
        assert is_there or not is_done, "it returned, and committed nothing"
        if is_there and step not in self.steps[run]:
            self.steps[run][step] = Step(known.value, known.layout)

    def _root(self, run: str, step: int) -> bytes:
        return self.storages[run].read(f"{step_folder(step)}/{ROOT_KEY}")


def run_machine(examples: int, steps: int, machine: type[RunMachine] = RunMachine) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    inline_pools(monkeypatch)


def test_a_run_is_what_a_dict_says() -> None:
    run_machine(25, 25)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_is_what_a_dict_says_for_longer() -> None:
    run_machine(400, 60)
