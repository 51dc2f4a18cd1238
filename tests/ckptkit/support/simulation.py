"""Many programs on one run, their storage requests interleaved by a seed: the same seed, the same interleaving.

Each program is a thread that runs only when it is chosen, up to its next request or pause. Then any program may be
chosen, and some are killed there; time is simulated, and passes with requests and pauses. Requests fail, are served and
fail, take minutes, or fail and are served later; listings are late. Pools of threads inside ckptkit work in their
caller's thread meanwhile (`inline_pools`). After each request that changed a place all that must hold is checked;
`Broken` says what does not.

At some moment faults stop for good. A job that begins then must have committed its save within MAX_REQUESTS requests,
and every verb must come to its end; `Hung` names one that does not. A root that lands late lands before its step is
pruned: a request does not live as long as a step.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Set
from dataclasses import replace
from typing import TypeVar

from ckptkit.format.keys import ROOT_KEY, attempt_of, part_keys, step_folder
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from tests.ckptkit.support.program_roles import NUM_RANKS, add_programs, add_rescuer
from tests.ckptkit.support.programs import Hung, Program
from tests.ckptkit.support.simulated_faults import Broken, Chances, LatePut
from tests.ckptkit.support.simulated_time import SimulatedTime
from tests.ckptkit.support.situations import Situations
from tests.ckptkit.support.small_steps import restored_value
from tests.ckptkit.support.watched_place import WatchedPlace
from threefold.errors import StorageError
from threefold.storage import ObjectInfo, TemporaryFailure
from threefold.storage.memory import MemoryStorage
from threefold.storage.wrapping import Request

T = TypeVar("T")
CHANGES = ("write", "delete", "copy")
WEEK_S = 7 * 24 * 3600.0
RUN, SLOW = "memory://run", "memory://slow"
MAX_REQUESTS = 60  # of a save of two writers, up to its root, once nothing fails any more
HANG_S = 60.0  # of real time, in which some program must come to a turn
MAX_LATE_TURNS = 40


class Simulation:
    """One run, a slower place and all programs on them, under one seed."""

    def __init__(self, seed: int, clock: SimulatedTime) -> None:
        self.random, self.clock = random.Random(seed), clock
        clock.begin(seed)
        draw = self.random
        is_calm = draw.random() < 0.4
        faults = (0.0,) * 6 if is_calm else (draw.choice([0.0, 0.01, 0.05]) for _ in range(6))
        self.chances = Chances(draw.choice([0.0, 0.6, 0.9]), *faults)
        self.num_steps = draw.choice([2, 2, 2, 3])
        self.faults_end_at = draw.randint(50, 1500)
        self.trace: deque[str] = deque(maxlen=80)
        self.had_faults = self.is_rescued = False
        self.places = {place: MemoryStorage(place) for place in (RUN, SLOW)}
        self.watched = {
            place: WatchedPlace(store, self.num_steps + 1, self.must) for place, store in self.places.items()
        }
        self.situations = Situations(self)
        self.pinned: set[int] = set()
        self.unpinned: set[int] = set()
        self.refused: set[str] = set()  # attempts of which somebody was told that they will not be committed
        self.given_up: set[str] = set()  # attempts whose first writer waited in vain
        self.set_aside: set[int] = set()
        self.num_changes = self.num_turns = self.last_rollback = self.num_requests = 0  # the last: of the late job
        self.programs: list[Program] = []
        self.failure: BaseException | None = None
        self._written: deque[tuple[int, Program, str, str]] = deque(maxlen=6)  # what a late listing may miss
        self._late: list[LatePut] = []
        self._deleted_at: dict[tuple[str, str], int] = {}
        self._ended = threading.Lock()

    @property
    def run_place(self) -> WatchedPlace:
        """The run."""
        return self.watched[RUN]

    def run(self, hang_s: float) -> None:
        """Start the programs, let them run to their ends, and check what is left; Hung if so long none has a turn."""
        add_programs(self)
        self._ended.acquire()
        self.choose(None).resume()
        seen = -1
        while not self._ended.acquire(timeout=hang_s):
            if seen == self.num_turns:
                verb = self.clock.running.verb
                raise Hung(
                    f"{self.clock.running.name} asks for nothing any more in its {verb.name} of step {verb.step}"
                )
            seen = self.num_turns
        if self.failure is not None:
            raise self.failure
        self._check_end()

    def choose(self, last: Program | None) -> Program:
        """Return the program that goes on after one; killed, where that is its lot."""
        self.num_turns += 1
        if self.num_turns > self.faults_end_at and not self.is_rescued and self.failure is None:
            self._stop_faults()
        alive = [program for program in self.programs if not program.is_over]
        if self.failure is not None:
            for program in alive:
                program.is_killed = True
            return alive[0]
        chosen = self._awake(alive, last)
        if self.random.random() < self.chances.kill / 4:
            self.had_faults = True
            self.trace.append(f"{chosen.process} is killed")
            for program in alive:
                if program.process == chosen.process:
                    self.situations.killed(program)
                    program.is_killed, program.wakes_at = True, 0.0
        chosen.last_turn, self.clock.running = self.num_turns, chosen
        return chosen

    def _awake(self, alive: list[Program], last: Program | None) -> Program:
        """Choose among those that do not pause; time goes on to the end of the first pause if all do."""
        self.clock.now = max(self.clock.now, min(each.wakes_at for each in alive))
        awake = [each for each in alive if each.wakes_at <= self.clock.now]
        if self.is_rescued:
            return min(awake, key=lambda each: each.last_turn)  # in turn, so that what waits is waited for
        if last in awake and self.random.random() < self.chances.stay:
            return last
        return self.random.choice(awake)

    def _stop_faults(self) -> None:
        """Let nothing fail any more, and another job begin."""
        self.is_rescued, self.chances = True, Chances(stay=0.0)
        self.trace.append("faults stop")
        add_rescuer(self)

    def end(self, program: Program) -> None:
        """Let another program go on after one that is over, if there is one."""
        if all(each.is_over for each in self.programs) and (self.is_rescued or self.failure is not None):
            self._ended.release()
            return
        if all(each.is_over for each in self.programs):
            self._stop_faults()
        self.choose(None).resume()

    def serve(self, program: Program, place: str, request: Request, work: Callable[[], T]) -> T:
        """Serve a request, or fail it, and check the place after a change."""
        self.clock.now += self.random.uniform(0.005, 0.1)
        self._land(self.num_turns)
        what = f"{request.operation} {place[9:]} {' '.join(request.keys)}"
        self.trace.append(f"{self.clock.now:.2f} {program.name} ({program.verb.name}): {what}")
        if program.name.startswith("z.") and program.verb.name == "save":
            self._count_request()
        if request.operation == "delete":
            for key in request.keys:
                self._check_delete(program, place, key)
        if self._strikes("stall"):
            program.sleep(self.random.uniform(1.0, 300.0))
        if self._strikes("fail"):
            raise self._error()
        if request.operation == "write" and self._strikes("late"):
            due = self.num_turns + self.random.randint(1, MAX_LATE_TURNS)
            self._late.append(LatePut(due, self.num_turns, program, place, request, work))
            raise self._error()
        result = self._apply(program, place, request, work)
        if self._strikes("lose"):
            is_root = request.operation == "write" and request.keys[0].endswith(ROOT_KEY)
            self.situations.met("root-put-answer-lost", is_root)
            raise self._error()
        return result

    def _count_request(self) -> None:
        """Check that the job that began once faults had stopped needs few requests until its step is committed."""
        if self.num_steps + 1 not in self.run_place.history:
            self.num_requests += 1
            what = f"step {self.num_steps + 1} is not committed after {MAX_REQUESTS} requests, though nothing fails"
            self.must(self.num_requests <= MAX_REQUESTS, what)

    def _apply(self, program: Program, place: str, request: Request, work: Callable[[], T]) -> T:
        """Serve a request."""
        store = self.places[place]
        before = {key for key in request.keys if store.info(key)} if request.operation == "write" else set[str]()
        try:
            result = work()
        finally:
            if request.operation in CHANGES:
                self.num_changes += 1
                self._written.extend(
                    (self.num_changes, program, place, key) for key in request.keys if key not in before
                )
                self._check_change(program, place, request)
        self.situations.met("own-root-met", any(key.endswith(ROOT_KEY) for key in before))
        return result

    def _check_change(self, program: Program, place: str, request: Request) -> None:
        is_rolling = program.verb.name in ("rollback", "undo")
        if request.operation == "delete":
            self._deleted_at |= {(place, key): self.num_turns for key in request.keys}
        if is_rolling:
            self.last_rollback = self.num_changes
        self.situations.served(program, place, request)
        folders = {key.partition("/")[0] for key in request.keys}
        watched = self.watched[place]
        watched.check(folders, may_lose_newest=is_rolling or self.last_rollback >= program.verb.began > 0)
        for step in watched.roots:
            self.must(watched.roots[step][1].attempt not in self.refused, f"step {step} was said never to be committed")
            if place == SLOW:
                known = self.run_place.history.get(step, [])
                self.must(watched.roots[step][1].attempt in known, f"step {step} of the slow tier was never committed")

    def _strikes(self, kind: str) -> bool:
        chance = getattr(self.chances, kind)
        if chance and self.random.random() < chance:
            self.had_faults = True
            self.trace.append(f"  {kind}")
            return True
        return False

    def _error(self) -> StorageError:
        return TemporaryFailure("busy") if self.random.random() < 0.7 else StorageError("the connection was reset")

    def _land(self, until: int) -> None:
        """Let writes land that are due, but roots of steps that were deleted since."""
        due = [each for each in self._late if each.due <= until]
        self._late = [each for each in self._late if each.due > until]
        for put in due:
            key = put.request.keys[0]
            is_root, attempt = key.endswith(ROOT_KEY), attempt_of(key.partition("/")[2])
            if is_root and self._deleted_at.get((put.place, key), -1) > put.sent:
                continue
            self.trace.append(f"  late: {put.program.name} {key}")
            is_gone = self._deleted_at.get((put.place, key), -1) > put.sent
            self.situations.met("root-put-late", is_root and self.places[put.place].info(key) is None)
            self.situations.met("file-late-after-abort", attempt and is_gone)
            self.situations.met("pin-late-after-unpin", key.endswith("pin.json") and is_gone)
            try:
                self._apply(put.program, put.place, put.request, put.work)
            except StorageError as refusal:  # nobody hears of it
                self.trace.append(f"  refused: {refusal}")

    def hidden(self, program: Program, place: str) -> Set[str]:
        """Return what a listing does not show yet: objects that other programs put last."""
        if not self._written or not self._strikes("stale"):
            return frozenset()
        last = self._written[-1][0] - self.random.randint(0, 4)
        keys = {
            key for number, writer, at, key in self._written if number >= last and writer is not program and at == place
        }
        newest = max(self.watched[place].roots, default=0)
        self.situations.met("listing-missed-root", f"{step_folder(newest)}/{ROOT_KEY}" in keys)
        waits = program.verb.name == "save" and any(key.endswith(".index") for key in keys)
        self.situations.met("listing-missed-index", waits)
        return keys

    def is_ready(self, attempt: str, step: int) -> bool:
        """Return whether all writers of a try at a step have put their files, and nobody its root."""
        keys = (f"{step_folder(step)}/{part_keys(attempt, rank)[1]}" for rank in range(NUM_RANKS))
        return all(self.places[RUN].info(key) for key in keys)

    def aged(self, place: str, item: ObjectInfo) -> ObjectInfo:
        """Return what a listing shows: files of tries whose programs are all over were last changed a week ago."""
        attempt = attempt_of(item.key.partition("/")[2])
        is_young = attempt is None or self._lives(place, attempt)
        return item if is_young else replace(item, modified_s=item.modified_s - WEEK_S)

    def _lives(self, place: str, attempt: str) -> bool:
        """Return whether a program runs that may write files of a try, or one of its writes is under way."""
        job = attempt.partition("-")[0]
        names = [each.name for each in self.programs if not each.is_over] + [put.program.name for put in self._late]
        is_copied = place == SLOW and any(name.endswith(".tier") or name == "copier" for name in names)
        return is_copied or any(name.partition(".")[0] in (job, "roller") for name in names)

    def _check_delete(self, program: Program, place: str, key: str) -> None:
        """Check that nobody takes the files of another program's try that may still be committed."""
        folder, _, name = key.partition("/")
        attempt = attempt_of(name) or ""
        is_own = attempt.startswith(program.name.partition(".")[0]) or program.verb.name in ("rollback", "undo")
        was_committed = attempt in self.watched[place].history.get(int(folder.removeprefix("step-")), [])
        self.must(
            not attempt or is_own or was_committed or not self._lives(place, attempt),
            f"{key} of a running save was swept",
        )

    def _check_end(self) -> None:
        """Check that pinned steps are there, and that a sweep leaves nothing but what is committed, which restores."""
        self._land(self.num_turns + MAX_LATE_TURNS)
        run = self.run_place
        if not self.had_faults:
            lost = self.pinned - run.roots.keys()
            self.must(not lost, f"pinned steps {sorted(lost)} are gone")
        rescued = run.history.get(self.num_steps + 1, [])
        self.must(rescued, f"step {self.num_steps + 1} was never committed, though nothing failed any more")
        for place, watched in self.watched.items():
            prune(watched.store, Retention(keep_last=1), orphans_older_than_s=0)
            watched.check({step_folder(step) for step in watched.roots}, may_lose_newest=False)
            extra = {
                key
                for key in watched.store.list_keys()
                if (attempt := attempt_of(key.partition("/")[2])) and not self._stays(watched, key, attempt)
            }
            self.must(not extra, f"a sweep of {place} left {sorted(extra)}")
            for step in committed_steps(watched.store):
                restored_value(watched.store, step, ParallelLayout())

    def _stays(self, watched: WatchedPlace, key: str, attempt: str) -> bool:
        """Return whether a sweep leaves a file: its try is committed, its step pinned or newer than all committed."""
        folder = key.partition("/")[0]
        is_named = any(
            folder == step_folder(step) and attempt == root.attempt for step, (_, root) in watched.roots.items()
        )
        return is_named or watched.store.info(f"{folder}/pin.json") is not None

    def must(self, holds: object, what: str) -> None:
        """Raise Broken if something does not hold."""
        if not holds:
            self.failure = self.failure or Broken(what)
            raise self.failure


def simulate(seed: int, clock: SimulatedTime, *, hang_s: float = HANG_S) -> Simulation:
    """Run one seed; a failure names it and shows the last requests."""
    simulation = Simulation(seed, clock)
    try:
        simulation.run(hang_s)
    except BaseException as error:
        error.add_note(f"the last requests of seed {seed}:\n  " + "\n  ".join(simulation.trace))
        error.add_note(f"again: SIMULATION_SEED={seed} pytest tests/ckptkit/test_simulation.py")
        raise
    return simulation
