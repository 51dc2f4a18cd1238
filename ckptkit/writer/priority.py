"""The writer's place behind the trainer: it runs and writes with what the trainer leaves of a processor and a disk."""

import contextlib
import ctypes
import os
import platform

NICE = 10  # a tenth of the weight of a usual process: behind a trainer that wants the same core, never starved
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # numbers of the system call, for which libc has no function
WHO_PROCESS, BEST_EFFORT, LOWEST = 1, 2, 7


def step_back() -> None:
    """Lower this process' priority for processor and disk, as far as the system lets it; later threads inherit it."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    number = IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, WHO_PROCESS, 0, BEST_EFFORT << 13 | LOWEST)
