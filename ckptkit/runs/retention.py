"""Retention: which committed steps to keep, a pure policy, and how the others go: root first, then all else."""

from collections.abc import Iterable, Sequence

from ckptkit.format.root import ROOT_KEY, step_folder
from threefold.storage import Storage


def expired(steps: Sequence[int], keep_last: int) -> list[int]:
    """The steps that go when the newest keep_last are kept; none for keep_last 0."""
    return sorted(steps)[:-keep_last] if keep_last > 0 else []


def prune(storage: Storage, steps: Iterable[int]) -> None:
    """Delete committed steps; whenever this stops, a step is either whole or not listed as committed."""
    for step in steps:
        folder = step_folder(step)
        storage.delete([f"{folder}/{ROOT_KEY}"])
        storage.delete([item.key for item in storage.list(f"{folder}/")])
