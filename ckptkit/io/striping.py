"""Striping: over how many storage targets of a Lustre file system each data file is spread, set before it is written.

A folder's setting holds for the files made in it later. Few writers get several stripes a file, many writers one each:
together they fill the file system either way, and each stripe costs its server a lock and an object.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from threefold.errors import UserError
from threefold.storage import Storage
from threefold.storage.folders import Folder, local_root
from threefold.storage.local import local_failures

LFS_TIMEOUT_S = 60.0
STRIPE_SIZE_BYTES = 16 << 20  # twice a block of the writer, so that no write crosses two targets
STRIPE_SIZE_UNIT = 64 << 10
BYTES_A_STRIPE = 2 << 30
MAX_STRIPES = 16  # of one file
MAX_STRIPES_IN_ALL = 128  # of the files of one save, where these would have more than one each
NOT_LUSTRE = "Inappropriate ioctl"


@dataclass(frozen=True, slots=True)
class Striping:
    """Stripes of each file (-1: one on every target) and bytes of a stripe before the next one begins."""

    count: int
    size_bytes: int


def choose_striping(file_bytes: int, num_writers: int, stripe_count: int = 0, stripe_size_bytes: int = 0) -> Striping:
    """Return the striping of files of about file_bytes from num_writers at once; what is given and not 0 is taken."""
    by_size = -(-file_bytes // BYTES_A_STRIPE)
    share = MAX_STRIPES_IN_ALL // max(num_writers, 1)
    return Striping(stripe_count or max(min(by_size, share, MAX_STRIPES), 1), stripe_size_bytes or STRIPE_SIZE_BYTES)


def check_striping(stripe_count: int, stripe_size_bytes: int) -> None:
    """Raise UserError if no file system could do what is asked for."""
    if stripe_count < -1 or stripe_size_bytes < 0 or stripe_size_bytes % STRIPE_SIZE_UNIT:
        raise UserError(
            f"no file has {stripe_count} stripes of {stripe_size_bytes} bytes",
            hint=f"give a stripe_count of -1 or more and a stripe_size_bytes that is a multiple of {STRIPE_SIZE_UNIT}",
        )


class Striper:
    """Sets the striping of the folders that get data files, if the program `lfs` is there.

    A failure stops nothing: `warn` is called once, and no other folder is tried. Folders of other file systems than
    Lustre stay as they are, and nothing is said.
    """

    def __init__(
        self, stripe_count: int = 0, stripe_size_bytes: int = 0, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self._stripe_count, self._stripe_size_bytes, self._warn = stripe_count, stripe_size_bytes, warn
        self._lfs = shutil.which("lfs")

    def prepare(self, storage: Storage, key: str, file_bytes: int, num_writers: int) -> None:
        """Make the folder of a data file, and set how it and those beside it are striped, before any is begun."""
        root, inner = local_root(storage), key.rpartition("/")[0]
        if root is None or self._lfs is None:
            return
        path = root / inner
        with local_failures("write", path):
            Folder(root, inner, make=True).close()
        chosen = choose_striping(file_bytes, num_writers, self._stripe_count, self._stripe_size_bytes)
        command = [self._lfs, "setstripe", "-c", str(chosen.count), "-S", str(chosen.size_bytes), str(path)]
        fault = _fault_of(command)
        if fault:
            self._lfs = None
            if NOT_LUSTRE not in fault:
                self._warn(f"cannot set the striping of {path}: {' '.join(command)}: {fault}")


def _fault_of(command: list[str]) -> str:
    """Return what a command that failed said."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=LFS_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (" ".join(done.stderr.split()) or f"exit code {done.returncode}") if done.returncode else ""
