"""Mapped files that can no longer be read: the file behind an address of this process, and the error that names it."""

import os
import re

from threefold.errors import StorageError

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+ *(.*)")


def unreadable(address: int) -> StorageError:
    """Return the error of an address that native code could not read, which names the file that is mapped there."""
    found = mapped_file(address)
    if found is None:
        return StorageError(
            f"memory at {address:#x} cannot be read: a file mapped there was cut short, or its disk failed"
        )
    path, place = found
    try:
        size_bytes = os.stat(path).st_size
    except OSError:
        return StorageError(
            f"{path}, which is mapped, cannot be read at byte {place}, and is gone", hint="restore the file from a copy"
        )
    if place >= size_bytes:
        return StorageError(
            f"{path} was cut short while it was read: it has {size_bytes} bytes now, and byte {place} is asked for",
            hint="restore the file from a copy, and let nothing write to files that are in use",
        )
    return StorageError(f"{path} cannot be read at byte {place}: its disk does not answer", hint="dmesg | tail")


def mapped_file(address: int) -> tuple[str, int] | None:
    """Return the file that is mapped at an address and the byte of it that is there; None if there is none."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                matched = _LINE.match(line)
                if matched is None:
                    continue
                begin, end, offset = (int(matched[group], 16) for group in (1, 2, 3))
                if begin <= address < end:
                    path = matched[4].rstrip("\n").removesuffix(" (deleted)")
                    return (path, address - begin + offset) if path.startswith("/") else None
    except OSError:  # no such file on other systems
        pass
    return None
