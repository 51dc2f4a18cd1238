"""The kind of file system that a path is on, which Linux lists by the number of its device."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
# of other machines: each page that is waited for costs a round trip, and a mapped file that is gone ends the process
REMOTE = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs",
    "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: its kind, without what follows a dot, and the options of its mount and of itself."""

    kind: str = ""
    options: frozenset[str] = frozenset()


def is_remote(path: str | os.PathLike[str], mounts: Path | None = None) -> bool:
    """Return whether a path is on a file system of another machine, or of a program; False if that is not known."""
    return mount_of(path, mounts).kind in REMOTE


def mount_of(path: str | os.PathLike[str], mounts: Path | None = None) -> Mount:
    """Return the file system that a path is on, one without a kind if that is not known.

    What is not there yet is where the nearest folder above it is. `mounts` is Linux's list, or a file like it.
    """
    place = Path(path)
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        device = os.stat(place).st_dev
        listed = (mounts or _MOUNTS).read_text(errors="replace")
    except OSError:
        return Mount()
    return _mount(listed, f"{os.major(device)}:{os.minor(device)}")


@lru_cache(64)
def _mount(mounts: str, device: str) -> Mount:
    """Return the mount of a device in a list of mounts.

    In the line "36 35 0:40 / /mnt rw shared:1 - fuse.sshfs host: rw,sync" it is of "0:40", of kind "fuse", with the
    options rw and sync.
    """
    for line in mounts.splitlines():
        place, _, rest = line.partition(" - ")
        if rest.split() and place.split()[2:3] == [device]:
            kind, *described = rest.split()
            options = ",".join([*place.split()[5:6], *described[1:2]])
            return Mount(kind.partition(".")[0], frozenset(options.split(",")))
    return Mount()
