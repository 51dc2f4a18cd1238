"""Faults of optimizer state that is streamed: what is read too early is that of the step before."""

from typing import Any

from trainer.store.window import Window
from trainer.verify.faults.fault import DP, STREAMED, Fault
from trainer.verify.faults.planting import wrapping


def loaded_early(real: Any, self: Window, number: int) -> None:
    """Load a piece without waiting until its last update is written back."""
    self._free[number % len(self._free)] = None
    real(self, number)


OFFLOAD_FAULTS = (
    Fault(
        "streamed-moment-late",
        "a streamed moment is one step old",
        DP,
        wrapping(Window, "_load", loaded_early),
        optim={"offload": True},
        check=STREAMED,
    ),
)
