"""PendingCopies: which steps a writer is ordered to copy to slower tiers, until it reports how that ended.

A step has to be copied by all writers or by none, so what decides is the same on all ranks: the steps that were saved,
and what all of them were ordered. What a killed writer left undone its successor takes up, once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckptkit.format.keys import Seat
from ckptkit.handoff.protocol import SaveOrder, SaveOutcome, TierCopy
from ckptkit.handoff.report import SaveReport
from ckptkit.runs.retention import is_due
from ckptkit.tiers.tier import Tier
from threefold.masking import masked


class PendingCopies:
    """The copies of one rank's writer that are under way or wait, and when the next ones are due.

    Of the trainer's process: the Checkpointer's caller uses it.
    """

    def __init__(self, tiers: Sequence[Tier], world_size: int) -> None:
        self._tiers, self._world_size = tiers, world_size
        self._after = {tier.url: tier.newest for tier in tiers}
        self._before_last = dict(self._after)  # the same before the last save
        self._is_whole_due = False  # whether the next step is due at the first place of whole steps, whatever it is
        self._awaited: dict[tuple[int, str], TierCopy] = {}
        self._ordered_last: dict[str, str] = {}  # by tier, the attempt that was ordered last
        self._left: dict[str, TierCopy] = {}  # by tier, what a killed writer left undone
        self._taken_up: set[tuple[int, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._awaited)

    @property
    def steps(self) -> set[int]:
        """The steps that are under way or wait, or that a killed writer left undone; the first tier is to hold them."""
        return {step for step, _ in self._awaited} | {tier_copy.target.step for tier_copy in self._left.values()}

    @property
    def has_left(self) -> bool:
        """Whether there is anything for `take_up`."""
        return bool(self._left)

    def due(self, order: SaveOrder) -> tuple[TierCopy, ...]:
        """Return this writer's part in copying a step that is saved now to the tiers that it is due at."""
        whole = self._whole if self._is_whole_due else None
        tiers = [
            tier for tier in self._tiers if tier is whole or is_due(tier.every, order.seat.step, self._after[tier.url])
        ]
        self._count(order.seat.step)
        return self._to(tiers, order)

    def with_tiers(self, order: SaveOrder, *, is_window: bool) -> SaveOrder:
        """Return an order with the copies that are due, and where its step goes if the first tier is full."""
        intervals = {tier.url: tier.every for tier in self._tiers}
        order = replace(order, tier_copies=self.due(order), intervals=intervals)
        return replace(order, overflow=self.overflow(order, is_window=is_window))

    def all(self, order: SaveOrder) -> tuple[TierCopy, ...]:
        """Return its part in copying a step to all tiers, but those that it was ordered to before."""
        return self._to(self._tiers, order)

    def overflow(self, order: SaveOrder, *, is_window: bool) -> Seat | None:
        """Return where a step is saved if the first tier has no room: the next tier, None where that cannot be.

        A node with others beside it does not know of their room: it brings its part to where they copy theirs, if the
        step is due there. What is staged through windows cannot be read again, but a rank alone sees a lack of room
        beforehand.
        """
        if is_window and order.seat.num_writers > 1:
            return None
        if order.seat.num_writers < self._world_size:
            return next((each.target for each in order.tier_copies if not each.of_node), None)
        return None if self._whole is None else replace(order.seat, url=self._whole.url)

    def make_up(self, *, goes_to_whole: bool = False) -> None:
        """Let the next save be due wherever the last one was; or also at the first place of whole steps."""
        self._after, self._is_whole_due = dict(self._before_last), goes_to_whole

    def skipped(self, step: int) -> None:
        """Note a step that this rank does not save. One rank alone makes up for it; others may have saved it."""
        self._count(step)
        if self._world_size == 1:
            self.make_up()

    def failed(self, step: int) -> None:
        """Note a step whose save failed here: there is nothing to copy. One rank alone makes up for it."""
        self._awaited = {key: each for key, each in self._awaited.items() if key[0] != step}
        if self._world_size == 1:
            self.make_up()

    def take_up(self) -> tuple[TierCopy, ...]:
        """Return what a killed writer left undone, for its successor: of each tier the newest, no step twice."""
        found = tuple(self._left.values())
        self._left.clear()
        self._taken_up = {(each.target.step, each.target.url) for each in found}
        self._awaited |= {(each.target.step, each.target.url): each for each in found}
        return found

    def ended(self, outcomes: Iterable[SaveOutcome]) -> list[SaveReport]:
        """Return the reports of some copies that ended."""
        reports = []
        for outcome in outcomes:
            self._awaited.pop((outcome.step, outcome.url), None)
            reports.append(
                SaveReport(outcome.step, not outcome.error, outcome.error, outcome.data_bytes, outcome.write_s, 0.0,
                           outcome.num_attempts, warning=outcome.warning, url=masked(outcome.url))
            )  # fmt: skip
        return reports

    def lost(self, reason: str) -> list[SaveReport]:
        """Return reports of all that were under way or waited when the writer died."""
        reports = [
            SaveReport(step, False, f"{reason} {step}", tier_copy.data_bytes, 0.0, 0.0, url=masked(url))
            for (step, url), tier_copy in self._awaited.items()
        ]
        for key in sorted(self._awaited.keys() - self._taken_up):
            self._left[key[1]] = self._awaited[key]
        self._awaited.clear()
        return reports

    @property
    def _whole(self) -> Tier | None:
        """The first place of whole steps."""
        return next((tier for tier in self._tiers if not tier.of_node), None)

    def _count(self, step: int) -> None:
        self._is_whole_due = False
        self._before_last, self._after = self._after, dict.fromkeys(self._after, step)

    def _to(self, tiers: Iterable[Tier], order: SaveOrder) -> tuple[TierCopy, ...]:
        ordered = []
        for tier in tiers:
            url = tier.url
            target = replace(order.seat, url=url)
            if not tier.of_node:
                target = replace(target, first_writer=0, num_writers=self._world_size)
            tier_copy = TierCopy(
                source=order.seat, target=target, of_node=tier.of_node, num_files=len(order.files),
                data_bytes=sum(file.size_bytes for file in order.files), deadline_s=order.deadline_s,
                retention=tier.retention, needed=order.needed if tier.of_node else (),
            )  # fmt: skip
            if self._ordered_last.get(url) != target.attempt:
                self._ordered_last[url] = target.attempt
                self._awaited[target.step, url] = tier_copy
                ordered.append(tier_copy)
        return tuple(ordered)
