"""ext4 and XFS, on a disk that loses its power, keep what the programs promised; and it shows where they could not."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

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
def test_a_disk_that_lies_loses_what_was_promised(kind: str) -> None:
    seen = verdict(kind, "--cuts", 3 * NUM_CUTS, "--lies", "save", "store")
    assert seen["faults"]
    assert seen["cuts_that_lost"] > NUM_CUTS


def loops() -> set[str]:
    """Return the loop devices that have a file."""
    return {path.name for path in LOOPS.glob("loop*") if (path / "loop/backing_file").exists()}


def servers() -> set[Path]:
    """Return the processes that serve a disk."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"tools.power_loss.disk_image" in (path / "cmdline").read_bytes():
                found.add(path)
    return found


def test_nothing_stays_mounted_when_it_is_killed() -> None:
    before, served = loops(), servers()
    with subprocess.Popen(command("ext4", "--cuts", 10_000), cwd=ROOT, stdout=subprocess.DEVNULL) as run:
        until = time.monotonic() + 60
        while not loops() - before:
            require(run.poll() is None and time.monotonic() < until, "nothing was mounted")
            time.sleep(0.001)
        run.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while (loops() - before or servers() - served) and time.monotonic() < until:
        time.sleep(0.05)
    assert loops() <= before
    assert servers() <= served
