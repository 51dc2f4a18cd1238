"""Commands killed at random moments and run again, as benchmarks/ckptkit/kill.py does it at length."""

import os
import subprocess
import sys

import pytest

from benchmarks.killing import kill_after, wait_until_gone
from tests.ckptkit.support.saves import ROOT, is_running
from tools.s3_server import find_weed

SESSIONS = ["sh", "-c", "setsid sleep 100 & setsid sleep 100 & wait"]


def test_a_kill_takes_processes_in_other_sessions_too_or_leaves_them() -> None:
    killed = kill_after(SESSIONS, 0.5)
    assert killed is not None
    assert len(killed) == 2
    wait_until_gone(killed, within_s=10.0)
    left = kill_after(SESSIONS, 0.5, command_only=True)
    assert left is not None
    assert all(is_running(pid) for pid in left)
    for pid in left:
        os.kill(pid, 9)
    assert kill_after(["true"], 60.0) is None
    with pytest.raises(AssertionError, match="ended with 1"):
        kill_after(["false"], 60.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_commands_run_again_and_one_prune_leaves_committed_data_alone() -> None:
    if find_weed() is None:
        pytest.skip("the S3 server is not installed")
    program = [sys.executable, "benchmarks/ckptkit/kill.py", "--rounds", "8", "--seed", "3"]
    done = subprocess.run(
        program,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 faults" in done.stdout
