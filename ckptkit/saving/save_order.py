"""SaveOrder, PromoteOrder and SaveOutcome: what the trainer tells its writer process, and what it hears back; a JSON
line each."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from ckptkit.saving.staging import Area, StagedFile


@dataclass(frozen=True, slots=True)
class Promotion:
    """One writer's part in copying a committed step from `source` to `target`.

    The target's root is of the num_writers from first_writer on, which is the leader; the source's of source_count from
    source_first on. `of_node`: the target holds what the source holds, and not the whole step of all nodes.
    """

    source: str
    target: str
    step: int
    attempt: str
    writer: int
    first_writer: int
    num_writers: int
    source_first: int
    source_count: int
    of_node: bool
    num_files: int
    data_bytes: int
    deadline_s: float
    keep_last: int

    @property
    def leads(self) -> bool:
        return self.writer == self.first_writer


@dataclass(frozen=True)
class PromoteOrder:
    """Copies of a step that was saved before."""

    promotions: tuple[Promotion, ...]

    def to_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "PromoteOrder":
        """The order of a line's fields."""
        return cls(tuple(Promotion(**each) for each in fields["promotions"]))


@dataclass(frozen=True)
class SaveOrder:
    """One save of one writer: what lies where in the arena, and where it goes.

    `root` is, for the first writer, a root without parts: it fills in the parts of all `num_writers` and commits it.
    `arena_bytes` is the size of the arena now: the writer maps it anew when it grew. `promotions` follow the save.
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
    num_threads: int
    first_writer: int = 0
    promotions: tuple[Promotion, ...] = ()

    def to_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "SaveOrder":
        """The order of a line's fields."""
        files = tuple(StagedFile(Area(**f["data"]), Area(**f["index"])) for f in fields["files"])
        promotions = PromoteOrder.from_fields(fields).promotions
        return cls(**fields | {"files": files, "root": Area(**fields["root"]), "promotions": promotions})


def read_order(line: bytes) -> SaveOrder | PromoteOrder:
    """The order of a line."""
    fields = json.loads(line)
    return SaveOrder.from_fields(fields) if "files" in fields else PromoteOrder.from_fields(fields)


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended in the writer, or its copy to another place `url`; `error` is empty when all is well."""

    step: int
    error: str
    data_bytes: int
    write_s: float
    url: str = ""

    def to_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "SaveOutcome":
        """The outcome of a line."""
        return cls(**json.loads(line))
