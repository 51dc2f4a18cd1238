"""How many metadata operations a save costs a file system: on Lustre one server serves those of all ranks."""

import re
import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckptkit.layout import ParallelLayout
from ckptkit.saving.checkpointer import Checkpointer
from tests.ckptkit.saves import SMALL, save_one, start_rank

CALLS = "openat,creat,mkdir,stat,newfstatat,statx,link,rename,unlink,unlinkat,fsync,fdatasync,getdents64,access"
A_SAVE = 24  # of one writer, whatever the number of writers; docs/guides/lustre.md says so
A_PART = 3  # of writer 0 for each part: two looks at its files and the opening of its index

A_LISTING = 5  # of writer 0 for each further look for the others' files, while it waits
MAX_LISTINGS = 3

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def operations(run: Path, num_ranks: int, rank: int) -> Counter[str]:
    """The calls that name step 2's folder, and the run's, in one rank's second save, all other ranks being done."""
    layout = ParallelLayout(dp=num_ranks)
    log = run.with_suffix(f".{num_ranks}-{rank}")
    with ExitStack() as stack:
        for other in set(range(1, num_ranks)) - {rank} if rank == 0 else ():
            checkpointer = Checkpointer(str(run), rank=other, world_size=num_ranks, attempt="program")
            stack.enter_context(checkpointer)
            for step in (1, 2):
                save_one(checkpointer, step, SMALL, layout, other, scale=step)
                assert checkpointer.wait()[0].ok
        under = ["strace", "-f", "-qq", "-y", "-o", str(log), "-e", f"trace={CALLS}"]
        arguments = ("--rank", rank, "--layout", str(layout), "--steps", "1,2", "--dtype", "F32")
        program = start_rank(str(run), *arguments, under=under)
        output, _ = program.communicate(timeout=60)
    assert output.count('"ok": true') == 2
    lines = [
        line
        for line in log.read_text().splitlines()
        if re.search(rf"{run}[/\">]", line)
        and "AT_EMPTY_PATH" not in line  # fstat asks an open file, not a name
        and " resumed>" not in line  # the second half of a call that another thread's interrupted
    ]
    second = next(number for number, line in enumerate(lines) if "step-000000002" in line)
    return Counter(line.split(maxsplit=1)[1].partition("(")[0] for line in lines[second:])


@needs_strace
def test_a_save_costs_few_metadata_operations(tmp_path: Path) -> None:
    other = operations(tmp_path / "a", 2, 1)
    assert 5 < other.total() <= A_SAVE, other
    assert other["getdents64"] == 0, "only writer 0 lists"
    first = operations(tmp_path / "b", 6, 0)
    assert first.total() <= A_SAVE + 6 * A_PART + MAX_LISTINGS * A_LISTING, first
