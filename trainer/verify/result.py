"""What becomes of a check, and why it may not be made."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "FAILED", "not run", "not needed"]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a check: the largest difference that it found, how much it allows, and what differs first."""

    name: str
    state: State
    difference: str = ""
    bound: str = ""
    text: str = ""
    seconds: float = 0.0


class NotRun(Exception):
    """A check cannot be made here."""


class NotNeeded(Exception):
    """A check has nothing to compare in this run."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What a check found and allows, as it is printed; a difference beyond that is raised as Different."""

    difference: str
    bound: str
