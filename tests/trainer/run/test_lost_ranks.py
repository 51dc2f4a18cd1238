"""Ranks that are left of a job end at once and save nothing, whatever they wait for; the job goes on by itself."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from ckptkit.runs.catalogue import committed_steps
from tests.trainer.job.test_launcher import ON_TWO, endpoint
from tests.trainer.support.training import ROOT, kill, last_step, lines
from threefold.storage import open_storage
from trainer.job.ranks import Ranks
from trainer.job.rendezvous import Board
from trainer.job.whereabouts import LOST, POSTED

# Rank 1 dies in step 4 of the first start. A wait is what a collective on a GPU does that loses a rank.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from trainer.cli import main
from trainer.run.loop import Run

died, waits, *arguments = sys.argv[1:]
step = Run.step

def failing(self):
    if self.progress.step == 3 and os.environ["RANK"] == "1" and not Path(died).exists():
        Path(died).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step(self)
    except RuntimeError:
        if waits == "waits":
            time.sleep(100)
        raise

Run.step = failing
sys.exit(main(arguments))
"""


class Left(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("notes", "leaves"),
    [({}, False), ({LOST: "5"}, True), ({LOST: "5", POSTED: "3"}, False)],
    ids=["nobody is gone", "a rank of another host is gone", "its last step was posted"],
)
def test_a_rank_leaves_if_one_of_another_host_is_gone(
    notes: dict[str, str], leaves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = list[str]()

    def leave(text: str) -> None:
        texts.append(text)
        raise Left

    ranks: Any = object.__new__(Ranks)
    ranks.board, ranks.world_size, ranks._berths = Board(HashStore()), 8, []
    ranks.whereabouts = SimpleNamespace(leave=leave)
    for key, text in notes.items():
        ranks.board.post(key, text)
    for _ in range(2):
        with pytest.raises(Left) if leaves else nullcontext():
            ranks.leave_if_lost()
    assert texts == ["gone without a word: 5"] * 2 * leaves
    line = "SIGTERM: rank 5 of 8 is gone; the others end at once, and save nothing\n"
    assert capsys.readouterr().err == line * leaves, "one rank says so"


def outcomes(folder: Path, how: str, config: Path, ranks: Sequence[object], *, num_launchers: int) -> list[str]:
    """What launchers said of a job of two ranks that went on to its end after rank 1 died."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    saves = ["--save", folder / "run", "--save-interval", 2, "--checkpoint.keep-last", 9]
    flags = [config, "--dp", 2, *saves, "--metrics", folder / "m.jsonl"]
    launch = [sys.executable, "-m", "trainer", "launch", *ranks, "--max-restarts", 1, program]
    command = list(map(str, [*launch, folder / "died", how, "train", *flags]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launchers = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
        for _ in range(num_launchers)
    ]
    try:
        texts = [launcher.communicate(timeout=100)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            kill(launcher)
    for launcher, text in zip(launchers, texts, strict=True):
        assert launcher.returncode == 0, text
    return texts


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits", "ends"])
def test_ranks_that_are_left_save_nothing(how: str, job_config: Path, tmp_path: Path) -> None:
    run, metrics = tmp_path / "run", tmp_path / "m.jsonl"
    [said] = outcomes(tmp_path, how, job_config, ["--standalone", "--nproc-per-node", 2], num_launchers=1)
    assert "resumed from step 2 of" in said
    assert ("SIGTERM: rank 1 of 2 is gone; the others end at once, and save nothing" in said) or how == "ends"
    assert not re.search("the run ends after this step|step 3 is", said)
    assert committed_steps(open_storage(str(run))) == [2, 4, 6, 8, 10, 12]
    assert not list(run.glob("step-000000003*")), "step 3 was the last good one, and rank 1 had a part of it"
    assert last_step(metrics) == 12
    starts = lines(metrics, "start")
    assert [line["step"] for line in starts] == [1, 3]
    assert all(line[f"{part}_s"] > 0 for line in starts for part in ("imports", "meeting", "loading", "first_step"))


@pytest.mark.ci
@pytest.mark.slow
def test_a_node_without_a_fault_goes_on_with_the_others(job_config: Path, tmp_path: Path) -> None:
    """torch counts no restart there, so what the start before left in the store must not be taken for this one's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [*ON_TWO, "--nproc-per-node", 1, *endpoint(port)]
    said = "".join(outcomes(tmp_path, "waits", job_config, ranks, num_launchers=2))
    assert "resumed from step 2 of" in said
    assert "SIGTERM: rank 1 of 2 is gone; the others end at once, and save nothing" in said
    assert "error" not in said.lower()
    assert [line["step"] for line in lines(tmp_path / "m.jsonl", "start")] == [1, 3]
    assert last_step(tmp_path / "m.jsonl") == 12
