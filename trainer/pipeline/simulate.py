"""The simulation of a schedule: when each action starts and ends, and the fault of a schedule that cannot run.

A rank runs its row in order. A pass waits for what it reads. A send waits while `max_sends` earlier ones on its link
are under way. A link is of two ranks and one direction, and moves one tensor at a time, once both ends have posted it.
With `blocking` a rank also waits at each receive, as a GPU does if something waits for all of its kernels meanwhile.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from threefold.errors import UserError
from trainer.pipeline.actions import PASSES, Action, Schedule, most_sends, peak_live, stage_ranks

HINT = "trainer schedule --pp 4 --microbatches 8 prints one that runs"


Cost = Callable[[Action], float]


def costs(
    schedule: Schedule, *, forward: float = 1.0, backward: float = 2.0, weights: float = 1.0, transfer: float = 0.0,
    work: Sequence[float] = (),
) -> Cost:  # fmt: skip
    """Return the times of a schedule's actions: `transfer`, or a stage's part of the times of an average rank.

    `forward` and `backward` are the times of one micro-batch's passes through all stages of such a rank. `weights` is
    the part of `backward` that a W takes over. `work` is in proportion to what each stage computes, equal if left out.
    With 2 stages on each of 2 ranks a forward pass of one takes 0.5; of work 1, 1, 1, 2 the last takes 0.8.
    """
    stages = {action.stage for row in schedule for action in row}
    times = {"F": forward, "B": backward - weights * _has_w(schedule), "W": weights}
    work = work or [1] * len(stages)

    def cost(action: Action) -> float:
        if action.kind not in PASSES:
            return transfer
        return times[action.kind] * (len(schedule) * work[action.stage]) / sum(work)

    return cost


def measured_costs(schedule: Schedule, times: Mapping[tuple[str, int], float], *, transfer: float = 0.0) -> Cost:
    """Return the same out of times of F, B and W by kind and stage; a unit is an average rank's forward pass."""
    has_w = _has_w(schedule)
    unit = sum(time for (kind, _), time in times.items() if kind == "F") / len(schedule)

    def cost(action: Action) -> float:
        kind, stage, _ = action
        if kind not in PASSES:
            return transfer
        own = times[kind, stage] + (0.0 if has_w or kind != "B" else times["W", stage])
        return own / unit

    return cost


def _has_w(schedule: Schedule) -> bool:
    return any(action.kind == "W" for row in schedule for action in row)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of each action; of a send and its receive, those of the transfer."""

    schedule: Schedule
    spans: dict[Action, tuple[float, float]]

    @property
    def duration(self) -> float:
        """Return when the last action ends."""
        return max(end for _, end in self.spans.values())

    @property
    def bubble_share(self) -> float:
        """Return the share of the ranks' time in which they compute nothing.

        1F1B over 4 even stages with 8 micro-batches lasts 33 units, of which each rank computes 24: 9 / 33 = 3 / 11.
        """
        busy = sum(end - start for action, (start, end) in self.spans.items() if action.kind in PASSES)
        return 1 - busy / (len(self.schedule) * self.duration)

    @property
    def peaks(self) -> list[float]:
        """Return the most micro-batches that are live at once, by rank; a pass of one of two stages is half of one."""
        return [peak_live(row) / len({action.stage for action in row}) for row in self.schedule]

    def __str__(self) -> str:
        live = " ".join(f"{peak:.3g}" for peak in self.peaks)
        return f"{self.duration:g} units, bubble {self.bubble_share:.1%}, live micro-batches by rank: {live}"


def simulate(
    schedule: Schedule, cost: Cost | None = None, *, max_sends: int | None = None, blocking: bool = False
) -> Timeline:
    """Run a schedule; UserError names the action at which one cannot run, or would add gradients out of order.

    Without a cost a rank takes 1 for a forward pass, 2 for a backward pass, of which W is half, and 0 for a transfer.
    `max_sends` is `most_sends` of the schedule unless another number is passed.
    """
    _check_order(schedule)
    max_sends = max_sends or most_sends(len(schedule), len(stage_ranks(schedule)))
    simulation = _Simulation(schedule, cost or costs(schedule), max_sends, blocking)
    while any(place < len(row) for place, row in zip(simulation.places, schedule, strict=True)):
        if not any(simulation.advance(rank) for rank in range(len(schedule))):
            raise _fault(f"deadlock: {simulation.waits()}")
    for link in simulation.links.values():
        for action in [*link.sends[len(link.ends) :], *link.receives[len(link.ends) :]]:
            raise _fault(f"{_named(action)} has no other end")
    return Timeline(schedule, simulation.spans)


def _check_order(schedule: Schedule) -> None:
    """Raise UserError unless each stage, on one rank, has each kind of action for micro-batches 0, 1, 2 ..."""
    ranks = stage_ranks(schedule)
    counts: dict[tuple[str, int], int] = {}
    for rank, row in enumerate(schedule):
        for action in row:
            count = counts.get((action.kind, action.stage), 0)
            if ranks[action.stage] != rank:
                raise _fault(f"{_named(action)} is on rank {rank}, others of the stage on rank {ranks[action.stage]}")
            if action.microbatch != count:
                raise _fault(f"{_named(action)} comes before {action.kind}{count}")
            counts[action.kind, action.stage] = count + 1
    num_microbatches = max((count for (kind, _), count in counts.items() if kind == "F"), default=0)
    for (kind, stage), count in counts.items():
        if kind in PASSES and count != num_microbatches:
            raise _fault(f"{kind}{count} of stage {stage} is missing")


def _fault(text: str) -> UserError:
    return UserError(f"this schedule cannot run: {text}", hint=HINT)


def _named(action: Action) -> str:
    return f"{action} of stage {action.stage}"


@dataclass(slots=True)
class _Link:
    """What a rank sends to another in one direction, in order; the first len(ends) have arrived."""

    sends: list[Action] = field(default_factory=list)
    receives: list[Action] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


class _Simulation:
    """The ranks' clocks and places in their rows, and all spans that are known by now."""

    def __init__(self, schedule: Schedule, cost: Cost, max_sends: int, blocking: bool) -> None:
        self.schedule, self.cost, self.max_sends, self.blocking = schedule, cost, max_sends, blocking
        self.ranks = stage_ranks(schedule)
        self.transferred = {action for row in schedule for action in row if action.kind not in PASSES}
        self.clocks: list[float] = [0] * len(schedule)
        self.places = [0] * len(schedule)
        self.posted: dict[Action, float] = {}
        self.spans: dict[Action, tuple[float, float]] = {}
        self.links: dict[tuple[int, int, str], _Link] = defaultdict(_Link)

    def advance(self, rank: int) -> bool:
        """Run a rank's row as far as the others' progress allows; return whether it moved."""
        row, start = self.schedule[rank], self.places[rank]
        while self.places[rank] < len(row) and self.blocker(row[self.places[rank]]) is None:
            action = row[self.places[rank]]
            ready = max([self.clocks[rank], *(self.spans[need][1] for need in self.needs(action))])
            if action.kind in PASSES:
                self.spans[action] = ready, ready + self.cost(action)
                self.clocks[rank] = self.spans[action][1]
            else:
                self.clocks[rank] = ready
                self.post(action, ready)
            self.places[rank] += 1
        return self.places[rank] > start

    def needs(self, action: Action) -> list[Action]:
        kind, stage, m = action
        rank = self.ranks[stage]
        received = self.schedule[rank][: self.places[rank]][-1:] if self.blocking else []
        needed = [before for before in received if before.kind in ("RF", "RB")]
        if kind in ("SF", "SB"):
            earlier = self.link_of(action).sends
            made = Action("F" if kind == "SF" else "B", stage, m)
            return [*needed, made, *earlier[: max(len(earlier) - self.max_sends + 1, 0)][-1:]]
        if kind in ("RF", "RB"):
            return needed
        if kind == "W":
            return [*needed, Action("B", stage, m)]
        before, receive = (stage - 1, Action("RF", stage, m)) if kind == "F" else (stage + 1, Action("RB", stage, m))
        needed += [Action("F", stage, m)] if kind == "B" else []
        if before in self.ranks:
            is_received = self.transferred and self.ranks[before] != self.ranks[stage]
            needed.append(receive if is_received else Action(kind, before, m))
        return needed

    def blocker(self, action: Action) -> Action | None:
        """Return what an action waits for of which the end is not known yet, None if it can start."""
        return next((need for need in self.needs(action) if need not in self.spans), None)

    def link_of(self, action: Action) -> _Link:
        kind, stage, _ = action
        here, other = self.ranks[stage], stage + (1 if kind in ("SF", "RB") else -1)
        if other not in self.ranks:
            raise _fault(f"{_named(action)} has no other end")
        there = self.ranks[other]
        return self.links[(here, there, kind[1]) if kind[0] == "S" else (there, here, kind[1])]

    def post(self, action: Action, now: float) -> None:
        """Note that one end of a transfer is ready, and let all transfers run of which both are."""
        link = self.link_of(action)
        (link.sends if action.kind[0] == "S" else link.receives).append(action)
        self.posted[action] = now
        for sent, received in zip(link.sends[len(link.ends) :], link.receives[len(link.ends) :], strict=False):
            towards = 1 if sent.kind == "SF" else -1
            if received != (f"R{sent.kind[1]}", sent.stage + towards, sent.microbatch):
                raise _fault(f"{_named(sent)} meets {_named(received)}")
            start = max(self.posted[sent], self.posted[received], *link.ends[-1:])
            self.spans[sent] = self.spans[received] = start, start + self.cost(sent)
            link.ends.append(start + self.cost(sent))

    def waits(self) -> str:
        texts = []
        for rank, row in enumerate(self.schedule):
            if self.places[rank] < len(row):
                action = row[self.places[rank]]
                blocker = self.blocker(action)
                assert blocker is not None, "the rank did not move"
                texts.append(f"rank {rank} at {_named(action)} waits for {_named(blocker)}")
        return "; ".join(texts)
