"""ext4 and XFS, on a disk that loses its power, keep what the programs promised; and it shows where they could not."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ckptkit.support.saves import wait_until
from tests.support.checks import require
from tools.power_loss.mounted import FILE_SYSTEMS, obstacle

ROOT = Path(__file__).parents[2]
LOOPS = Path("/sys/block")
PROGRAMS = ("save", "two checkpointers", "torch", "prune", "rollback", "store", "preprocess")
NUM_CUTS = 8  # of a run
pytestmark = [pytest.mark.slow, pytest.mark.ci]


def command(kind: str, *words: object) -> list[str]:
    """Return what cuts the power of a file system; the test is skipped if it cannot be mounted here."""
    if reason := obstacle(kind):
        pytest.skip(reason)
    return [sys.executable, "-m", "tests.power_loss.on_image", "--file-system", kind, *map(str, words)]


def verdict(kind: str, *words: object) -> dict[str, Any]:
    """Return what cuts of the power of a file system showed."""
    run = subprocess.run(command(kind, *words), cwd=ROOT, capture_output=True, text=True, check=False)
    require(run.returncode == 0, run.stderr)
    return dict(json.loads(run.stdout))


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_what_was_promised_is_there_after_a_cut(kind: str) -> None:
    seen = verdict(kind, "--cuts", NUM_CUTS * len(PROGRAMS), *PROGRAMS)
    assert seen["faults"] == {}
    assert seen["programs"] == dict.fromkeys(PROGRAMS, NUM_CUTS)
    assert seen["cuts_that_lost"] > 3
    assert seen["promises"] > NUM_CUTS


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.parametrize(("name", "caller"), [("save", "NewFile.publish"), ("store", "durable.")])
def test_an_fsync_that_is_left_out_is_found(kind: str, name: str, caller: str) -> None:
    seen = verdict(kind, "--cuts", 2 * NUM_CUTS, "--without", caller, name)
    assert any("was promised" in fault for fault in seen["faults"])
    assert seen["not_mounted"] == 0


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_a_disk_that_does_no_flush_loses_what_was_promised(kind: str) -> None:
    seen = verdict(kind, "--cuts", 3 * NUM_CUTS, "--no-flush", "save", "store")
    assert seen["faults"]
    assert seen["cuts_that_lost"] > NUM_CUTS


def disks(process: int) -> set[tuple[str, str]]:
    """Return the loop devices that a process has mounted, each with the number of that use of it."""
    lines = Path(f"/proc/{process}/mounts").read_text().splitlines()
    names = {line.split()[0].removeprefix("/dev/") for line in lines if line.startswith("/dev/loop")}
    return {(name, (LOOPS / name / "diskseq").read_text()) for name in names}


def is_attached(name: str, use: str) -> bool:
    """Return whether a loop device still has the file of a use of it."""
    return (LOOPS / name / "loop/backing_file").exists() and (LOOPS / name / "diskseq").read_text() == use


def members(namespace: str) -> list[Path]:
    """Return the processes of a namespace of processes."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(path / "ns/pid") == namespace:
                processes.append(path)
    return processes


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 1.0])
def test_nothing_stays_mounted_when_it_is_killed(delay_s: float) -> None:
    before = disks(os.getpid())
    with subprocess.Popen(command("ext4", "--cuts", 10_000), cwd=ROOT, stdout=subprocess.DEVNULL) as run:
        wait_until(lambda: bool(disks(run.pid) - before))
        namespace = os.readlink(f"/proc/{run.pid}/ns/pid_for_children")
        assert len(members(namespace)) > 1, "what looks, what serves its disk, and a program"
        time.sleep(delay_s)
        used = disks(run.pid) - before
        run.send_signal(signal.SIGKILL)
    wait_until(lambda: not members(namespace) and not any(is_attached(*disk) for disk in used))
