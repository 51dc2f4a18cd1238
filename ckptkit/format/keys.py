"""Keys under a run's URL: the folder of a step, its root, and the files of its writers, each in its Seat of a try.

`step-000000100/root.json`, `step-000000100/<attempt>/part-00003.safetensors` and
`step-000000100/<attempt>/part-00003.index` for writer 3.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from threefold.errors import UserError

ROOT_KEY = "root.json"
DAMAGED_ROOT_KEY = "damaged-root.json"  # the root of a step that was found damaged and saved again
PIN_KEY = "pin.json"
ASIDE_NAME = "rolled-back.json"  # in an attempt's folder: the root of a step that a rollback set aside
MAX_WRITERS, MAX_STEP = 10**9, 10**15 - 1
MAX_NAMED = 16
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
PART_STEM = r"part-[0-9]{5,9}(\.[0-9]{1,5})?"
_PART_FILE = re.compile(rf"{PART_STEM}\.(safetensors|index)|part-[0-9]{{5,9}}\.failed|copying|rolled-back\.json")
_STEP = re.compile(r"step-([0-9]{1,15})")


def step_folder(step: int) -> str:
    """Return the folder of a step, under the run's URL."""
    return f"step-{step:09d}"


def parse_step_folder(name: str) -> int | None:
    """Return the step of a folder name, None where it is not one."""
    step = step_like(name)
    return step if step is not None and name == step_folder(step) else None


def step_like(name: str) -> int | None:
    """Return the step that a name is meant for, with any number of digits; None where it is not one."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def check_step(step: int) -> int:
    """Return the step itself, refused where no folder name could hold it."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
        shown = f"of {step.bit_length()} bits" if isinstance(step, int) and step.bit_length() > 64 else repr(step)
        raise UserError(f"step {shown} is not a whole number from 0 to {MAX_STEP}")
    return step


def part_keys(attempt: str, writer: int, file: int = 0) -> tuple[str, str]:
    """Return keys, relative to the step's folder, of a writer's n-th data file and of its index."""
    stem = f"{attempt}/part-{writer:05d}" + (f".{file}" if file else "")
    return f"{stem}.safetensors", f"{stem}.index"


def writer_of(key: str) -> int:
    """Return the writer that a file of `part_keys` is of."""
    return int(key.rpartition("/part-")[2].partition(".")[0])


def named_writers(writers: Iterable[int]) -> str:
    """Writers as a message names them: the first ones by number."""
    numbers = sorted(writers)
    shown = ", ".join(map(str, numbers[:MAX_NAMED])) + (", ..." if numbers[MAX_NAMED:] else "")
    return f"writer{'s' if len(numbers) > 1 else ''} {shown}"


def attempt_of(key: str) -> str | None:
    """Return the attempt that a key below a step's folder is a file of.

    None for any name that the format does not give.
    """
    attempt, _, file = key.partition("/")
    return attempt if _ATTEMPT.fullmatch(attempt) and _PART_FILE.fullmatch(file) else None


def aside_key(step: int, attempt: str) -> str:
    """Return the key under which a rollback keeps the root of a step that it sets aside."""
    return f"{step_folder(step)}/{attempt}/{ASIDE_NAME}"


def is_of_step(name: str) -> bool:
    """Return whether a key below a step's folder is one of the format."""
    return name in (ROOT_KEY, DAMAGED_ROOT_KEY, PIN_KEY) or attempt_of(name) is not None


def is_attempt(name: str) -> bool:
    """Return whether a folder may have the name of an attempt."""
    return _ATTEMPT.fullmatch(name) is not None


def check_attempt(attempt: str) -> str:
    """Return the attempt itself, refused where it could not be a folder name."""
    if not is_attempt(attempt):
        raise UserError(f"attempt {attempt!r} is not a name of letters, digits, - and _ (at most 128)")
    return attempt


@dataclass(frozen=True, slots=True)
class Seat:
    """Which writer of how many, in which try (`attempt`) at which step of the run at `url`.

    The writers of a try count from `first_writer` on, which leads: it commits the step.
    """

    url: str
    step: int
    attempt: str
    writer: int = 0
    num_writers: int = 1
    first_writer: int = 0

    @property
    def folder(self) -> str:
        """The key of the step's folder."""
        return step_folder(self.step)

    @property
    def leads(self) -> bool:
        """Whether this writer commits."""
        return self.writer == self.first_writer

    @property
    def writers(self) -> range:
        """All writers of the try."""
        return range(self.first_writer, self.first_writer + self.num_writers)

    @property
    def failed_key(self) -> str:
        """The key under which this writer says why it failed."""
        return f"{self.folder}/{self.attempt}/part-{self.writer:05d}.failed"

    @property
    def copying_key(self) -> str:
        """The key by which the leader says that it brings this try here, so that the others bring their parts."""
        return f"{self.folder}/{self.attempt}/copying"

    def keys(self, number: int) -> tuple[str, str]:
        """Return the keys of the writer's n-th data file and of its index."""
        data, index = part_keys(self.attempt, self.writer, number)
        return f"{self.folder}/{data}", f"{self.folder}/{index}"
