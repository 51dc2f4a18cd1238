"""Ranks that are left of a job end at once and save nothing, whatever they wait for; the job goes on by itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.runs.catalogue import committed_steps
from tests.trainer.support.training import ROOT, kill, last_step, lines
from threefold.storage import open_storage

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


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits", "ends"])
def test_ranks_that_are_left_save_nothing(how: str, job_config: Path, tmp_path: Path) -> None:
    program, run, metrics = tmp_path / "program.py", tmp_path / "run", tmp_path / "m.jsonl"
    program.write_text(PROGRAM)
    ranks = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    saves = ["--save", run, "--save-interval", "2", "--checkpoint.keep-last", "9"]
    flags = [job_config, "--dp", "2", *saves, "--metrics", metrics]
    command = [sys.executable, "-m", "trainer", "launch", *ranks, program, tmp_path / "died", how, "train", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=100)
    finally:
        kill(process)
    assert process.returncode == 0, said
    assert "resumed from step 2 of" in said
    assert ("SIGTERM: of 2 ranks 1 are gone; the others end at once, and save nothing" in said) or how == "ends"
    assert not re.search("the run ends after this step|step 3 is", said)
    assert committed_steps(open_storage(str(run))) == [2, 4, 6, 8, 10, 12]
    assert not list(run.glob("step-000000003*")), "step 3 was the last good one, and rank 1 had a part of it"
    assert last_step(metrics) == 12
    starts = lines(metrics, "start")
    assert [line["step"] for line in starts] == [1, 3]
    assert all(line[f"{part}_s"] > 0 for line in starts for part in ("imports", "meeting", "loading", "first_step"))
