"""The kind of file system that a path is on, which Linux lists by the number of its device."""

import os
from functools import lru_cache
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
# of other machines: each page that is waited for costs a round trip, and a mapped file that is gone ends the process
REMOTE = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs",
    "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip


def is_remote(path: str | os.PathLike[str], mounts: Path | None = None) -> bool:
    """Return whether a path is on a file system of another machine, or of a program; False if that is not known.

    What is not there yet is where the nearest folder above it is. `mounts` is Linux's list, or a file like it.
    """
    place = Path(path)
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        device = os.stat(place).st_dev
        listed = (mounts or _MOUNTS).read_text(errors="replace")
    except OSError:
        return False
    return _kind(listed, f"{os.major(device)}:{os.minor(device)}") in REMOTE


@lru_cache(64)
def _kind(mounts: str, device: str) -> str:
    """Return the kind of a device in a list of mounts, without what follows a dot; "" if it is not there.

    In the line "36 35 0:40 / /mnt rw shared:1 - fuse.sshfs host: rw" it is "fuse" of "0:40".
    """
    for line in mounts.splitlines():
        place, _, kind = line.partition(" - ")
        if kind and place.split()[2:3] == [device]:
            return kind.split()[0].partition(".")[0]
    return ""
