"""Who waits in vain learns which ranks are late, and where they were last."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer.support.training import ROOT
from trainer.job.rendezvous import Board
from trainer.job.whereabouts import Place, Whereabouts


class Notes(dict):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


class Gone(Notes):
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("the store is gone")

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("the store is gone")


def test_ranks_that_are_behind_are_named_with_their_places() -> None:
    store = Notes()
    ranks = [Whereabouts(Board(store), rank, timeout_s=1.0) for rank in range(4)]
    for rank, (step, stage) in zip(ranks, [(7, "trains"), (7, "reads its batch"), (7, "trains"), (6, "saves")]):
        rank.note(step, stage)
    deadline = time.monotonic() + 30
    while len(store) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    behind = ranks[0].behind(range(5))
    assert behind == {1: Place(7, 0), 3: Place(6, 4), 4: None}
    assert str(behind[1]) == "in step 7, where it reads its batch"
    for rank in ranks:
        rank.close()


def test_a_store_that_is_gone_holds_no_notes_and_ends_nothing() -> None:
    board = Board(Gone())
    board.post("key", "text")
    assert board.read("key") is None
    assert Board(None).read("key") is None


# the rows of step 3 come later on rank 1 than the others wait
LATE = """
import os, sys, time
from trainer.cli import main
from trainer.data import StepReader
real, calls = StepReader.next_step, 0

def read(self):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        time.sleep(8)
    return real(self)

StepReader.next_step = read
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.ci
@pytest.mark.slow
def test_a_rank_that_is_late_is_named_and_not_called_gone(job_config: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LATE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, tmp_path / "program.py", "train", job_config, "--parallel.timeout-s", 4]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (
        "error: on rank 0 of 2: in step 3, where it trains, others did not come within 4 s: "
        "rank 1 was last in step 3, where it reads its batch: "
    ) in done.stderr
    assert "on rank 0 of 2: another rank is gone" not in done.stderr
