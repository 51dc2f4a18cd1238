"""Recorder: what a rank called of its groups, in order and in memory, for tests and for estimates of traffic."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Call(NamedTuple):
    """One call of a group: `kind` is the method, `num_bytes` the size of the tensor on this rank."""

    kind: str
    group: str
    num_bytes: int


@dataclass(slots=True)
class Recorder:
    """The calls of one rank; groups of one rank make none."""

    calls: list[Call] = field(default_factory=list)

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how often each kind was called on each group."""
        return Counter((call.kind, call.group) for call in self.calls)
