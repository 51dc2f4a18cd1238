"""Inputs: the text files that a command names (files, folders, globs, URLs), in one sorted order, and how they are cut.

Work items group small files and split large ones at line ends, parquet and Arrow files between row groups. The cut
depends on the files alone, never on workers, so that the same command gives the same bytes with any number of them.
"""

import glob
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import BinaryIO

from datakit.text.remote_file import RemoteFile, is_url, storage_of
from threefold.errors import StorageError, UserError
from threefold.storage import ObjectInfo
from threefold.storage.repeating import open_repeating

LINE_KINDS = {".jsonl": "jsonl", ".txt": "txt"}
COLUMN_KINDS = {".parquet": "parquet", ".arrow": "arrow"}  # compressed inside, never as a whole
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
MIN_ITEM_BYTES, MAX_ITEM_BYTES = 4 << 20, 256 << 20
_ITEMS_OF_A_SMALL_INPUT = 96  # at least half as many: two workers killed lose less than 5 % of it
_LINE_READ_BYTES, _REMOTE_BUFFER_BYTES = 64 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class InputFile:
    """One text file: its path or URL, its format, compression ("" for none), size and time of change (0: unknown)."""

    path: str
    kind: str
    compression: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class FileSlice:
    """The bytes [start, stop) of a file; they begin and end at line ends where they are not the whole file.

    In parquet and Arrow files they stand for the row groups that begin in them (see columns.py).
    """

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WorkItem:
    """What one worker turns into shards at a time: whole files, or one slice of a file."""

    number: int
    slices: tuple[FileSlice, ...]


def find_inputs(arguments: Sequence[str]) -> list[InputFile]:
    """The files that these files, folders, globs and URLs of such name, sorted, each once.

    Folders are searched through and through, hidden names and links to folders left out.
    """
    paths: set[str] = set()
    remote: dict[str, ObjectInfo] = {}
    for argument in arguments:
        if is_url(argument):
            remote |= _find_remote(argument)
            continue
        named = [argument] if os.path.exists(argument) else sorted(glob.glob(argument, recursive=True))
        if not named:
            raise UserError(f"no such input: {argument}", hint=f"ls {os.path.dirname(argument) or '.'}")
        for path in named:
            if os.path.isdir(path):
                paths.update(_text_files(path))
            else:
                paths.add(os.path.normpath(path))
    if not paths and not remote:
        patterns = [f"*{suffix}[.gz|.zst]" for suffix in LINE_KINDS] + [f"*{suffix}" for suffix in COLUMN_KINDS]
        hint = f"name files like {' '.join(patterns)}"
        raise UserError(f"the input is empty: no file in {' '.join(arguments)}", hint=hint)
    files = [_describe(path) for path in paths] + [_describe_remote(url, info) for url, info in remote.items()]
    return sorted(files, key=lambda file: file.path)


def default_item_bytes(files: Sequence[InputFile]) -> int:
    """256 MiB of input a work item; less for small inputs, so that there is something to share among workers."""
    share = sum(file.size_bytes for file in files) // _ITEMS_OF_A_SMALL_INPUT
    return min(MAX_ITEM_BYTES, max(MIN_ITEM_BYTES, 1 << share.bit_length()))


def cut(files: Iterable[InputFile], item_bytes: int, *, split_txt: bool) -> Iterator[WorkItem]:
    """Work items of about `item_bytes` on disk; plain jsonl (and txt of one document a line) is split at line ends.

    A parquet or Arrow file is split too; an item is empty where none of its row groups begins in its part.
    """
    number, group, group_bytes = 0, list[FileSlice](), 0
    for file in files:
        splits = not file.compression and (file.kind != "txt" or split_txt) and file.size_bytes > item_bytes
        if group and (splits or group_bytes + file.size_bytes > item_bytes):
            yield WorkItem(number, tuple(group))
            number, group, group_bytes = number + 1, [], 0
        if splits:
            for part in _split(file, item_bytes):
                yield WorkItem(number, (part,))
                number += 1
        else:
            group.append(FileSlice(file, 0, file.size_bytes))
            group_bytes += file.size_bytes
    if group:
        yield WorkItem(number, tuple(group))


def _split(file: InputFile, item_bytes: int) -> Iterator[FileSlice]:
    """Parts of about equal size that begin where a line begins, in files of columns anywhere."""
    num_parts = -(-file.size_bytes // item_bytes)
    start = 0
    with open_file(file.path) as stream:
        for part in range(1, num_parts + 1):
            stop = file.size_bytes * part // num_parts
            if part < num_parts and is_lines(file):
                stop = _line_begin(stream, stop, file.size_bytes)
            if stop > start:
                yield FileSlice(file, start, stop)
                start = stop


def is_lines(file: InputFile) -> bool:
    """Whether a file is text of lines, not a table of columns."""
    return file.kind in LINE_KINDS.values()


def _line_begin(stream: BinaryIO, offset: int, size_bytes: int) -> int:
    """The first begin of a line at or after an offset, in a file of this size."""
    stream.seek(offset - 1)
    at = offset - 1
    while block := stream.read(_LINE_READ_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        at += len(block)
    return size_bytes


def open_file(path: str, *, stop: int | None = None) -> BinaryIO:
    """Open a file or URL for reading, of which nothing at or after `stop` is needed; StorageError where that fails."""
    if is_url(path):
        return io.BufferedReader(RemoteFile(path, stop=stop), _REMOTE_BUFFER_BYTES)
    try:
        return open(path, "rb")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", hint=f"ls -l {path}") from error


def _find_remote(url: str) -> dict[str, ObjectInfo]:
    """The objects that a URL names: itself, all text files below it, or those that match its glob."""
    if not glob.has_magic(url):
        storage, name = storage_of(url)
        if name and (info := storage.info(name)):
            return {url: info}
        folder = url.rstrip("/")
        keys = {info.key: info for info in open_repeating(folder).list() if _format(info.key)}
    else:
        folder = url[: re.search(r"[*?[]", url).start()].rpartition("/")[0]  # type: ignore[union-attr]  # has_magic
        matches = _matcher(url[len(folder) + 1 :])
        keys = {info.key: info for info in open_repeating(folder).list() if matches(info.key)}
    found = {f"{folder}/{key}": info for key, info in keys.items() if not _is_hidden(key)}
    if not found:
        raise UserError(f"no such input: {url}", hint="check the URL; a folder must hold text files")
    return found


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a key matches a glob, in which `*` stays within a folder and `**` does not."""
    from fsspec.utils import glob_translate

    try:
        compiled = re.compile(glob_translate(pattern))
    except ValueError as error:
        raise UserError(f"{pattern} is no glob: {error}", hint="write ** alone between slashes") from None
    return lambda key: compiled.match(key) is not None


def _is_hidden(key: str) -> bool:
    return key.startswith(".") or "/." in key


def _text_files(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not _is_hidden(name) and _format(name):
                yield os.path.normpath(os.path.join(parent, name))


def _refuse(error: OSError) -> None:
    """A folder that cannot be listed is a fault: its files would be missing in silence."""
    raise StorageError(f"cannot read {error.filename}: {error.strerror}", hint=f"ls -ld {error.filename}") from error


def _describe(path: str) -> InputFile:
    kind, compression = _known_format(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", hint=f"ls -l {path}") from error
    return InputFile(path, kind, compression, status.st_size, status.st_mtime_ns)


def _describe_remote(url: str, info: ObjectInfo) -> InputFile:
    return InputFile(url, *_known_format(url), info.size_bytes, int(info.modified_s * 1e9))


def _known_format(path: str) -> tuple[str, str]:
    """Kind and compression of a file that was named; UserError where they cannot be read."""
    found = _format(path)
    if found is None:
        raise UserError(
            f"{path} is neither {' or '.join(LINE_KINDS)}, plain or compressed as .gz or .zst, nor an uncompressed "
            f"{' or '.join(COLUMN_KINDS)}",
            hint=f"mv {path} {path}.jsonl, if that is what it holds",
        )
    if found[0] in COLUMN_KINDS.values() and find_spec("pyarrow") is None:
        raise UserError(f"{path}: reading {found[0]} takes pyarrow, which is not installed", hint="pip install pyarrow")
    if path.encode(errors="replace").decode() != path:
        raise UserError(f"the name {path!r} is not UTF-8", hint="rename the file")
    return found


def _format(name: str) -> tuple[str, str] | None:
    """Kind and compression that a file's name tells."""
    stem, suffix = os.path.splitext(name)
    compression = COMPRESSIONS.get(suffix, "")
    kind = LINE_KINDS.get(os.path.splitext(stem)[1] if compression else suffix) or COLUMN_KINDS.get(suffix)
    return (kind, compression) if kind else None
