"""Shard: which of the processes that share one reshard this one is, and which files each of them writes.

Nothing but the plan and two numbers says so: no process waits for another or speaks to it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from threefold.errors import UserError

AUTO = "auto"
ARRAY = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP", "SLURM_ARRAY_TASK_COUNT")
TASKS, RANKS = ("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")
MAX_SHARDS = 1 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """Process `number` of `count` that share the files of a reshard."""

    number: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count <= MAX_SHARDS:
            raise UserError(
                f"shard {self} is not one of {self.count}", hint="shards count from 0: --shard 0/3, 1/3 and 2/3"
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> "Shard":
        """Return the shard written as `1/3`, or for `auto` the one that a launcher's variables say."""
        if text == AUTO:
            return _launched(environment)
        match = re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", text)
        if match is None:
            raise UserError(f"{text!r} is not a shard", hint="write it like --shard 0/3, or --shard auto")
        return cls(int(match[1]), int(match[2]))


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """Return the shard of each file: neighbours together, each shard's bytes a count-th, but for half a file.

    Of files of 4, 4, 2 and 6 bytes, whose middles are at 2, 6, 9 and 13 of 16, two shards have two each.
    """
    twice = 2 * sum(sizes)
    return [(2 * end - size) * count // twice for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _launched(environment: Mapping[str, str]) -> Shard:
    """Return the shard of a process of torchrun, of a Slurm array, or of srun, whose tasks divide those of an array.

    Task 7 of an array 3-11:2 is shard 2 of 5.
    """
    if RANKS[0] in environment:
        return Shard(*_numbers(environment, RANKS))
    array, tasks = Shard(), Shard()
    if ARRAY[0] in environment:
        task, first, step, count = _numbers(environment, ARRAY)
        array = Shard((task - first) // max(step, 1), count)
    if TASKS[0] in environment:
        tasks = Shard(*_numbers(environment, TASKS))
    elif ARRAY[0] not in environment:
        names = ", ".join((ARRAY[0], TASKS[0], RANKS[0]))
        raise UserError(f"--shard auto finds none of {names}", hint="name it: --shard 0/3")
    return Shard(array.number * tasks.count + tasks.number, array.count * tasks.count)


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    found = {name: environment.get(name, "") for name in names}
    if not all(text.isdecimal() for text in found.values()):
        said = ", ".join(f"{name}={text}" for name, text in found.items())
        raise UserError(f"--shard auto cannot read {said} as numbers", hint="name it: --shard 0/3")
    return [int(text) for text in found.values()]
