"""Serve a file that is a disk: each write to it and each flush goes into a log, in the order in which it is served.

    python -m tools.power_loss.disk_image IMAGE LOG PLACE

The file PLACE becomes one with what IMAGE holds, and more behind it: what is written there is said, and changes no
disk. It is served in the kernel's own words (FUSE, /dev/fuse), so that a loop device over it is a disk whose blocks are
logged, and whose fsync is the flush of the device. This process touches no file of that disk: it would wait for itself.
So it leaves the namespace of mounts before the disk is mounted there: the last process of one unmounts all as it ends.
It ends when the file is unmounted; when it is killed, whoever waits for the disk gets an error.
"""

import ctypes
import errno
import mmap
import os
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from tools.power_loss.block_log import FLUSH, SAID, WRITE, head

ROOM_BYTES = 1 << 20  # behind the disk, for what is said
MAX_WRITE = 1 << 20
REQUEST = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, padding
ANSWER = struct.Struct("<IiQ")  # length, error, unique
VERSION = 7, 31
BIG_WRITES, MANY_PAGES = 1 << 5, 1 << 22
INIT, GET_ATTRIBUTES, SET_ATTRIBUTES, OPEN, READ, PUT, RELEASE, SYNC, INTERRUPT = 26, 3, 4, 14, 15, 16, 18, 20, 36
NEW_MOUNTS, DETACHED = 0x20000, 2  # CLONE_NEWNS, MNT_DETACH
UNANSWERED = (2, 42, INTERRUPT)  # FORGET and BATCH_FORGET beside it


class DiskImage:
    """A file of a disk, served by one thread of a process of its own."""

    def __init__(self, image: Path, log: Path) -> None:
        self.num_bytes = image.stat().st_size
        with image.open("r+b") as file:
            self._disk = mmap.mmap(file.fileno(), self.num_bytes)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._acts: dict[int, Callable[[bytes], bytes]] = {
            INIT: self._begin,
            GET_ATTRIBUTES: self._attributes,
            SET_ATTRIBUTES: self._attributes,
            OPEN: lambda _: struct.pack("<QII", 0, 0, 0),
            READ: self._read,
            PUT: self._write,
            RELEASE: lambda _: b"",
            SYNC: self._flush,
        }

    def serve(self, place: Path) -> None:
        """Mount the file and answer requests until it is unmounted."""
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={device},rootmode={stat.S_IFREG | 0o600:o},user_id=0,group_id=0"
        path = os.fsencode(place)
        call("mount", b"disk", path, b"fuse", 0, options.encode())
        call("unshare", NEW_MOUNTS)
        call("umount2", path, DETACHED)  # here; it stays where it was mounted
        while True:
            try:
                self._answer(device, os.read(device, MAX_WRITE + 4096))
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno not in (errno.EINTR, errno.ENOENT, errno.EAGAIN):  # of a request that was given up
                    raise

    def _answer(self, device: int, request: bytes) -> None:
        _, opcode, unique, *_ = REQUEST.unpack_from(request)
        if opcode in UNANSWERED:
            return
        act = self._acts.get(opcode)
        body = b"" if act is None else act(request[REQUEST.size :])
        code = -errno.ENOSYS if act is None else 0
        os.write(device, ANSWER.pack(ANSWER.size + len(body), code, unique) + body)

    def _begin(self, body: bytes) -> bytes:
        _, _, ahead, offered = struct.unpack_from("<IIII", body)
        flags = offered & (BIG_WRITES | MANY_PAGES)
        return struct.pack("<IIIIHHIIHHI28x", *VERSION, ahead, flags, 16, 12, MAX_WRITE, 1, MAX_WRITE // 4096, 0, 0)

    def _attributes(self, body: bytes) -> bytes:
        size = self.num_bytes + ROOM_BYTES
        times = [0] * 6
        valid = struct.pack("<QII", 3600, 0, 0)
        return valid + struct.pack("<6Q10I", 1, size, size // 512, *times, stat.S_IFREG | 0o600, 1, 0, 0, 0, 4096, 0)

    def _read(self, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return self._disk[offset : offset + size].ljust(size, b"\0")

    def _write(self, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        data = body[40 : 40 + size]
        if offset < self.num_bytes:
            self._disk[offset : offset + size] = data
        os.write(self._log, head(WRITE if offset < self.num_bytes else SAID, offset, size) + data)
        return struct.pack("<II", size, 0)

    def _flush(self, body: bytes) -> bytes:
        os.write(self._log, head(FLUSH))
        return b""


def call(name: str, *arguments: bytes | int) -> None:
    """Call the C library; OSError if that fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main() -> None:
    image, log, place = (Path(word) for word in sys.argv[1:])
    DiskImage(image, log).serve(place)


if __name__ == "__main__":
    main()
