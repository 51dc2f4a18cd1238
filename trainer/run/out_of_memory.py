"""Out of memory as an answer: one error that names what grew beyond its plan, and the settings that save most.

The rank that meets it posts that on the job's board. The others, whom it leaves in a collective, end without a word: by
the end of its connections, or by a thread where a GPU waits for a rank that is gone.
"""

from collections.abc import Callable
from pathlib import Path
from resource import getpagesize
from typing import TypeVar

import torch

from threefold.errors import UserError
from trainer.config import Config
from trainer.job.ranks import Ranks
from trainer.run.memory import rank_memory, size_text
from trainer.run.memory_check import ACCURACY, Plan, device_memory, hint_for, saving_lines

T = TypeVar("T")
STATM = Path("/proc/self/statm")


class MemoryWatch:
    """What this rank takes beside its plan; owned by the training thread."""

    def __init__(self, config: Config, ranks: Ranks, pp: int) -> None:
        self._config, self._ranks, self._plan = config, ranks, rank_memory(config, pp)
        self._state_bytes = 0  # until the state is there

    @property
    def share_of_plan(self) -> float | None:
        """Return the most that torch reserved on a GPU, over what is planned for it; None on a CPU."""
        device = self._ranks.device
        return torch.cuda.max_memory_reserved(device) / self._plan.of_torch if device.type == "cuda" else None

    def making(self, make: Callable[[], T]) -> T:
        """Return the state that is made; UserError if memory runs out before it is."""
        try:
            state = make()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._answer(error) from error
        self._state_bytes = used_bytes(self._ranks.device)
        return state

    def answering(self, action: Callable[[], None]) -> None:
        """Run an action; UserError if memory runs out in it."""
        try:
            action()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._ranks.post_end()
            raise self._answer(error) from error

    def _answer(self, error: Exception) -> UserError:
        plan, device = Plan(self._config), self._ranks.device
        smaller = int(plan.total * (1 - ACCURACY))
        target = min(device_memory(device) or smaller, smaller)
        said = " ".join(str(error).split()).partition(". GPU ")[0].rpartition("DefaultCPUAllocator: ")[2]
        text = f"out of memory: {said or 'nothing is left'}; what grew: {self._grown(device)}"
        return UserError("\n  ".join([text, *saving_lines(plan, target)]), hint=hint_for(plan, target))

    def _grown(self, device: torch.device) -> str:
        """Return the part that is furthest above its plan: what passes take, the state, or what is not torch's."""
        plan = self._plan
        of_passes = plan.activations + plan.temporaries
        if not self._state_bytes:
            return f"the state, of which {size_text(used_bytes(device))} were there, beside a plan of {self._plan}"
        parts = {"what passes take": (max(used_bytes(device) - self._state_bytes, 0), of_passes)}
        if device.type == "cuda":
            used = torch.cuda.max_memory_allocated(device) - self._state_bytes
            free, total = torch.cuda.mem_get_info(device)
            outside = total - free - torch.cuda.memory_reserved(device)
            parts = {
                "what passes take": (used, of_passes),
                "parameters, gradients and optimizer": (self._state_bytes, plan.of_torch - of_passes),
                "what other libraries and processes take": (outside, plan.total - plan.of_torch),
                "what torch reserved and does not use": (
                    torch.cuda.memory_reserved(device) - used - self._state_bytes,
                    0,
                ),
            }
        name, (measured, planned) = max(parts.items(), key=lambda part: part[1][0] - part[1][1])
        return f"{name}, {size_text(measured)} beside a plan of {size_text(planned)}"


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a device, or this process, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: " in str(error)


def used_bytes(device: torch.device) -> int:
    """Return the bytes that torch has allocated on a GPU, or that this process has resident."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(STATM.read_text().split()[1]) * getpagesize()
