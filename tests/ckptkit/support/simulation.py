"""Many programs on one run, their storage requests interleaved by a seed: the same seed, the same interleaving.

Each program is a thread that runs only when it is chosen, up to its next request. Before each request any program may
be chosen, and some are killed there; one that waits for others sleeps until the run changes. Requests fail, or are
served and fail, as the seed has it. Pools of threads inside ckptkit work in their caller's thread meanwhile
(`inline_pools`). After each request that changed the run all that must hold is checked; `Broken` says what does not.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptkit.format.keys import Seat, attempt_of, step_folder
from ckptkit.format.root import Root
from ckptkit.loading.roots import latest_step, root_key
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps, pin, unpin
from ckptkit.runs.pruning import Pruner, prune
from ckptkit.runs.retention import Retention
from ckptkit.writer.commit import NotCommitted
from tests.ckptkit.support.programs import Program, Turns
from tests.ckptkit.support.small_steps import half_of, restored_value, save_rank
from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, ObjectInfo, TemporaryFailure
from threefold.storage.memory import MemoryStorage
from threefold.storage.wrapping import Request

T = TypeVar("T")
CHANGES = ("write", "delete", "copy")
WEEK_S = 7 * 24 * 3600.0
NUM_RANKS, LAYOUT = 2, ParallelLayout(tp=2)
LAST = Retention(keep_last=1)


class Broken(BaseException):
    """Something that must hold does not; no program catches it."""


@dataclass(frozen=True)
class Chances:
    """How likely the same program goes on, is killed, has a request that fails, or one whose answer is lost."""

    stay: float
    kill: float
    fail: float
    lose: float


class Simulation:
    """One run and all programs on it, under one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = MemoryStorage("memory://simulated")
        chances = self.random
        is_calm = chances.random() < 0.5
        self.chances = Chances(
            chances.choice([0.0, 0.6, 0.9]),
            *((0.0, 0.0, 0.0) if is_calm else (chances.choice([0.0, 0.01, 0.05]) for _ in range(3))),
        )
        self.num_steps = chances.choice([2, 2, 2, 3])
        self.trace: deque[str] = deque(maxlen=60)
        self.had_faults = False
        self.history: dict[int, list[str]] = {}  # of each step the attempts that were committed
        self.pinned: set[int] = set()
        self.refused: set[str] = set()  # attempts of which somebody was told that they will not be committed
        self._roots: dict[int, tuple[bytes, Root]] = {}
        self._deleted: dict[int, bytes] = {}
        self._programs: list[Program] = []
        self.failure: BaseException | None = None
        self.num_changes = 0
        self._ended = threading.Lock()

    def run(self) -> None:
        """Start the programs, let them run to their ends, and check what is left."""
        for job, value in (("a", 10), ("b", 20)):
            for rank in range(NUM_RANKS):
                self._programs.append(Program(self, f"{job}.{rank}", self._writer(job, rank, value)))
        self._programs.append(Program(self, "keeper", self._keeper))
        self._programs.append(Program(self, "pruner", self._pruner))
        self._programs.append(Program(self, "reader", self._reader))
        self._ended.acquire()
        self.choose(None).resume()
        self._ended.acquire()
        if self.failure is not None:
            raise self.failure
        self._check_end()

    def choose(self, last: Program | None) -> Program:
        """Return the program that goes on after one; killed, where that is its lot."""
        alive = [each for each in self._programs if not each.is_over]
        if self.failure is not None:
            for each in alive:
                each.is_killed = True
            return alive[0]
        awake = [each for each in alive if each.wakes_after < self.num_changes] or alive
        if last not in awake or self.random.random() >= self.chances.stay:
            last = self.random.choice(awake)
        last.wakes_after = -1
        if self.random.random() < self.chances.kill / 4:
            self.had_faults = last.is_killed = True
            self.trace.append(f"{last.name} is killed")
        return last

    def end(self, program: Program) -> None:
        """Let another program go on after one that is over, if there is one."""
        if all(each.is_over for each in self._programs):
            self._ended.release()
        else:
            self.choose(None).resume()

    def serve(self, program: Program, request: Request, work: Callable[[], T]) -> T:
        """Serve a request, or fail it, and check the run after a change."""
        self.trace.append(f"{program.name}: {request.operation} {' '.join(request.keys)}")
        if request.operation == "delete":
            for key in request.keys:
                self._check_delete(program, key)
        chance = self.random.random()
        if chance < self.chances.fail:
            self.had_faults = True
            self.trace.append("  failed")
            raise TemporaryFailure("busy") if self.random.random() < 0.7 else StorageError("refused")
        try:
            result = work()
        finally:
            if request.operation in CHANGES:
                self.num_changes += 1
                self._check({key.partition("/")[0] for key in request.keys})
        if chance > 1 - self.chances.lose:
            self.had_faults = True
            self.trace.append("  served, its answer lost")
            raise StorageError("the connection was reset")
        return result

    def aged(self, item: ObjectInfo) -> ObjectInfo:
        """What a listing shows: files of attempts whose programs are all over were last changed a week ago."""
        attempt = attempt_of(item.key.partition("/")[2])
        is_young = attempt is None or self._lives(attempt)
        return item if is_young else replace(item, modified_s=item.modified_s - WEEK_S)

    def _lives(self, attempt: str) -> bool:
        """Whether a program runs that may write files of an attempt."""
        job = attempt.partition("-")[0]
        return any(each.name.partition(".")[0] == job and not each.is_over for each in self._programs)

    def _check_delete(self, program: Program, key: str) -> None:
        """Check that nobody takes the files of another program's attempt that may still be committed."""
        folder, _, name = key.partition("/")
        attempt = attempt_of(name) or ""
        is_own = attempt.startswith(program.name.partition(".")[0])
        was_committed = attempt in self.history.get(int(folder.removeprefix("step-")), [])
        self._must(
            not attempt or is_own or was_committed or not self._lives(attempt), f"{key} of a running save was swept"
        )

    def _writer(self, job: str, rank: int, value: int) -> Callable[[Program], None]:
        """One writer of a job: it saves steps 1, 2, ... and, where it leads, prunes after each."""

        def work(program: Program) -> None:
            pruner = Pruner()
            for step in range(1, self.num_steps + 1):
                looks = iter(range(50))
                seat = Seat(program.storage.address, step, f"{job}-{step}", rank, NUM_RANKS)
                try:
                    save_rank(
                        program.storage, seat, LAYOUT, value + step, retries=Turns(self, program),
                        patience_s=lambda _, looks=looks: 1e9 if next(looks, None) is not None else -1.0,
                    )  # fmt: skip
                except AlreadyExists:
                    others = [each for each in self.history.get(step, []) if each != seat.attempt]
                    self._must(bool(others), f"{seat.attempt} lost to nobody")
                except NotCommitted:
                    self.refused.add(seat.attempt)
                except StorageError as error:
                    self.had_faults |= "not done within" in error.message or "nor said" in error.message
                except UserError as error:
                    self._must(False, f"{program.name} met: {error}")
                else:
                    self._must(seat.attempt in self.history.get(step, []), f"{seat.attempt} was said to be committed")
                    if rank == 0:
                        warning = pruner.after_save(program.storage, step, LAST)
                        self.trace.append(f"{program.name}: pruned {warning}")

        return work

    def _keeper(self, program: Program) -> None:
        """Pins and unpins steps, those that are committed above all."""
        for _ in range(8):
            step = self.random.choice([*self._roots, self.random.randint(1, self.num_steps)])
            with suppress(UserError):
                if self.random.random() < 0.7:
                    pin(program.storage, step)
                    self.pinned.add(step)
                else:
                    self.pinned.discard(step)
                    unpin(program.storage, step)

    def _pruner(self, program: Program) -> None:
        """Prunes as a person does."""
        for _ in range(3):
            with suppress(UserError):
                prune(program.storage, LAST)

    def _reader(self, program: Program) -> None:
        """Restores the newest step: whole and right, or not at all."""
        for _ in range(3):
            try:
                step = latest_step(program.storage)
                if step is not None:
                    value = restored_value(program.storage, step, LAYOUT)
                    self._must(value in (10 + step, 20 + step), f"step {step} restored state {value}")
            except StorageError:
                pass
            except UserError as error:
                self._must("holds no committed step" in error.message, f"a reader met: {error}")

    def _check(self, folders: Set[str]) -> None:
        """Check that steps that changed are whole if listed, keep their roots, and go only where a newer one stays."""
        roots: dict[int, tuple[bytes, Root]] = {}
        for step in range(1, self.num_steps + 1):
            if step_folder(step) not in folders:
                if step in self._roots:
                    roots[step] = self._roots[step]
            elif self.store.info(root_key(step)) is not None:
                data = self.store.read(root_key(step))
                known = self._roots.get(step)
                roots[step] = (
                    known if known and known[0] == data else (data, Root.from_bytes(data, f"the root of step {step}"))
                )
                self._must(known is None or known[0] == data, f"the root of step {step} was replaced")
                self._must(not (fault := half_of(self.store, step, roots[step][1])), f"a half step: {fault}")
                if known is None and self._deleted.get(step) != data:
                    attempt = roots[step][1].attempt
                    self.history.setdefault(step, []).append(attempt)
                    self._must(attempt not in self.refused, f"{attempt} was said never to be committed")
        for step in self._roots.keys() - roots.keys():
            self._deleted[step] = self._roots[step][0]
            self._must(any(newer > step for newer in roots), f"step {step} was deleted, the newest one")
        self._roots = roots

    def _check_end(self) -> None:
        """Check that pinned steps are there, and that a sweep leaves nothing but what is committed, which restores."""
        was_pruner_killed = any(each.is_killed for each in self._programs)
        if not was_pruner_killed and not self.chances.fail and not self.chances.lose:
            lost = self.pinned - self._roots.keys()
            self._must(not lost, f"pinned steps {sorted(lost)} are gone")
        if not self.had_faults:
            self._must(max(self.history, default=0) == self.num_steps, f"step {self.num_steps} was never committed")
        prune(self.store, Retention(keep_last=1), orphans_older_than_s=0)
        self._check({step_folder(step) for step in self._roots})
        extra = {
            key
            for key in self.store.list_keys()
            if (attempt := attempt_of(key.partition("/")[2])) and not self._stays(key, attempt)
        }
        self._must(not extra, f"a sweep left {sorted(extra)}")
        for step in committed_steps(self.store):
            restored_value(self.store, step, ParallelLayout())

    def _stays(self, key: str, attempt: str) -> bool:
        """Whether a sweep leaves a file: its attempt is committed, or its step is pinned."""
        folder = key.partition("/")[0]
        is_named = any(
            folder == step_folder(step) and attempt == root.attempt for step, (_, root) in self._roots.items()
        )
        return is_named or self.store.info(f"{folder}/pin.json") is not None

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            self.failure = self.failure or Broken(what)
            raise self.failure


def simulate(seed: int) -> Simulation:
    """Run one seed; a failure names it and shows the last requests."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except BaseException as error:
        error.add_note(f"the last requests of seed {seed}:\n  " + "\n  ".join(simulation.trace))
        error.add_note(f"again: SIMULATION_SEED={seed} pytest tests/ckptkit/test_simulation.py")
        raise
    return simulation
