"""How many metadata operations a save costs a file system: on Lustre one server serves those of all ranks."""

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptkit.model.layout import ParallelLayout
from ckptkit.saving.checkpointer import Checkpointer
from tests.ckptkit.support.saves import SMALL, save_one, start_rank
from tests.support.strace import needs_strace
from threefold.storage import folders

CALLS = (
    "openat,creat,mkdir,mkdirat,stat,newfstatat,statx,link,linkat,rename,renameat,unlink,unlinkat,fsync,fdatasync,"
    "getdents64,access"
)
A_SAVE = 25  # of one writer, whatever the number of writers; docs/guides/lustre.md says which
A_COMMIT = 6  # of writer 0 besides
A_PART = 3  # of writer 0 for each part: two looks at its files and the opening of its index

A_LISTING = 3  # of writer 0 for each look for the others' files: an opening and two reads
A_LOOK = 2  # of another writer for each look for the outcome


def operations(run: Path, num_ranks: int, rank: int) -> tuple[Counter[str], int]:
    """The calls that name step 2's folder, and the run's, in one rank's second save; how many looks are in them."""
    layout = ParallelLayout(dp=num_ranks)
    log = run.with_suffix(f".{num_ranks}-{rank}")

    def save_as(other: int) -> None:
        with Checkpointer(str(run), rank=other, world_size=num_ranks, attempt="program") as checkpointer:
            for step in (1, 2):
                save_one(checkpointer, step, SMALL, layout, other, scale=step)
                assert checkpointer.wait()[0].ok

    under = ["strace", "-f", "-qq", "-y", "-o", str(log), "-e", f"trace={CALLS}"]
    arguments = ("--rank", rank, "--layout", str(layout), "--steps", "1,2", "--dtype", "F32")
    program = start_rank(str(run), *arguments, under=under)
    with ThreadPoolExecutor(num_ranks) as pool:
        others = [pool.submit(save_as, other) for other in range(num_ranks) if other != rank]
        output, _ = program.communicate(timeout=60)
        for other in others:
            other.result()
    assert output.count('"ok": true') == 2
    lines = [
        line
        for line in log.read_text().splitlines()
        if re.search(rf"{run}[/\">]", line)
        and ', "", ' not in line  # fstat asks an open file, not a name (its flags are absent from an interrupted line)
        and "O_PATH" not in line  # a step on the way to a name, as each of a path's
        and " resumed>" not in line  # the second half of a call that another thread's interrupted
    ]
    second = lines[next(number for number, line in enumerate(lines) if "step-000000002" in line) :]
    calls = Counter(line.split(maxsplit=1)[1].partition("(")[0] for line in second)
    return calls, sum("part-00000.failed" in line for line in second) or calls["getdents64"] // 2


@needs_strace
@pytest.mark.ci
@pytest.mark.slow
def test_a_save_costs_few_metadata_operations(tmp_path: Path) -> None:
    with folders.opened(tmp_path) as folder:
        if folders._handle(folder) is None:
            pytest.skip("the file system has no handles, so that names are synced for each file")
    other, num_looks = operations(tmp_path / "a", 2, 1)
    assert 5 < other.total() <= A_SAVE + num_looks * A_LOOK, other
    assert other["getdents64"] == 0, "only writer 0 lists"
    first, num_listings = operations(tmp_path / "b", 6, 0)
    assert first.total() <= A_SAVE + A_COMMIT + 6 * A_PART + num_listings * A_LISTING, first
