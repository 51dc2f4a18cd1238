"""Commands killed with SIGKILL at a moment of their lives, alone or with all that they started."""

import argparse
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.record import add_option
from tools.s3_server import start, stop


def kill_after(command: Sequence[str], seconds: float, *, command_only: bool = False) -> list[int] | None:
    """Start a command and kill it after a time, with its children in whatever session; None where it had ended.

    Returns the processes that it had started, which live on with `command_only`. A command that fails by itself is an
    AssertionError.
    """
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        _, errors = process.communicate(timeout=max(seconds - (time.monotonic() - started), 0.0))
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGSTOP)  # nothing is started while it is looked at
        others = descendants(process.pid)
        for pid in () if command_only else others:
            _kill(pid)
        process.kill()
        process.wait()
        return others
    assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}: {errors.decode()[-2000:]}"
    return None


def main_of(description: str, commands: Sequence[str], kill_all: Callable[[Path, argparse.Namespace], int]) -> int:
    """Run `kill_all` in a temporary folder, with an S3 server where S3 is a place; returns its exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="kills in all")
    parser.add_argument("--seed", type=int, default=1, help="of the kill moments")
    parser.add_argument("--places", nargs="+", choices=["local", "s3"], default=["local", "s3"])
    parser.add_argument("--commands", nargs="+", choices=commands, default=list(commands))
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        server = start(folder / "server") if "s3" in arguments.places else None
        try:
            if server is not None:
                os.environ.update(server.environment)
            return kill_all(folder, arguments)
        finally:
            if server is not None:
                stop(folder / "server")


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that these started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent_of(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, at = [], [pid]
    while at:
        at = [child for each in at for child in children.get(each, [])]
        found += at
    return found


def wait_until_gone(pids: Sequence[int], within_s: float = 60.0) -> None:
    """Wait until processes have ended; AssertionError where one does not."""
    deadline = time.monotonic() + within_s
    while any(_parent_of(Path(f"/proc/{pid}")) is not None for pid in pids):
        assert time.monotonic() < deadline, f"one of the processes {pids} does not end"
        time.sleep(0.05)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _parent_of(process: Path) -> int | None:
    """Return the parent of a process that runs; None for one that is gone or is only still to be waited for."""
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)
