"""Copies: what a writer was told to copy to slower tiers, until it tells how that ended."""

from collections.abc import Iterable

from ckptkit.saving.save_order import Promotion, SaveOrder, SaveOutcome
from ckptkit.saving.save_report import SaveReport
from ckptkit.saving.tiers import Tier


class Copies:
    """The copies of one rank's writer that are under way or wait."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._awaited: dict[tuple[int, str], Promotion] = {}
        self._told_last: dict[str, str] = {}  # by tier, the attempt that was told last

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def to(self, tiers: Iterable[Tier], order: SaveOrder) -> tuple[Promotion, ...]:
        """This writer's part in copying a step to some tiers, those left out that were told it already."""
        found = []
        for tier in tiers:
            url = tier.url
            first, count = (order.first_writer, order.num_writers) if tier.of_node else (0, self._world_size)
            promotion = Promotion(
                source=order.url, target=url, step=order.step, attempt=order.attempt, writer=order.writer,
                first_writer=first, num_writers=count, source_first=order.first_writer, source_count=order.num_writers,
                of_node=tier.of_node, num_files=len(order.files),
                data_bytes=sum(file.size_bytes for file in order.files), deadline_s=order.deadline_s,
                retention=tier.retention,
            )  # fmt: skip
            if self._told_last.get(url) != order.attempt:
                self._told_last[url] = order.attempt
                self._awaited[order.step, url] = promotion
                found.append(promotion)
        return tuple(found)

    def forget(self, step: int) -> None:
        """A step whose save failed: there is nothing to copy."""
        self._awaited = {key: each for key, each in self._awaited.items() if key[0] != step}

    def ended(self, outcomes: Iterable[SaveOutcome]) -> list[SaveReport]:
        """How some copies ended."""
        reports = []
        for outcome in outcomes:
            self._awaited.pop((outcome.step, outcome.url), None)
            reports.append(
                SaveReport(outcome.step, not outcome.error, outcome.error, outcome.data_bytes, outcome.write_s, 0.0,
                           outcome.num_attempts, warning=outcome.warning, url=outcome.url)
            )  # fmt: skip
        return reports

    def lost(self, reason: str) -> list[SaveReport]:
        """All that were under way or waited when the writer died."""
        reports = [
            SaveReport(step, False, f"{reason} {step}", promotion.data_bytes, 0.0, 0.0, url=url)
            for (step, url), promotion in self._awaited.items()
        ]
        self._awaited.clear()
        return reports
