"""Inputs: the text files that a command names (files, folders, globs, URLs, pipes), in one sorted order.

They are cut into work items, which group small files and split large ones at line ends, parquet and Arrow files between
row groups. The cut depends on the files alone, never on workers, so that the same command makes the same bytes with any
number of them. What is behind URLs is known from listings; only large files of lines are looked into to split them.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

from datakit.files.durable import reading
from datakit.files.remote_file import RemoteFile, is_url, storage_of
from datakit.text.finding import find
from datakit.text.folders import Faults
from datakit.text.formats import COLUMN_KINDS, NAMES_HINT, PIPE_FORMAT, is_lines, known_format
from datakit.text.spool import STANDARD_INPUT, Spool, is_pipe
from threefold.errors import StorageError, UserError, listed, quoted
from threefold.packages import require
from threefold.storage import ObjectInfo

MIN_ITEM_BYTES, MAX_ITEM_BYTES = 4 << 20, 256 << 20
_ITEMS_OF_A_SMALL_INPUT = 96  # at least half as many: two workers killed lose less than 5 % of it
_PROBE_BYTES, _MAX_PROBE_BYTES = 16 << 10, 4 << 20
_NUM_PROBES, _PROBE_BATCH = 64, 4096
_REMOTE_BUFFER_BYTES = 1 << 20
PIPED_HINT = "COMMAND > NEW.jsonl, and name that file in place of the pipe"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One text file: its path or URL, format, compression ("" for none) and size, and what shows that it changed.

    That is `etag`, a server's or the digest of what came through a pipe, or else the time of change (0: unknown).
    `spooled` is where what came through a pipe can be opened.
    """

    path: str
    kind: str
    compression: str
    size_bytes: int
    modified_ns: int
    etag: str = ""
    spooled: str = field(default="", compare=False)

    def hint(self, command: str) -> str:
        """Return a command on the file as a hint; what came through a pipe has to be in a file for that."""
        return PIPED_HINT if self.spooled else f"{command} {quoted(self.path)}"

    @property
    def shown(self) -> str:
        """How messages name it."""
        return "standard input" if self.path == STANDARD_INPUT else self.path

    @property
    def is_known_by_time(self) -> bool:
        """Whether only its time shows that a local file changed, so that its content has to be digested as well."""
        return not self.etag and not is_url(self.path)

    def open(self, *, stop: int | None = None) -> BinaryIO:
        """Open the file, of which nothing at or after `stop` is needed; StorageError if that fails."""
        return open_file(self.spooled or self.path, stop=stop, size_bytes=self.size_bytes)

    def read_range(self, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop), fewer where the file ends before; with one request, if it is behind a URL."""
        if is_url(self.path):
            storage, key = storage_of(self.path)
            return bytes(storage.read_ranges(key, [(start, stop)])[0])
        with self.open() as file:
            file.seek(start)
            return file.read(stop - start)

    def differs_from(self, other: "InputFile") -> bool:
        """Return whether size, ETag or time of change differ; what one of the two does not know does not count."""
        if self.size_bytes != other.size_bytes or (self.etag and other.etag):
            return (self.size_bytes, self.etag) != (other.size_bytes, other.etag)
        return 0 not in (self.modified_ns, other.modified_ns) and self.modified_ns != other.modified_ns

    def require_unchanged(self) -> None:
        """Raise UserError if the file is no longer the one that was found."""
        if self.spooled:
            return
        if is_url(self.path):
            storage, key = storage_of(self.path)
            info = storage.info(key)
            now = None if info is None else _describe_object(self.path, info)
        else:
            now = _describe(self.path)
        if now is None or self.differs_from(now):
            raise UserError(
                f"{self.path} changed while it was read", hint="rerun the same command when the input is complete"
            )


@dataclass(frozen=True, slots=True)
class FileSlice:
    """The bytes [start, stop) of a file; they begin and end at line ends where they are not the whole file.

    In parquet and Arrow files they mean the row groups that begin in them (see columns.py).
    """

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WorkItem:
    """What one worker turns into shards at a time: whole files, or one slice of a file."""

    number: int
    slices: tuple[FileSlice, ...]

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "WorkItem":
        """Return the item that JSON was made of; KeyError or TypeError if that is damaged."""
        slices = (FileSlice(InputFile(**part["file"]), part["start"], part["stop"]) for part in raw["slices"])
        return cls(raw["number"], tuple(slices))


def find_inputs(
    arguments: Sequence[str],
    spool: Spool | None = None,
    report: Callable[[str], None] = lambda _: None,
    *,
    but: Sequence[str] = (),
    skip_unreadable: bool = False,
) -> list[InputFile]:
    """Return the files that these files, folders, globs, URLs and pipes name, sorted, each once.

    All that name nothing, or cannot be read, are in one UserError; with `skip_unreadable` they are left out, and
    reported.

    `report` takes one line on what folders and globs hold that is not read. `spool` copies pipes, which are refused
    without one; "-" is standard input. `but` are files and folders that a search leaves out: a command's own.
    """
    named = find(arguments, but)
    notice = named.notice()
    for line in filter(None, (named.once_notice(), notice)):
        report(line)
    descriptions = [partial(_describe, path, opens=True) for path in sorted(named.files)]
    descriptions += [partial(_describe_object, url, info) for url, info in named.objects.items()]
    files = list(_readable(descriptions, named.faults))
    _treat(named.faults, report if skip_unreadable else None)
    files += [_copy(path, spool) for path in sorted(named.pipes)]
    if not files:
        if both := {*map(os.path.realpath, arguments)} & {*map(os.path.realpath, but)}:
            raise UserError(f"{min(both)} is named as input and as output", hint="choose another --output")
        more = f" ({notice})" if notice else ""
        raise UserError(f"the input is empty: no text file in {' '.join(arguments)}{more}", hint=NAMES_HINT)
    for file in {file.kind: file for file in files if file.kind in COLUMN_KINDS.values()}.values():
        require("pyarrow", f"{file.path}: reading {file.kind}")
    return sorted(files, key=lambda file: file.path)


def readable_inputs(
    arguments: Sequence[str], report: Callable[[str], None], *, but: Sequence[str] = ()
) -> Sequence[str]:
    """Return the pipes, and the paths and URLs of all that can be read of what else is named; report the others."""
    pipes = [argument for argument in arguments if is_pipe(argument)]
    others = [argument for argument in arguments if argument not in pipes]
    files = find_inputs(others, report=report, but=but, skip_unreadable=True) if others else []
    return [*pipes, *(file.path for file in files)]


def _readable(descriptions: Iterable[Callable[[], InputFile]], faults: Faults) -> Iterator[InputFile]:
    """Yield the files that can be described; `faults` takes what is wrong with the others."""
    for describe in descriptions:
        try:
            yield describe()
        except UserError as fault:
            faults.append(fault)


def _treat(faults: Faults, report: Callable[[str], None] | None) -> None:
    """Report inputs that are left out, or raise one UserError for all of them if there is nothing to report to."""
    if not faults:
        return
    number, messages = f"{len(faults):,} input{'s' * (len(faults) > 1)}", listed([fault.message for fault in faults])
    if report:
        report(f"left out {number} that cannot be read:{messages}")
        return
    if len(faults) == 1:
        [fault] = faults
        raise type(fault)(fault.message, hint=f"{fault.hint}, or --skip-unreadable to go on without it") from fault
    kind = StorageError if any(isinstance(fault, StorageError) for fault in faults) else UserError
    raise kind(f"{number} cannot be read:{messages}", hint="--skip-unreadable to go on without them")


def default_item_bytes(files: Sequence[InputFile]) -> int:
    """256 MiB of input a work item; less for small inputs, so that there is something to share among workers."""
    share = sum(file.size_bytes for file in files) // _ITEMS_OF_A_SMALL_INPUT
    return min(MAX_ITEM_BYTES, max(MIN_ITEM_BYTES, 1 << share.bit_length()))


def cut(files: Sequence[InputFile], item_bytes: int, *, split_txt: bool) -> Iterator[WorkItem]:
    """Return work items of about `item_bytes` on disk; plain jsonl (and txt of lines) is split at line ends.

    A parquet or Arrow file is split too; an item is empty if none of its row groups begins in its part.
    """
    splits = [
        not file.compression and (file.kind != "txt" or split_txt) and file.size_bytes > item_bytes for file in files
    ]
    line_begins = _line_begins(
        (file, offset)
        for file, is_split in zip(files, splits)
        if is_split and is_lines(file.kind)
        for offset in _inner_offsets(file, item_bytes)
    )
    number, group, group_bytes = 0, list[FileSlice](), 0
    for file, is_split in zip(files, splits):
        if group and (is_split or group_bytes + file.size_bytes > item_bytes):
            yield WorkItem(number, tuple(group))
            number, group, group_bytes = number + 1, [], 0
        if is_split:
            for part in _split(file, item_bytes, line_begins):
                yield WorkItem(number, (part,))
                number += 1
        else:
            group.append(FileSlice(file, 0, file.size_bytes))
            group_bytes += file.size_bytes
    if group:
        yield WorkItem(number, tuple(group))


def _inner_offsets(file: InputFile, item_bytes: int) -> list[int]:
    """Return where the parts of a file begin, but for the first, if all are equally large."""
    num_parts = -(-file.size_bytes // item_bytes)
    return [file.size_bytes * part // num_parts for part in range(1, num_parts)]


def _split(file: InputFile, item_bytes: int, line_begins: Iterator[int]) -> Iterator[FileSlice]:
    """Return parts that begin where a line begins, in files of columns anywhere; none is without bytes."""
    offsets = _inner_offsets(file, item_bytes)
    stops = islice(line_begins, len(offsets)) if is_lines(file.kind) else offsets
    start = 0
    for stop in (*stops, file.size_bytes):
        if stop > start:
            yield FileSlice(file, start, stop)
            start = stop


def _line_begins(points: Iterable[tuple[InputFile, int]]) -> Iterator[int]:
    """Return for each file and offset the first begin of a line at or after it; many are looked for at once."""
    points = iter(points)
    with ThreadPoolExecutor(_NUM_PROBES) as threads:
        while batch := list(islice(points, _PROBE_BATCH)):
            yield from threads.map(_line_begin, batch)


def _line_begin(point: tuple[InputFile, int]) -> int:
    file, offset = point
    at, num_bytes = offset - 1, _PROBE_BYTES
    while at < file.size_bytes:
        block = file.read_range(at, min(at + num_bytes, file.size_bytes))
        newline = block.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        if not block:
            raise UserError(f"{file.path} became shorter while it was read", hint="rerun when it is complete")
        at, num_bytes = at + len(block), min(8 * num_bytes, _MAX_PROBE_BYTES)
    return file.size_bytes


def open_file(path: str, *, stop: int | None = None, size_bytes: int | None = None) -> BinaryIO:
    """Open a file or URL for reading, of which nothing at or after `stop` is needed; StorageError if that fails.

    An object whose size is known is not looked up before it is read.
    """
    if is_url(path):
        return io.BufferedReader(RemoteFile(path, stop=stop, size_bytes=size_bytes), _REMOTE_BUFFER_BYTES)
    with reading(path):
        return open(path, "rb")


def _describe(path: str, *, opens: bool = False) -> InputFile:
    """Return a file as an input; it is opened for that if asked, as only so is it known whether it may be read."""
    kind, compression = known_format(path)
    with reading(path):
        if opens:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        status = os.stat(path)
    return InputFile(path, kind, compression, status.st_size, status.st_mtime_ns)


def _describe_object(url: str, info: ObjectInfo) -> InputFile:
    """Return an object as an input; its time, which listings round otherwise, counts only if it has no ETag."""
    modified_ns = 0 if info.etag else int(info.modified_s * 1e9)
    return InputFile(url, *known_format(url), info.size_bytes, modified_ns, info.etag)


def _copy(path: str, spool: Spool | None) -> InputFile:
    if spool is None:
        raise UserError(
            f"{path} is a pipe or a device, and only files are read here", hint=f"cat {quoted(path)} > NEW.jsonl"
        )
    kind, compression = known_format(path, PIPE_FORMAT)
    copy = spool.copy(path)
    return InputFile(path, kind, compression, copy.size_bytes, 0, f"xxh3-{copy.xxh3_64}", copy.path)
