"""What actions cost in a simulation."""

from collections.abc import Callable, Mapping, Sequence

from trainer.pipeline.actions import PASSES, Action, Schedule

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
