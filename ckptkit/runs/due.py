"""Which saved steps a slower tier is to have. Pure: the trainer and its writer ask the same."""

from collections.abc import Iterable


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
