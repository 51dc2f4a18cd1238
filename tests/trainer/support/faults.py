"""Faults that a comparison of the tests shows, and no check of `trainer verify`: what is wrong, and who sees it.

Those that a check finds are in `trainer.verify.faults`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trainer.verify.faults.planting import Plant


@dataclass(frozen=True)
class ShownFault:
    """What is wrong, how to plant it, and the comparison that must fail."""

    name: str
    plant: Plant
    shows: Callable[[], object]
