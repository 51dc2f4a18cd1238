"""Flight: what a rank did last, as a file of JSON lines, written at each end of a rank that is not clean.

A rank writes its own. Of one that ended without a word, by SIGKILL or for want of memory, the launcher reads the page,
or a rank of its host that lost it.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from threefold.cli import log
from threefold.masking import masked_values
from trainer.job.page import FOLDER, RankPage
from trainer.job.sight import ENDS, Sight, read_page
from trainer.job.stall import place_of

RUNS, WELL, WRITTEN = ENDS
MOST_NAMED = 4


def default_folder(metrics: str) -> Path:
    """Return where reports go if no folder is named: beside a metrics file, else where temporary files are.

    The ranks of a node have one parent, whose number names the latter.
    """
    return (
        Path(metrics).parent / "flight" if metrics else Path(tempfile.gettempdir()) / f"trainer-flight-{os.getppid()}"
    )


def end_page(page: RankPage, why: str | None) -> Path | None:
    """Note how this rank ends: well, or because of something; then its records go to a file, whose path is returned."""
    page.end(WRITTEN if why else WELL)
    path = write_flight(page.sight(), why) if why else None
    page.close()
    return path


def write_flight(sight: Sight, why: str) -> Path | None:
    """Write the records of a rank behind a line on the rank; None without a folder for it, or room."""
    if not sight.folder:
        return None
    path = Path(sight.folder) / f"flight-rank-{sight.rank:05}.jsonl"
    before_s = time.time() - time.monotonic()  # of records, whose clock counts from another moment
    head = {
        "rank": sight.rank,
        "world_size": sight.world_size,
        "host": sight.host,
        "pid": sight.pid,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "why": why,
        "last": place_of(sight),
        "calls": sight.counts,
    }
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(masked_values(head)) + "\n")
            for record in sight.records:
                values = asdict(record)
                time_s = before_s + values.pop("time_ns") / 1e9
                file.write(json.dumps({"time": round(time_s, 6), **values}) + "\n")
        return path
    return None


@contextmanager
def pages_of_node() -> Iterator[None]:
    """Let ranks that are started inside have their pages in a folder, and write the flights of those that died."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="trainer-pages-", dir=shared) as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]
            if files := write_flights_of_dead(sorted(Path(folder).iterdir()), "it ended without a word"):
                log(f"what {'it' if len(files) == 1 else 'each'} did last: {', '.join(map(str, files[:MOST_NAMED]))}")


def write_flights_of_dead(paths: Sequence[str | Path], why: str) -> list[Path]:
    """Write the flights of ranks that are gone and did not write their own; return their files."""
    files = [write_flight(sight, why) for sight in dead_of(paths)]
    return [file for file in files if file is not None]


def dead_of(paths: Sequence[str | Path]) -> list[Sight]:
    """Return the pages of ranks that are gone without a word, as by SIGKILL."""
    sights = [sight for path in paths if (sight := read_page(path)) is not None]
    return [sight for sight in sights if sight.end == RUNS and not _runs(sight.pid)]


def _runs(pid: int) -> bool:
    from trainer.job.watch import state_of

    return state_of(pid) != "gone"
