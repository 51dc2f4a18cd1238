"""Real file systems on images, mounted where all of it ends with the last process that uses it.

`in_namespace` starts the program again with mounts and processes of its own: when it ends, or is killed, the kernel
kills what it started, unmounts what it mounted and detaches its loop devices. Files are in memory, and gone as well.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from threefold.errors import UserError
from tools.power_loss.block_log import BlockLog

SCRATCH = Path("/run/power-loss")  # an empty folder; within the namespace a file system in memory
PROGRAMS = ("unshare", "mount", "umount", "losetup", "sync", "cp")
MIB = 1 << 20
FILE_SYSTEMS = {
    "ext4": (64 * MIB, ("mkfs.ext4", "-q", "-F")),
    "xfs": (320 * MIB, ("mkfs.xfs", "-q", "-f")),
}
REPAIRS = {"ext4": ("e2fsck", "-fy")}  # that replays the journal, as that of XFS does not
UNSHARE = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
INSIDE = "POWER_LOSS_NAMESPACE"
WAIT_S = 20.0


def obstacle(kind: str) -> str:
    """Return why a file system cannot be mounted from an image that is logged on this machine, or nothing."""
    known = Path("/proc/filesystems").read_text().split() if Path("/proc/filesystems").exists() else []
    missing = [
        name for name in (*PROGRAMS, FILE_SYSTEMS[kind][1][0], *REPAIRS.get(kind, ())[:1]) if shutil.which(name) is None
    ]
    if os.geteuid() != 0:
        return "only root may mount"
    for path in ("/dev/fuse", "/dev/loop-control", str(SCRATCH.parent)):
        if not os.path.exists(path):
            return f"there is no {path}"
    if kind not in known or missing:
        return f"{', '.join(missing) or kind} is not installed"
    SCRATCH.mkdir(exist_ok=True)
    tried = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", str(SCRATCH)], capture_output=True, check=False)
    return tried.stderr.decode().strip() if tried.returncode else ""


def in_namespace(module: str, arguments: Sequence[str]) -> None:
    """Become the program of a module, in a namespace of its own; return if this process is that."""
    if os.environ.get(INSIDE):
        subprocess.run(["mount", "-t", "tmpfs", "none", SCRATCH], check=True)
        return
    os.environ[INSIDE] = "1"
    os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, "-m", module, *arguments])


def make_image(kind: str, image: Path) -> None:
    """Make an empty file system in a file."""
    size, command = FILE_SYSTEMS[kind]
    with image.open("wb") as file:
        file.truncate(size)
    _run(*command, str(image))


def copy_image(image: Path, copy: Path) -> None:
    """Copy an image, with its holes."""
    _run("cp", "--sparse=auto", str(image), str(copy))


def is_repaired(kind: str, image: Path) -> bool:
    """Repair an image that cannot be mounted, as one whose superblock is torn; return whether that was done."""
    command = REPAIRS.get(kind)
    return bool(command) and subprocess.run([*command, image], capture_output=True, check=False).returncode < 4


@contextmanager
def mounted(image: Path, size: int, place: Path) -> Iterator[None]:
    """Mount the file system in the first bytes of a file; UserError if that fails."""
    place.mkdir(exist_ok=True)
    _run("mount", "-o", f"loop,sizelimit={size}", str(image), str(place))
    try:
        yield
    finally:
        _unmount(place)


@contextmanager
def logged(image: Path, log: Path, place: Path) -> Iterator[None]:
    """Serve an image as a file whose writes and flushes are logged."""
    place.touch()
    words = (sys.executable, "-m", "tools.power_loss.disk_image", str(image), str(log), str(place))
    with subprocess.Popen(words) as server:
        try:
            until = time.monotonic() + WAIT_S
            while not os.path.ismount(place):
                if server.poll() is not None or time.monotonic() > until:
                    raise UserError(f"{image} is not served")
                time.sleep(0.01)
            yield
        finally:
            if os.path.ismount(place):
                _unmount(place)
            server.kill()  # where it has not ended by that


def lay(log: BlockLog, begin: int, end: int, image: Path) -> None:
    """Do all writes between two places of a log on an image."""
    with image.open("r+b") as file:
        for entry in log.writes(begin, end):
            file.seek(entry.offset)
            file.write(entry.data)


def _unmount(place: Path) -> None:
    for _ in range(50):  # a process that has just ended may still be there
        if subprocess.run(["umount", str(place)], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", str(place)], check=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError((done.stderr.strip() or f"{words[0]} failed").splitlines()[0])
