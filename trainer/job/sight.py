"""Sight: a rank's page as another process reads it: the newest record, those before it, and how many calls there were.

The page has a head, a count for each group, names as JSON, and a ring of records. A record that is half written is left
out, by the number at both of its ends.
"""

import json
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic_ns
from typing import Any

MAGIC = b"3fpage01"
PHASES = ("starts", "reads its batch", "trains", "waits for its device", "agrees", "evaluates", "saves")
KINDS = ("", "F", "B", "W", "SF", "RF", "SB", "RB", "U")  # of actions; U sums gradients and updates
COLLECTIVES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_gather_coalesced", "all_to_all")
CALLS = ("", *COLLECTIVES, "send", "receive", "exchange")
ENDS = ("runs", "ended well", "ended, and its record is written")
KIND_OF, CALL_OF, PHASE_OF = ({name: at for at, name in enumerate(names)} for names in (KINDS, CALLS, PHASES))

# number, nanoseconds, step, phase, kind, stage, micro-batch, call, waits, group, its number in the group, low bits of
# the number
RECORD = struct.Struct("<QqIBBHIBBHII")
HEAD = struct.Struct("<8sIIIIQq")  # magic, rank, ranks, process, end, beats and when the last was
COUNT = struct.Struct("<I")
NUM_RECORDS, MOST_GROUPS = 1024, 1024
COUNTS, INFO = 4096, 8192  # bytes before each part
RING = 1 << 16
NUM_BYTES = RING + NUM_RECORDS * RECORD.size
BEAT_AT = HEAD.size - 16


@dataclass(frozen=True, slots=True)
class Record:
    """Where a rank was at a moment: what it did, and the call of a group that it began last there, or waits in."""

    number: int
    time_ns: int  # of the host's monotonic clock
    step: int
    phase: str
    kind: str = ""
    stage: int = 0
    microbatch: int = 0
    call: str = ""
    waits: bool = False
    group: str = ""
    sequence: int = 0

    @property
    def action(self) -> str:
        """Return the action as people read it."""
        if not self.kind:
            return ""
        return (
            "sums and updates"
            if self.kind == "U"
            else f"{self.kind} of stage {self.stage}, micro-batch {self.microbatch}"
        )

    @property
    def collective(self) -> str:
        """Return the call as people read it."""
        return f"{self.call} #{self.sequence} of group {self.group}" if self.call else ""


@dataclass(frozen=True, slots=True)
class Sight:
    """A page as a reader saw it: the newest record, and how many calls each group has had on that rank."""

    rank: int
    world_size: int
    pid: int
    host: str
    end: str
    beats: int
    now: Record
    age_s: float  # of the record
    counts: dict[str, int]
    device: str = ""  # the first call that its GPU has not finished, if that is known
    process: str = ""  # what the system says of the process, if it is not as usual
    folder: str = ""  # for reports
    records: tuple[Record, ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return it without the records."""
        values = asdict(self)
        del values["records"]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Sight":
        """Return what `to_json` wrote."""
        return cls(**values | {"now": Record(**values["now"])})


def read_page(path: str | Path) -> Sight | None:
    """Return what the page of a file says; None if it is not a page, or gone."""
    try:
        return parse(Path(path).read_bytes())
    except OSError:
        return None


def read_beats(path: str) -> int:
    """Return the beats of the page of a file, -1 if it is gone."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(BEAT_AT)
        return int.from_bytes(file.read(8), "little")
    return -1


def parse(data: bytes) -> Sight | None:
    """Return what the bytes of a page say; None if it is not a page. Half a record is left out."""
    if len(data) != NUM_BYTES or not data.startswith(MAGIC):
        return None
    _, rank, world_size, pid, end, beats, _ = HEAD.unpack_from(data)
    (length,) = COUNT.unpack_from(data, INFO)
    try:
        info = json.loads(data[INFO + COUNT.size : INFO + COUNT.size + length])
    except ValueError:
        info = {"host": "", "groups": [], "folder": "", "device": ""}
    groups = info["groups"][:MOST_GROUPS]
    counts = {label: COUNT.unpack_from(data, COUNTS + COUNT.size * at)[0] for at, label in enumerate(groups)}
    values = sorted(each for each in RECORD.iter_unpack(data[RING:]) if each[0] and each[0] & 0xFFFFFFFF == each[-1])
    records = tuple(_record(each, groups) for each in values)
    if not records:
        return None
    age_s = max(monotonic_ns() - records[-1].time_ns, 0) / 1e9
    return Sight(
        rank,
        world_size,
        pid,
        info["host"],
        ENDS[min(end, len(ENDS) - 1)],
        beats,
        records[-1],
        age_s,
        counts,
        device=info["device"],
        folder=info["folder"],
        records=records,
    )


def _record(values: tuple[int, ...], groups: Sequence[str]) -> Record:
    number, time_ns, step, phase, kind, stage, microbatch, call, waits, group, sequence, _ = values
    label = groups[group] if group < len(groups) else "a group"
    named = (CALLS[call], bool(waits), label, sequence) if call else ()
    return Record(number, time_ns, step, PHASES[phase], KINDS[kind], stage, microbatch, *named)


def label_of(name: str, ranks: Sequence[int]) -> str:
    """Return the label of a group: `dp, ranks 1, 3` or `world, ranks 0-7`; each run has the largest step it can.

    The ranks 0, 4, 8, 12 are `0-12/4`.
    """
    parts, left = [], list(ranks)
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        size = next((at for at in range(1, len(left)) if left[at] - left[at - 1] != step), len(left))
        run, left = (left[:size], left[size:]) if size > 2 else (left[:1], left[1:])
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" + (f"/{step}" if step != 1 else ""))
    return f"{name}, ranks {', '.join(parts)}"


@cache
def members_of(label: str) -> tuple[int, ...]:
    """Return the ranks of a group by its label."""
    ranks: list[int] = []
    for first, last, step in re.findall(r"(\d+)(?:-(\d+)(?:/(\d+))?)?", label.partition(", ranks ")[2]):
        ranks += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(ranks)
