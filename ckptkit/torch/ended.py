"""EndedSaves: how the saves of a run ended, for `wait`, and how many in a row failed.

A failed copy to a slower tier is a warning: a dead tier holds no save up. A save that failed, as the writer of an
earlier start had committed its step since this one looked, has not failed.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from ckptkit.handoff.report import SaveReport
from threefold.cli import log
from threefold.errors import StorageError, listed


class EndedSaves:
    """Of one rank; the first one logs. `is_committed_since` says whether a step came since the run was looked at."""

    def __init__(self, url: str, is_committed_since: Callable[[int], bool], *, is_first: bool) -> None:
        self.num_failed, self.last_error = 0, ""
        self._url, self._is_committed_since, self._is_first = url, is_committed_since, is_first
        self._reports: list[SaveReport] = []

    def add(self, reports: Iterable[SaveReport]) -> None:
        """Keep reports for `take`, count the saves that failed, and log what went wrong."""
        for report in reports:
            if report.url != self._url:
                self._add_copy(report)
            elif report.ok or report.skipped:
                self._add(report)
            elif self._is_committed_since(report.step):
                whose = "by an earlier start, or another run that saves there"
                self._add(replace(report, ok=True, error="", warning=f"it was committed {whose}: {report.error}"))
            else:
                self.num_failed, self.last_error = self.num_failed + 1, report.error
                self._log(f"step {report.step} was not saved: {report.error}")
                self._reports.append(report)

    def take(self) -> list[SaveReport]:
        """Return the reports since the last call; StorageError if a save failed, one that was skipped has not."""
        reports, self._reports = self._reports, []
        saves = [report for report in reports if report.url == self._url]
        failed = [f"step {each.step}: {each.error}" for each in saves if not each.ok and not each.skipped]
        if failed:
            raise StorageError(f"{len(failed)} of {len(saves)} saves failed:{listed(failed)}")
        return reports

    def _add(self, report: SaveReport) -> None:
        self.num_failed = 0 if report.ok else self.num_failed
        if report.warning:
            self._log(f"step {report.step} is saved, but {report.warning}")
        if report.skipped:
            self._log(f"step {report.step} was not saved: {report.error}")
        self._reports.append(report)

    def _add_copy(self, report: SaveReport) -> None:
        if not report.ok:
            self._log(f"step {report.step} was not copied to {report.url}: {report.error}")
        self._reports.append(report)

    def _log(self, text: str) -> None:
        if self._is_first:
            log(f"warning: {text}")
