"""Runs of a small configuration in orders that are drawn: each seed must end with the same bits.

Besides who is next, a seed draws whether verdicts are read late, whether steps are saved behind the training, and
whether a rank ends at some call; then the run goes on from its newest committed step. What is rare is counted, so that
a night of seeds says what it came to.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ckptkit import Piece, Run, TensorInfo
from trainer.checkpoint.load import restore_step
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.data import to_device
from trainer.verdict import PendingStats, StepStats
from trainer.verify.bench import NUM_STEPS, Bench
from trainer.verify.compare import compare_bits
from trainer.verify.drawn_order import DrawnOrder
from trainer.verify.recording import Recording
from trainer.verify.threads import ThreadGroup, Threads, names_of, run_turns
from trainer.verify.trial import (
    CPU,
    SavedStep,
    Seen,
    Trial,
    counted_step,
    held_by,
    made_engine,
    read_stream,
    save_part,
    seen_of,
)
from trainer.verify.turns import Deadlock, Died, Transfer, Turns

DEAD, AGAIN = "a rank ended while others waited", "a run went on behind a rank's end"
LATE_VERDICT = "a verdict was read after the next update"
LATE_OUTCOME, BACK = "a save's outcome came after the next save began", "a run went back behind a step that was saved"
ALWAYS = ("a message was late", "a lower rank was the last to join", DEAD, AGAIN, LATE_OUTCOME, BACK)
LAGS = (0, 100, 1000)
OF_STAGES = ("a receive was begun before its send", "a send waited")


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What became of a seed: "" if its bits are those of the plain order, the digest of its draws, what came up."""

    seed: int
    text: str
    trace: str
    seen: Counter[str]


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """What a seed draws for a whole run, beside the order of its turns."""

    reads_late: bool
    saves: bool
    lag: int  # turns from a rank's part of a save to its writer
    death: tuple[int, int] | None
    is_of_machine: bool  # the writer of the rank ends with it

    @classmethod
    def drawn(cls, bench: Bench, draw: Random) -> "SeedPlan":
        """Draw a plan; a rank may end at any call of the plain trial."""
        counts_at_once = bench.config.parallel.ep > 1  # a step may have to be repeated
        reads_late, saves, dies = draw.random() < 0.5 and not counts_at_once, draw.random() < 0.5, draw.random() < 0.5
        rank = draw.randrange(len(bench.layout.ranks))
        call = draw.randint(1, 2 * len(bench.layout.ranks[rank].calls))  # each is waited for
        return cls(reads_late, saves, draw.choice(LAGS), (rank, call) if dies else None, draw.random() < 0.5)


def situations(config: Config) -> list[str]:
    """Return the rare situations that a night of seeds must come to."""
    names = [*ALWAYS, *(OF_STAGES if config.parallel.pp > 1 else ())]
    return names if config.parallel.ep > 1 else [*names, LATE_VERDICT]


def try_seed(bench: Bench, seed: int) -> SeedResult:
    """Run a seed, and once more from its newest step if a rank ends; compare its bits with those of the plain order."""
    draw, seen, traces = Random(f"plan {seed}"), Counter[str](), list[str]()
    plan, text = SeedPlan.drawn(bench, draw), ""
    with TemporaryDirectory(prefix="trainer-seed-") as folder:
        start: SavedStep | None = None
        for number in range(2):
            order = DrawnOrder(f"{seed} {number}", plan.death if number == 0 else None)
            drawn = _DrawnRun(bench, plan, order, f"{folder}/run", start)
            try:
                trial = drawn.run()
                compare_bits(_behind(bench.layout, drawn.first), trial, f"seed {seed}")
            except (Died, Deadlock) as error:
                if number or not drawn.turns.dead:
                    text = str(error)
                seen[DEAD] += isinstance(error, Deadlock)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            finally:
                seen += drawn.turns.seen
                traces.append(order.trace)
            if text or not drawn.turns.dead:
                break
            start = drawn.newest()
            seen[AGAIN] += 1
            seen[BACK] += drawn.last_saved > (start.step if start else 0)
    return SeedResult(seed, text, "-".join(traces), seen)


def _behind(trial: Trial, first: int) -> Trial:
    """Return a trial with what it saw from a step on."""
    return replace(trial, ranks=[replace(s, losses=s.losses[first:], norms=s.norms[first:]) for s in trial.ranks])


class _DrawnRun:
    """One run in a drawn order: its ranks, and behind each a writer that saves what the rank hands it."""

    def __init__(self, bench: Bench, plan: SeedPlan, order: DrawnOrder, url: str, start: SavedStep | None) -> None:
        self.config, self.plan, self.url, self.start = bench.config, plan, url, start
        self.first, self.num_ranks = start.step if start else 0, layout_of(bench.config).world_size
        cursor = Run(url).root(start.step).metadata["cursor"] if start else None
        rest = NUM_STEPS - self.first
        self.stream = read_stream(self.config, rest, cursor=cursor, first=self.first) if start else bench.stream
        writers = [f"writer {rank}" for rank in range(self.num_ranks)] if plan.saves else []
        self.turns = Turns([*names_of(self.num_ranks), *writers], order)
        self.saves = {step: _Save(step, self.num_ranks) for step in range(self.first + 1, NUM_STEPS)}
        self.tensors: Sequence[TensorInfo] = ()

    def run(self) -> Trial:
        """Return what the ranks saw and hold; Died or Deadlock if one ended."""
        meetings: dict[Any, ThreadGroup] = {}
        networks = [Threads(self.turns, meetings, rank, self.num_ranks) for rank in range(self.num_ranks)]
        functions: list[Callable[[], Any]] = [partial(self._train, network) for network in networks]
        functions += [partial(self._write, rank) for rank in range(len(self.turns.names) - self.num_ranks)]
        results: list[tuple[Seen, Sequence[TensorInfo]]] = run_turns(self.turns, functions)[: self.num_ranks]
        return Trial(self.config, [seen for seen, _ in results], results[0][1])

    @property
    def last_saved(self) -> int:
        """Return the last step of which a rank handed its part to its writer."""
        return max((step for step, save in self.saves.items() if save.parts), default=0)

    def newest(self) -> SavedStep | None:
        """Return the newest step that was committed, here or before; None if there is none."""
        is_any = any(save.is_committed for save in self.saves.values())
        return SavedStep(self.url, Run(self.url).resolve()) if is_any else self.start

    def _train(self, network: Threads) -> tuple[Seen, Sequence[TensorInfo]]:
        rank, recording = network.rank, Recording(network)
        engine = made_engine(rank, self.config, recording)
        engine.pipeline.note = network.note
        if self.start is not None:
            restore_step(engine, Run(self.start.url), self.start.step)
            engine.store.publish()
        pending, stats = list[PendingStats](), list[StepStats]()
        for step in range(self.first, NUM_STEPS):
            batch = to_device(self.stream.batches[engine.mesh.dp.index][step - self.stream.first], CPU)
            if self.plan.reads_late:
                pending.append(engine.start_step(step, batch))
                if len(pending) > 1:
                    self.turns.seen[LATE_VERDICT] += 1
                    stats.append(pending.pop(0).read())
            else:
                stats.append(counted_step(engine, step, batch))
            if self.plan.saves and step + 1 < NUM_STEPS:
                stats += [each.read() for each in pending]  # before a save
                pending.clear()
                self._hand_over(rank, step + 1, held_by(engine), seen_of(engine, (), (), ())[1])
        stats += [each.read() for each in pending]
        return seen_of(engine, stats, (), recording.calls)

    def _hand_over(self, rank: int, step: int, pieces: list[Piece], tensors: Sequence[TensorInfo]) -> None:
        """Let the writer of a rank have its part of a step."""
        self.tensors, save = tensors, self.saves[step]
        before = self.saves.get(step - 1)
        if before is not None and not save.parts:
            self.turns.seen[LATE_OUTCOME] += not before.outcome.is_done
        save.parts[rank] = pieces
        self.turns.finish([save.handed[rank]], nothing, lag=self.plan.lag)

    def _write(self, rank: int) -> None:
        """Save a rank's part of each step; that of rank 0 waits for the others, and commits."""
        number = self.num_ranks + rank
        for step, save in self.saves.items():
            self.turns.wait(number, save.handed[rank])
            for other in save.written[1:] if rank == 0 else ():
                self.turns.wait(number, other)
            self.turns.call(number, f"the save of step {step}")
            if self.plan.is_of_machine and rank in self.turns.dead:
                raise Died(f"writer {rank} ended with its rank")
            save_part(
                self.config,
                SavedStep(self.url, step),
                rank,
                save.parts[rank],
                self.tensors,
                self.stream,
                save.attempt,
            )
            save.is_committed = rank == 0
            self.turns.finish([save.written[rank]] if rank else [save.written[0], save.outcome], nothing)


class _Save:
    """A step that is saved behind the training: what was handed over of it, what is written, and its outcome."""

    def __init__(self, step: int, num_ranks: int) -> None:
        self.parts, self.attempt, self.is_committed = dict[int, list[Piece]](), secrets.token_hex(8), False
        self.handed = [_event(f"rank {rank}'s part of step {step}") for rank in range(num_ranks)]
        self.written = [_event(f"the file of rank {rank} of step {step}") for rank in range(num_ranks)]
        self.outcome = _event(f"the outcome of step {step}")


def _event(what: str) -> Transfer:
    return Transfer(what, torch.empty(0))


def nothing() -> None:
    """Carry nothing: the event itself is what is waited for."""
