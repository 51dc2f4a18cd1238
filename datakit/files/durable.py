"""Durable files: written whole, flushed to the disk and named last; what the system refuses is a StorageError.

Nothing here knows what a file holds. Memory is one block of 8 MiB.
"""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from threefold.errors import CheckFailed, StorageError, quoted
from threefold.storage.folders import sync_folder

_LIMITS = {  # what to look at when it is a limit of the process or the machine that is reached, not the file's fault
    errno.EMFILE: "ulimit -n 65536",
    errno.ENFILE: "sysctl fs.file-nr",
    errno.ENOMEM: "ulimit -v; sysctl vm.max_map_count",
}
_BLOCK_BYTES = 8 << 20
# under TMPDIR: an output behind a URL is made in the one first, pipes are copied to the other
_SCRATCH_NAME = re.compile(r"datakit-(\d.*|spool)")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and XXH3-64 of one whole file."""

    size_bytes: int
    xxh3_64: str

    @classmethod
    def of(cls, content: bytes) -> "FileDigest":
        """Return that of a file with this content."""
        return cls(len(content), xxhash.xxh3_64_hexdigest(content))


def digest_file(path: Path) -> FileDigest:
    """Size and checksum of a file, in one pass."""
    hasher, size_bytes = xxhash.xxh3_64(), 0
    for block in blocks_of(path):
        hasher.update(block)
        size_bytes += len(block)
    return FileDigest(size_bytes, hasher.hexdigest())


def blocks_of(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, 8 MiB at a time."""
    with reading(path), path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def checked_blocks(path: Path, digest: FileDigest) -> Iterator[bytes]:
    """Yield the bytes of a file; before they can end, raise CheckFailed if they are not those of its digest."""
    hasher = xxhash.xxh3_64()
    for block in blocks_of(path):
        hasher.update(block)
        yield block
    if hasher.hexdigest() != digest.xxh3_64:
        raise CheckFailed(
            f"{path} is damaged: its checksum does not hold", hint=f"datakit verify {quoted(path.parent)}"
        )


def write_durably(path: Path, content: bytes) -> None:
    """Write a whole file and make it reach the disk."""
    with durable_file(path) as file:
        file.write(content)


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file to write; leaving the `with` makes it reach the disk, leaving it by an exception removes it.

    A file that an earlier try left is removed first: one that could not be made durable is never written again.
    """
    with writing(path):
        path.unlink(missing_ok=True)
        try:
            with path.open("xb") as file:
                yield file
                flush_to_disk(file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def replace_durably(path: Path, content: bytes, *, temporary: Path | None = None) -> None:
    """Put a small file in place so that it is seen whole or not at all, also after a loss of power.

    Until then it has the name `temporary`, which several writers of one path must not share.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    write_durably(temporary, content)
    with writing(path):
        try:
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def flush_to_disk(file: BinaryIO) -> None:
    """Empty an open file's buffer and make its content reach the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn the system's refusals to read `path` into a StorageError that names it and what to do."""
    try:
        yield
    except OSError as error:
        hint = _LIMITS.get(error.errno or 0, f"ls -l {quoted(path)}")
        raise StorageError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write `path` into a StorageError that names it."""
    try:
        yield
    except OSError as error:
        scratch = any(map(_SCRATCH_NAME.fullmatch, path.parts))
        what = "export TMPDIR=FOLDER of another disk" if scratch else "choose another --output"
        hint = _LIMITS.get(error.errno or 0, f"make room or {what}, then rerun")
        raise StorageError(f"cannot write {path}: {error.strerror or error}", hint=hint) from error


def temporary_folder() -> Path:
    """Return the folder for temporary files; StorageError if there is none that takes a file, as when it is full."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        folder = os.environ.get("TMPDIR") or "/tmp"
        raise StorageError(
            f"no temporary folder takes a file, {folder} neither: perhaps its disk is full",
            hint=f"df -h {quoted(folder)}; make room, or export TMPDIR=FOLDER of another disk",
        ) from error


def url_behind(path: Path) -> str | None:
    """Return the URL that a Path was made of, which took one of its slashes; None for a path of a file system."""
    scheme, *rest = path.parts or ("",)
    return f"{scheme}//{'/'.join(rest)}" if re.fullmatch(r"[a-z][a-z0-9]*:", scheme) else None
