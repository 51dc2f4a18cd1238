"""A run under saves, failures, kills, prunes, pins, copies, reshards and two writers in any order, against a dict.

Whatever came before: every listed step is whole, what retention keeps is there, and a restore returns the dict's bytes.
One process and no waiting, so that hypothesis tries hundreds of orders and shortens the one that breaks something.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

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

from ckptkit.format.keys import ROOT_KEY, attempt_of, step_folder
from ckptkit.format.seat import Seat
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import latest_step, read_root, root_info
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.copy import copy_step
from ckptkit.rewrite.reshard import reshard
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.pins import pin, unpin
from ckptkit.runs.pruning import prune
from ckptkit.runs.record import what_is_wrong
from ckptkit.runs.retention import Retention
from tests.ckptkit.support.inline_pools import inline_pools
from tests.ckptkit.support.programs import Killed
from tests.ckptkit.support.small_steps import LAYOUTS, half_of, hash_of, restored_value, save_rank, save_ranks
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import AlreadyExists, Storage, TemporaryFailure
from threefold.storage.fault import Fault, FaultStorage
from threefold.storage.memory import MemoryStorage

STEPS = st.integers(1, 6)
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


@dataclass
class Step:
    """What the dict knows of a committed step."""

    value: int
    layout: ParallelLayout
    is_pinned: bool = False


class Dead(FaultStorage):
    """A storage of which nothing more is heard once a request was met by the kill."""

    def __init__(self, storage: Storage, after: int, *, served: bool) -> None:
        super().__init__(storage, Fault(Killed(), after=after, times=1, served=served), Fault(Killed(), after=after))


def faulty(storage: Storage, fault: tuple[str, int, bool, int]) -> Storage:
    kind, after, served, times = fault
    if kind == "killed":
        return Dead(storage, after, served=served)
    error = StorageError("refused") if kind == "refused" else TemporaryFailure("busy")
    return FaultStorage(storage, Fault(error, after=after, times=times, served=served))


def kept(steps: dict[int, Step], policy: Retention) -> set[int]:
    """The steps that a policy keeps, said once more: the newest, the pinned, the last, the first of each multiple."""
    ascending = sorted(steps)
    stay = {step for step in ascending if steps[step].is_pinned} | set(ascending[-1:])
    stay |= set(ascending[-policy.keep_last :] if policy.keep_last else ())
    for step in ascending if policy.keep_every else ():
        first = next(each for each in ascending if each // policy.keep_every == step // policy.keep_every)
        stay |= {first} if first >= policy.keep_every else set()
    return stay


class RunMachine(RuleBasedStateMachine):
    """Two runs, and what each must hold."""

    make_storage: Callable[[str], Storage] = MemoryStorage

    @initialize()
    def begin(self) -> None:
        self.storages = {name: type(self).make_storage(f"memory://{name}") for name in ("run", "other")}
        self.steps: dict[str, dict[int, Step]] = {"run": {}, "other": {}}
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
        stay = kept(self.steps[run], policy)
        report = prune(self.storages[run], policy)
        assert set(report.deleted) == self.steps[run].keys() - stay
        self.steps[run] = {step: known for step, known in self.steps[run].items() if step in stay}

    @rule(run=RUNS, policy=POLICIES, fault=FAULTS)
    def prune_under_a_fault(self, run: str, policy: Retention, fault: tuple[str, int, bool, int]) -> None:
        """Steps go that need not stay, all or some of them."""
        stay = kept(self.steps[run], policy)
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

    @rule(run=RUNS, step=STEPS)
    def pin(self, run: str, step: int) -> None:
        if step not in self.steps[run]:
            with pytest.raises(UserError, match="holds no committed step"):
                pin(self.storages[run], step)
            return
        pin(self.storages[run], step, "kept")
        self.steps[run][step].is_pinned = True

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
