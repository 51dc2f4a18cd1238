"""SaveReport and SaveCounts: how saves ended, as the trainer sees it."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended, or its copy to the tier `url`. On every rank `ok` means that the step is committed, of a copy
    that the first rank committed it, and the others' files are there.

    A skipped save is not ok, and no failure either. `num_attempts` counts what was tried again, `warning` says why
    older steps were not pruned after it.
    """

    step: int
    ok: bool  # the step is committed
    error: str  # why it is not; empty if it is
    data_bytes: int  # bytes of this rank's data files
    write_s: float  # seconds of writer and storage
    stall_s: float  # seconds that the training loop waited
    num_attempts: int = 1  # more than 1 if something was tried again
    skipped: bool = False  # left out, as the save before still ran
    warning: str = ""  # why older steps were not pruned
    url: str = ""  # the tier of a copy; empty for the save itself


@dataclass(frozen=True, slots=True)
class SaveCounts:
    """How many saves ended how; copies to slower tiers are not counted."""

    ok: int = 0
    failed: int = 0
    skipped: int = 0

    def plus(self, report: SaveReport) -> Self:
        """Return these and one more."""
        kind = "ok" if report.ok else "skipped" if report.skipped else "failed"
        return replace(self, **{kind: getattr(self, kind) + 1})
