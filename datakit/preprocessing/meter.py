"""Meter: how far the work items of a run are, how fast, and how long the rest will take."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from datakit.text.inputs import WorkItem

PROGRESS_INTERVAL_S = 2.0


class Meter:
    """Counts what all workers have done, and says when a line of progress is due."""

    def __init__(self, items: Sequence[WorkItem]) -> None:
        self._num_items, self._num_sealed = len(items), 0
        self._sizes = {item.number: sum(part.stop - part.start for part in item.slices) for item in items}
        self._read = 0  # bytes on disk of the sealed items
        self._latest: dict[int, dict[str, int]] = {}  # by item
        self._started_s = self._reported_s = time.monotonic()

    def update(self, item: WorkItem, message: dict[str, Any]) -> None:
        if "sealed" in message:
            self._num_sealed += 1
            self._read += self._sizes[item.number]
        self._latest[item.number] = message["progress"]

    @property
    def num_by_reference(self) -> int:
        """How many documents the reference has encoded."""
        return self._sum("num_by_reference")

    def is_due(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._reported_s < PROGRESS_INTERVAL_S:
            return False
        self._reported_s = now_s
        return True

    @property
    def share(self) -> float:
        """Which share of the input is in sealed items, by bytes on disk."""
        return self._read / max(sum(self._sizes.values()), 1)

    def line(self) -> str:
        """Return how far the items are.

        Speeds until all are sealed, as then the summary of the whole job says its speed.
        """
        elapsed_s = max(time.monotonic() - self._started_s, 1e-3)
        megabytes, tokens = self._sum("input_bytes") / 1e6, self._sum("num_tokens")
        line = f"{self._num_sealed}/{self._num_items} work items, {megabytes:,.1f} MB"
        if self._num_sealed == self._num_items:
            return line
        line += f", {megabytes / elapsed_s:.1f} MB/s"
        if tokens:
            line += f", {tokens / elapsed_s:,.0f} tokens/s"
        if self._read:  # if it goes on like the sealed items
            seconds = round(elapsed_s * (sum(self._sizes.values()) / self._read - 1))
            line += f", {timedelta(seconds=seconds)} left"
        return line

    def _sum(self, what: str) -> int:
        return sum(progress[what] for progress in self._latest.values())
