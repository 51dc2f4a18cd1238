"""What each program of a simulation does: jobs that save and copy to a slower tier, and people's verbs beside them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckptkit.format.keys import Seat
from ckptkit.handoff.protocol import SaveOutcome, TierCopy
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import latest_step
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.copy import copy_step
from ckptkit.runs.catalogue import pin, unpin
from ckptkit.runs.pruning import Pruner, prune, remove
from ckptkit.runs.retention import Retention
from ckptkit.runs.rollback import rollback, undo_rollback
from ckptkit.writer.commit import NotCommitted
from ckptkit.writer.copier import _TierThread
from ckptkit.writer.retries import Retries
from tests.ckptkit.support.programs import Program
from tests.ckptkit.support.small_steps import files, restored_value, save_rank
from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists

NUM_RANKS, LAYOUT = 2, ParallelLayout(tp=2)
VALUES = {"a": 10, "b": 20, "z": 30}
LAST = Retention(keep_last=1)
DEADLINE_S, RETRY_S = 60.0, 20.0


def add_programs(simulation: Any) -> None:
    """Add two jobs and the people beside them."""
    for job in "ab":
        for rank in range(NUM_RANKS):
            Writer(simulation, job, rank, range(1, simulation.num_steps + 1)).add()
    for name, work in PEOPLE.items():
        simulation.programs.append(Program(simulation, name, lambda program, work=work: work(simulation, program)))


def add_rescuer(simulation: Any) -> None:
    """Add a job that saves a step of its own."""
    step = simulation.num_steps + 1
    writers = [Writer(simulation, "z", rank, range(step, step + 1)) for rank in range(NUM_RANKS)]
    for writer in writers:
        writer.add()


class Writer:
    """One writer of a job: it saves steps, prunes after each if it leads, and copies them to the slower tier beside."""

    def __init__(self, simulation: Any, job: str, rank: int, steps: range) -> None:
        self._simulation, self._job, self._rank, self._steps = simulation, job, rank, steps
        self._copier = _TierThread(self._copied, lambda: True, lambda tier_copy: None)

    def add(self) -> None:
        """Add the writer's two programs."""
        name = f"{self._job}.{self._rank}"
        writer = Program(self._simulation, name, self._save_all)
        copier = Program(self._simulation, f"{name}.tier", lambda program: self._copy_all(program, writer))
        self._simulation.programs += [writer, copier]

    def _save_all(self, program: Program) -> None:
        pruner = Pruner()
        for step in self._steps:
            with program.doing("save", step):
                is_committed = self._save(program, step)
            if is_committed:
                self._offer(program, step)
            if is_committed and self._rank == 0:
                with program.doing("prune"):
                    warning = pruner.after_save(program.storage, step, LAST)
                self._simulation.situations.met("prune-warned", "not pruned" in warning)
                self._simulation.trace.append(f"{program.name}: pruned {warning}")
        self._copier.finish()

    def _save(self, program: Program, step: int) -> bool:
        """Save a step; return whether it was committed."""
        simulation, attempt = self._simulation, f"{self._job}-{step}"
        met, must = simulation.situations.met, simulation.must
        seat = Seat(program.storage.address, step, attempt, self._rank, NUM_RANKS)
        try:
            save_rank(
                program.storage,
                seat,
                LAYOUT,
                VALUES[self._job] + step,
                patience_s=lambda _: DEADLINE_S,
                retries=Retries(RETRY_S, sleep=program.sleep),
            )
        except AlreadyExists as error:
            others = [each for each in simulation.run_place.history.get(step, []) if each != attempt]
            must(others, f"{attempt} lost to nobody")
            met("lost-to-another", "first" in error.message)
            met("committed-before-begin", "already" in error.message)
        except NotCommitted as error:
            simulation.refused.add(attempt)
            met("failure-told", "failed: " in error.message)
        except StorageError as error:
            is_late = "not done within" in error.message
            simulation.given_up |= {attempt} if is_late else set()
            met("leader-gave-up", is_late)
            met("other-gave-up", "nor said" in error.message)
            met("failure-told", "failed: " in error.message)
            is_cause = simulation.had_faults or step in simulation.run_place.history
            must(is_cause, f"{attempt} failed and nothing else did: {error}")
        except UserError as error:
            must(False, f"{program.name} met: {error}")
        else:
            must(attempt in simulation.run_place.history.get(step, []), f"{attempt} was said to be committed")
            others = [each for each in simulation.programs if each.process.startswith(f"{self._job}.")]
            met("outcome-after-next-began", any(each.verb.name == "save" and each.verb.step > step for each in others))
            return True
        return False

    def _offer(self, program: Program, step: int) -> None:
        """Let a committed step be copied to the slower tier."""
        source = Seat(program.storage.address, step, f"{self._job}-{step}", self._rank, NUM_RANKS)
        num_files = len(files(VALUES[self._job] + step, LAYOUT, self._rank))
        self._copier.offer(
            TierCopy(source, replace(source, url="memory://slow"), False, num_files, 1, DEADLINE_S, Retention(2))
        )

    def _copy_all(self, program: Program, writer: Program) -> None:
        """Copy what the writer offers, until it is over and nothing is left."""
        while not writer.is_over or self._copier.copies():
            step = max((each.target.step for each in self._copier.copies()), default=0)
            with program.doing("tier" if step else "wait", step):
                if step:
                    self._copier._run()
                else:
                    program.sleep(5.0)

    def _copied(self, outcome: SaveOutcome) -> None:
        met = self._simulation.situations.met
        met("copy-passed-over", "passed over" in outcome.error)


def _keep(simulation: Any, program: Program) -> None:
    """Pin and unpin steps, those that are committed above all."""
    for _ in range(8):
        step = simulation.random.choice(
            [*simulation.run_place.roots, simulation.random.randint(1, simulation.num_steps)]
        )
        with program.doing("pin", step):
            try:
                if simulation.random.random() < 0.7:
                    pin(program.storage, step)
                    simulation.pinned.add(step)
                else:
                    simulation.pinned.discard(step)
                    unpin(program.storage, step)
            except StorageError:
                pass
            except UserError:
                simulation.situations.met("pin-too-late", step in simulation.run_place.gone)


def _prune(simulation: Any, program: Program) -> None:
    """Prune as a person does."""
    for _ in range(3):
        with program.doing("prune"), suppress(UserError):
            report = prune(program.storage, LAST)
            why = [reason for reasons in report.kept.values() for reason in reasons]
            simulation.situations.met("pin-met-by-prune", "pinned meanwhile" in why)
            simulation.situations.met("newest-went", any("went away" in reason for reason in why))
        _check_not_empty(simulation)


def _remove(simulation: Any, program: Program) -> None:
    """Remove steps by their numbers."""
    for _ in range(2):
        step = simulation.random.randint(1, simulation.num_steps)
        with program.doing("remove", step):
            try:
                remove(program.storage, [step])
            except StorageError:
                pass
            except UserError as error:
                simulation.situations.met(
                    "remove-refused", "the only step" in error.message or "newest" in error.message
                )
        program.sleep(simulation.random.uniform(0.0, 10.0))
        _check_not_empty(simulation)


def _roll(simulation: Any, program: Program) -> None:
    """Go back to a step, and perhaps take that back."""
    met = simulation.situations.met
    for _ in range(2):
        program.sleep(simulation.random.uniform(0.0, 10.0))
        step = simulation.random.choice([*simulation.run_place.roots, simulation.num_steps])
        try:
            with program.doing("rollback", step):
                report = rollback(program.storage, step)
            simulation.set_aside |= {*report.set_aside}
            _check_not_empty(simulation)
            if simulation.random.random() < 0.5:
                program.sleep(simulation.random.uniform(0.0, 20.0))
                with program.doing("undo", step):
                    undone = undo_rollback(program.storage, step)
                met("rollback-undone", undone.brought_back)
        except StorageError:
            pass
        except UserError as error:
            met("pin-refused-rollback", "pinned" in error.message)
            met("undo-met-saved-again", "saved again" in error.message)


def _copy(simulation: Any, program: Program) -> None:
    """Copy the newest step to the slower place."""
    for _ in range(2):
        step = 0
        with suppress(UserError):
            with program.doing("look"):
                step = latest_step(program.storage) or 0
            with program.doing("copy", step), CheckpointReader(program.storage, step) as source:
                others = [each for each in simulation.programs if each is not program]
                at_once = any(each.verb.name == "tier" and each.verb.step == step for each in others)
                report = copy_step(source, program.at("memory://slow"))
                simulation.situations.met("copy-went-on", report.bytes_kept)
                simulation.situations.met("copies-at-once", at_once)
                continue
        simulation.situations.met("copy-lost-its-source", step in simulation.run_place.gone)


def _read(simulation: Any, program: Program) -> None:
    """Restore the newest step: whole and right, or not at all."""
    for _ in range(4):
        try:
            with program.doing("look"):
                step = latest_step(program.storage)
            simulation.situations.met("nothing-to-read", step is None)
            if step is not None:
                with program.doing("read", step):
                    value = restored_value(program.storage, step, LAYOUT)
                simulation.must(
                    value in [each + step for each in VALUES.values()], f"step {step} restored state {value}"
                )
            program.sleep(simulation.random.uniform(0.0, 3.0))
        except StorageError:
            pass
        except UserError as error:
            simulation.must("holds no committed step" in error.message, f"a reader met: {error}")


def _check_not_empty(simulation: Any) -> None:
    """Check, once a verb that deletes has ended and nothing failed, that some step of the run is committed."""
    deleting = ("prune", "remove", "rollback", "undo")
    is_settled = not any(each.verb.name in deleting for each in simulation.programs if not each.is_over)
    run = simulation.run_place
    simulation.must(
        simulation.had_faults or not is_settled or run.roots or not run.history,
        "no step of the run is committed any more",
    )


PEOPLE: dict[str, Callable[[Any, Program], None]] = {
    "keeper": _keep,
    "pruner": _prune,
    "remover": _remove,
    "roller": _roll,
    "copier": _copy,
    "reader": _read,
}
