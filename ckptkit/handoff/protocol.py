"""The orders that the trainer sends its writer process, and the outcomes that it gets back: a JSON line each."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from ckptkit.format.keys import Seat
from ckptkit.format.root import Share
from ckptkit.io.blocks import Bytes
from ckptkit.runs.retention import Retention
from threefold.plain import from_plain

NO_MORE = b"no more orders\n"  # the end of the pipe says so too, but a child of the trainer may hold that open


@dataclass(frozen=True, slots=True)
class Area:
    """Bytes [offset, offset + size) of the arena."""

    offset: int
    size: int

    def of(self, memory: Bytes) -> Bytes:
        """Return these bytes, not copied."""
        return memory[self.offset : self.offset + self.size]


@dataclass(frozen=True, slots=True)
class Ring:
    """Where the blocks of a save are in the arena: block n in slot n % num_slots, the slots one after the other.

    With a slot for each block nothing is ever overwritten, and a file is there whole.
    """

    offset: int
    block_bytes: int
    num_slots: int
    num_blocks: int

    @property
    def is_window(self) -> bool:
        """Whether slots are used more than once."""
        return self.num_slots < self.num_blocks

    def at(self, blocks: Any) -> Any:
        """Return where blocks begin in the arena, for a number or an array of them.

        With blocks of 8 in 3 slots from byte 100, block 4 is in slot 1: it begins at byte 108.
        """
        return self.offset + blocks % self.num_slots * self.block_bytes


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One data file: its size, its first block, and where its part index is, whose checksums are still zero."""

    size_bytes: int
    first_block: int
    index: Area


@dataclass(frozen=True, slots=True)
class TierCopy:
    """One writer's part in copying a committed step from its seat at `source` to the one at `target`.

    `of_node`: the target holds what the source holds, and not the whole step of all nodes.
    """

    source: Seat
    target: Seat
    of_node: bool
    num_files: int
    data_bytes: int
    deadline_s: float
    retention: Retention
    needed: tuple[int, ...] = ()


class _Message:
    """What goes through a pipe between the two processes."""

    def to_line(self) -> bytes:
        """Return one line of JSON."""
        return json.dumps({type(self).__name__: asdict(self)}).encode() + b"\n"  # type: ignore[call-overload]


@dataclass(frozen=True)
class CopyOrder(_Message):
    """Copies of a step that was saved before."""

    tier_copies: tuple[TierCopy, ...]


@dataclass(frozen=True)
class SaveOrder(_Message):
    """One save of one writer: what is where in the arena, and where it goes.

    `draft` is, for the first writer, a root of which only the tensors count: it fills in the rest and commits it.
    `arena_bytes` is the size of the arena now: the writer maps it again when it grew. `abandoned` are the seats of a
    writer that was killed, whose files are of no use. `tier_copies` follow the save; `overflow` is where the step goes
    instead if it has no room. `needed` are steps that stay whatever the retention says, `intervals` those of all slower
    tiers, by their URLs.
    """

    seat: Seat
    files: tuple[StagedFile, ...]
    ring: Ring
    draft: Area
    layout: Mapping[str, int]
    num_layers: int
    metadata: Mapping[str, Any]
    arena_bytes: int
    deadline_s: float
    retry_s: float
    retention: Retention
    code: str
    stripe_count: int
    stripe_size_bytes: int
    num_threads: int
    abandoned: tuple[Seat, ...] = ()
    share: Share | None = None
    tier_copies: tuple[TierCopy, ...] = ()
    overflow: Seat | None = None
    needed: tuple[int, ...] = ()
    intervals: Mapping[str, int] = field(default_factory=dict)

    @property
    def goes_beside_nodes(self) -> bool:
        """Whether the overflow is of whole steps, to which other nodes copy their parts."""
        return self.overflow is not None and self.overflow.num_writers > self.seat.num_writers

    def moved(self, url: str) -> Self:
        """Return the same save as it went to another run."""
        return replace(self, seat=replace(self.seat, url=url))


@dataclass(frozen=True)
class SkipOrder(_Message):
    """A save that this writer's rank leaves out, or whose writer was killed: nobody shall wait for it."""

    seat: Seat
    reason: str


@dataclass(frozen=True)
class SaveOutcome(_Message):
    """How a save ended in the writer, or its copy to another place `url`; `error` is empty when all is well, `warning`
    when the pruning after it was.

    `overflowed_to` is the URL that took the step, where the first tier had no room.
    """

    step: int
    error: str
    data_bytes: int
    write_s: float
    num_attempts: int = 1
    warning: str = ""
    url: str = ""
    overflowed_to: str = ""


_KINDS = {kind.__name__: kind for kind in (SaveOrder, SkipOrder, CopyOrder, SaveOutcome)}


def message_of(line: bytes) -> Any:
    """Return the message of a line."""
    [(kind, fields)] = json.loads(line).items()
    return from_plain(_KINDS[kind], fields)
