"""SaveOrder and SaveOutcome: what the trainer tells its writer process, and what it hears back; a JSON line each."""

import json
from dataclasses import asdict, dataclass

from ckptkit.saving.staging import Area, StagedFile


@dataclass(frozen=True)
class SaveOrder:
    """One save of one writer: what lies where in the arena, and where it goes.

    `root` is, for writer 0, a root without parts: it fills in the parts of all `num_writers` and commits it.
    `arena_bytes` is the size of the arena now: the writer maps it anew when it grew.
    """

    url: str
    step: int
    attempt: str
    writer: int
    num_writers: int
    files: tuple[StagedFile, ...]
    root: Area
    arena_bytes: int
    deadline_s: float
    keep_last: int
    stripe_count: int
    stripe_size_bytes: int
    num_threads: int

    def to_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "SaveOrder":
        """The order of a line."""
        fields = json.loads(line)
        fields["files"] = tuple(StagedFile(Area(**f["data"]), Area(**f["index"])) for f in fields["files"])
        return cls(**fields | {"root": Area(**fields["root"])})


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended in the writer; `error` is empty when all is well, `warning` tells what did not stop it."""

    step: int
    error: str
    data_bytes: int
    write_s: float
    warning: str = ""

    def to_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "SaveOutcome":
        """The outcome of a line."""
        return cls(**json.loads(line))
