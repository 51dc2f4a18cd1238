"""Stall: of ranks that make no progress, the ones that the others wait for, and the report that names them.

A rank that waits in a call waits for the members of its group that have not begun it: every rank of a group makes the
same calls in the same order, so their numbers compare. Who is waited for and waits for nobody is late. All of this is
pure: it takes what pages said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.job.sight import Sight, members_of

MOST_ROWS = 64
UNUSUAL = "stopped", "gone"  # processes that can do nothing, and so are late wherever they are


@dataclass(frozen=True, slots=True)
class Stall:
    """No rank of a job has made progress for some seconds; `sights` are the ranks that were seen, by number."""

    sights: Mapping[int, Sight]
    world_size: int
    seconds: float

    @property
    def step(self) -> int:
        """Return the step that the run is in."""
        return max((sight.now.step for sight in self.sights.values()), default=0)

    @property
    def waits_for(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks that each waiting rank waits for; none of them where all have begun the call."""
        return {rank: waited_for(sight, self.sights) for rank, sight in self.sights.items() if sight.now.waits}

    @property
    def late(self) -> tuple[int, ...]:
        """Return the ranks that others wait for and that wait for nobody; the likeliest first.

        That are the processes that can do nothing, if there are any. Else a rank of which nothing is seen, the ends of
        all chains of waits, or, where no rank waits, those that have done the least.
        """
        dead = [rank for rank, sight in self.sights.items() if sight.process.startswith(UNUSUAL)]
        if dead:
            return tuple(dead)
        waits = self.waits_for
        absent = [rank for rank in range(self.world_size) if rank not in self.sights]
        ends = {rank for waited in waits.values() for rank in waited if not waits.get(rank)}
        if absent:
            return tuple(absent)
        if not waits:
            return tuple(self.sights)
        idle = [rank for rank in self.sights if rank not in waits]
        return tuple(sorted(ends) or idle)

    @property
    def lines(self) -> list[str]:
        """Return the report: who is late and why, then a row a rank."""
        where = f"in step {self.step}" if self.step else "before the first step"
        return [
            f"no rank has made progress for {self.seconds:.0f} s, {where}",
            *self.cause_lines,
            *table(self.sights, self.late),
        ]

    @property
    def cause_lines(self) -> list[str]:
        """Return a line for each rank that is late, or one on what else it is."""
        late, waits = self.late, self.waits_for
        if not late and any(waits.values()):
            return ["the ranks wait for each other: a deadlock, as each waits for a call that another has not begun"]
        if not late:
            calls = sorted({self.sights[rank].now.collective for rank in waits})
            return [f"all ranks have begun the call that they wait for, which does not end: {'; '.join(calls)}"]
        return [self._cause(rank, waits) for rank in late[:MOST_ROWS]]

    def _cause(self, rank: int, waits: Mapping[int, tuple[int, ...]]) -> str:
        sight = self.sights.get(rank)
        if sight is None:
            return f"late: rank {rank}, of which nothing was heard"
        now = sight.now
        together = {other for other, its in self.sights.items() if (now.group, now.sequence) == _call(its)} - {rank}
        others = sorted({other for other, waited in waits.items() if rank in waited} | together)
        whose = f"; {numbered(others)} wait{'s' * (len(others) == 1)} for it" if others else ""
        how = f" is {sight.process}" if sight.process else ""
        return f"late: rank {rank} (host {sight.host}, pid {sight.pid}){how}: {place_of(sight)}{whose}"

    @property
    def hint(self) -> str:
        """Return what to look at, or to do."""
        sight = next((self.sights[rank] for rank in self.late if rank in self.sights), None)
        if sight is None:
            return "py-spy dump --pid PID of each rank prints where it is"
        on = f"on {sight.host}: "
        if sight.process.startswith("stopped"):
            return f"{on}kill -CONT {sight.pid} lets it go on"
        if sight.process.startswith("gone"):
            return f"{on}dmesg -T | grep -i 'killed process' shows whether memory ran out"
        if sight.process:
            return f"{on}sudo cat /proc/{sight.pid}/stack says what it waits for: a mount, or a disk?"
        return f"{on}py-spy dump --pid {sight.pid} prints where it is in the code"

    def to_event(self) -> dict[str, object]:
        """Return the fields of an event in the metrics file."""
        late = [rank for rank in self.late if rank in self.sights]
        return {
            "seconds": round(self.seconds, 1),
            "late": list(self.late),
            "places": {str(rank): place_of(self.sights[rank]) for rank in late[:MOST_ROWS]},
            "causes": self.cause_lines[:8],
        }


def _call(sight: Sight) -> tuple[str, int]:
    """Return the call that a rank waits in."""
    return (sight.now.group, sight.now.sequence) if sight.now.waits else ("", -1)


def waited_for(sight: Sight, sights: Mapping[int, Sight]) -> tuple[int, ...]:
    """Return the ranks that have not begun the call in which a rank waits."""
    now = sight.now
    behind = (rank for rank in members_of(now.group) if rank in sights and rank != sight.rank)
    return tuple(rank for rank in behind if sights[rank].counts.get(now.group, 0) < now.sequence)


def place_of(sight: Sight) -> str:
    """Return where a rank is, in words."""
    now = sight.now
    verb = "waits in" if now.waits else "began"
    parts = [
        f"step {now.step}, where it {now.phase}" if now.step else f"it {now.phase}",
        now.action,
        f"{verb} {now.collective}" if now.call else "",
        f"for {sight.age_s:.0f} s",
        f"its GPU is before {sight.device}" if sight.device else "",
    ]
    return ", ".join(part for part in parts if part)


def table(sights: Mapping[int, Sight], first: Sequence[int]) -> list[str]:
    """Return a row for each rank, those in `first` before the others."""
    order = [*(rank for rank in first if rank in sights), *(rank for rank in sorted(sights) if rank not in first)]
    rows = [("rank", "host", "pid", "process", "step", "does", "stage", "micro-batch", "collective", "since")]
    for sight in (sights[rank] for rank in order[:MOST_ROWS]):
        now, has_place = sight.now, bool(sight.now.kind) and sight.now.kind != "U"
        call = f"{'in' if now.waits else 'began'} {now.collective}" if now.call else "-"
        does = now.phase if not now.kind else "sums and updates" if now.kind == "U" else now.kind
        place = (str(now.stage), str(now.microbatch)) if has_place else ("-", "-")
        step = str(now.step) if now.step else "-"
        rows.append(
            (
                str(sight.rank),
                sight.host,
                str(sight.pid),
                sight.process or "runs",
                step,
                does,
                *place,
                call,
                f"{sight.age_s:.0f} s",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    more = len(order) - MOST_ROWS
    return lines + ([f"  and {more} ranks more, in the file"] if more > 0 else [])


def numbered(ranks: Sequence[int]) -> str:
    """Return ranks in words, the first eight."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
