"""Retention: which committed steps to keep, a pure policy; `ckptkit.runs.pruning` deletes the others.

Which of them a slower tier is to have is pure too: the trainer and its writer ask the same.

A step stays if any rule keeps it. Whatever is asked, these stay: pinned steps; the newest good step and all that is
newer; steps whose root cannot be read (of a newer format, perhaps). Rules fill their places with good steps only, so
that a damaged one takes nobody's place. Where no step is good nothing goes. O(n log n) in the steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from threefold.errors import UserError

if TYPE_CHECKING:  # a configuration names a Retention before numpy is imported
    from ckptkit.runs.record import StepRecord

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep: the newest keep_last steps; the first at or after each multiple of keep_every; the keep_best by a
    metric of their metadata; the newest step of each of the last keep_hourly hours that have one. All zero: everything.
    """

    keep_last: int = 0
    keep_every: int = 0
    keep_best: int = 0
    keep_hourly: int = 0
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best", "keep_hourly"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise UserError(f"{name} {value!r} is not a whole number from 0", hint=f"0 switches {name} off")
        if self.mode not in ("min", "max"):
            raise UserError(f"mode {self.mode!r} of a metric is neither min nor max")

    @property
    def has_rules(self) -> bool:
        """Whether anything but everything is kept."""
        return any((self.keep_last, self.keep_every, self.keep_best, self.keep_hourly))


def expired(records: "Sequence[StepRecord]", policy: Retention) -> list[int]:
    """Return the steps to delete, ascending; none where the policy has no rules."""
    reasons = reasons_to_keep(records, policy)
    return sorted(record.step for record in records if not reasons[record.step])


def reasons_to_keep(records: "Sequence[StepRecord]", policy: Retention) -> dict[int, list[str]]:
    """Return why each step stays, in words; no words for a step that goes."""
    reasons: dict[int, list[str]] = {record.step: [] for record in sorted(records, key=lambda record: record.step)}
    good = sorted((record.step for record in records if record.is_good), reverse=True)
    if not policy.has_rules or not good:
        return {step: ["no rule above 0 is given" if good else "no step is good"] for step in reasons}
    places = places_filled(records, policy)
    oldest_of_last = good[policy.keep_last - 1] if policy.keep_last <= len(good) else 0
    for record in records:
        why = reasons[record.step]
        if record.pin is not None:
            why.append("pinned")
        if not record.is_readable:
            why.append("its root cannot be read")
        if record.step > good[0]:
            why.append("newer than the newest good step")
        elif not record.is_good and policy.keep_last and record.step >= oldest_of_last:
            why.append(f"last {policy.keep_last}")
        why += places.get(record.step, [])
    return reasons


def places_filled(records: "Sequence[StepRecord]", policy: Retention) -> dict[int, list[str]]:
    """Return which places good steps fill: the newest good step's, and those of each rule."""
    good = sorted((record for record in records if record.is_good), key=lambda record: -record.step)
    places: dict[int, list[str]] = {}
    for place, holders in (
        (f"last {policy.keep_last}", good[: policy.keep_last]),
        (f"every {policy.keep_every}", first_of_multiples(good, policy.keep_every)),
        ("newest good step", good[:1]),
        (f"best {policy.keep_best} by {policy.metric}", ranked(good, policy.metric, policy.mode)[: policy.keep_best]),
        (f"hourly {policy.keep_hourly}", newest_of_hours(good)[: policy.keep_hourly]),
    ):
        for record in holders:
            places.setdefault(record.step, []).append(place)
    return places


def beyond_limit(steps: Sequence[int], limit: int, best: int | None) -> list[int]:
    """Return which of ascending steps go, oldest first, until `limit` are left; the newest and the best one stay.

    Of steps 5, 10, 15 and 20 with limit 2 and best 10: 5 and 15. With limit 1: 5 and 15 too.
    """
    needed = {*steps[-1:], *({best} & set(steps))}
    return [step for step in steps if step not in needed][: max(len(steps) - max(limit, len(needed)), 0)]


def first_of_multiples(records: "Sequence[StepRecord]", every: int) -> "list[StepRecord]":
    """Return the first record at or after each multiple of `every` and before the next one; none where `every` is 0.

    Of steps 0, 5, 12, 14, 31 with every 10: 0, 12 and 31. Later steps, or deletions of others, change no holder.
    """
    first: dict[int, StepRecord] = {}
    for record in sorted(records, key=lambda record: record.step) if every else ():
        if record.step >= every or record.step == 0:
            first.setdefault(record.step // every, record)
    return list(first.values())


def ranked(records: "Sequence[StepRecord]", metric: str, mode: Literal["min", "max"]) -> "list[StepRecord]":
    """Return the records that have a metric, best first; of equal ones the newest first."""
    sign = 1 if mode == "min" else -1
    values = [(record, record.metrics().get(metric)) for record in records]
    found = [(sign * value, -record.step, record) for record, value in values if value is not None]
    return [record for _, _, record in sorted(found, key=lambda each: each[:2])]


def newest_of_hours(records: "Sequence[StepRecord]") -> "list[StepRecord]":
    """Return the newest record of each hour (of UTC) that has one, newest hour first.

    A record without a time is in none.
    """
    hours: dict[int, StepRecord] = {}
    for record in sorted(records, key=lambda record: record.step):
        if record.saved_at > 0:
            hours[int(record.saved_at // HOUR_S)] = record
    return [hours[hour] for hour in sorted(hours, reverse=True)]


def is_due(every: int, step: int, after: int | None) -> bool:
    """Return whether a saved step is copied to a tier: it is the first since the interval came round.

    `after` is the step up to which the tier was seen to, None where that is not known.
    """
    return not every or step % every == 0 or (after is not None and step // every > after // every)


def owed(every: int, steps: Iterable[int], newest: int) -> set[int]:
    """Return which of ascending steps a tier is to have that holds none after `newest`, -1 for none at all.

    Of steps 5, 7, 8 and 12 with every 6 and newest 5: 7 and 12.
    """
    found, after = set[int](), max(newest, 0)
    for step in steps:
        if step > newest and is_due(every, step, after):
            found.add(step)
        after = max(after, step)
    return found
