"""Run a program under strace, and read what it did to files, each call with its begin and its end."""

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from threefold.errors import StorageError

ACKNOWLEDGED = b"ACKNOWLEDGED "  # what a program writes on a pipe or terminal and begins so is a promise
CALLERS = b"FSYNC BY "  # what is written to /dev/null before an fsync, and who calls it: stacks/sitecustomize.py
HOST = b"HOST "  # what is written to /dev/null by a thread that plays a host from then on, and its name
STACKS = Path(__file__).with_name("stacks")
AT = re.compile(r"-?\w+<(?P<path>[^>]*)>(?P<gone>\(deleted\))?$")
TEXT = re.compile(r'"([^"]*)"(\.\.\.)?')


@dataclass(frozen=True, slots=True)
class Call:
    """A call that succeeded; `began` and `ended` are its places among the begins and ends of all.

    `kind` is create, write, extend, cut, copy, mkdir, rename, link, remove, sync, seek or say; map and symlink are not
    replayed. Paths are absolute. `is_gone` if the file that is open has no more name: `path` is the last one.
    """

    kind: str
    began: int
    ended: int
    path: str = ""
    other: str = ""  # the new name of a rename or a link, the source of a copy
    data: bytes = b""  # what is written, or acknowledged
    offset: int = -1  # of a write or a copy; -1 is where the file is
    size: int = 0  # of an extension, a cut, a copy
    is_gone: bool = False
    flags: str = ""
    by: str = ""  # who called a sync, outermost first, in a program that says so
    host: str = ""  # which host the thread plays


def record(command: Sequence[str], log: Path, *, cwd: Path, timeout_s: float = 300.0) -> list[Call]:
    """Run a program to its end; return its calls in the order of their ends, and CalledProcessError if it fails.

    A program in Python says who calls each fsync.
    """
    calls = ",".join(READERS)
    trace = ["strace", "-f", "-y", "-qq", "-xx", "-s", str(1 << 26), "-e", "signal=none", "-o", str(log)]
    subprocess.run(
        [*trace, "-e", f"trace={calls}", *command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(STACKS), os.environ.get("PYTHONPATH", "")]).strip(":")},
        check=True,
        timeout=timeout_s,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with log.open(encoding="ascii") as lines:
        return list(calls_of(lines, str(cwd)))


def calls_of(lines: Iterable[str], cwd: str) -> Iterator[Call]:
    """Return the calls of a log that succeeded, in the order of their ends."""
    begun: dict[str, tuple[str, int]] = {}
    callers, hosts = dict[str, str](), dict[str, str]()  # by thread: who calls its next fsync, and which host it plays
    for number, line in enumerate(lines):
        thread, _, text = line.rstrip("\n").partition(" ")
        text, began = text.strip(), number
        if text.endswith("<unfinished ...>"):
            begun[thread] = text.removesuffix("<unfinished ...>"), number
            continue
        if text.startswith("<... "):
            head, began = begun.pop(thread)
            text = head.rstrip() + text.partition(" resumed>")[2]
        whole, _, result = text.rpartition(" = ")
        name, _, arguments = whole.rstrip().removesuffix(")").partition("(")
        if name and not result.startswith(("-1 ", "?")):
            fields = READERS[name](arguments, result, cwd)
            if fields is None:
                continue
            if fields["kind"] == "callers":
                callers[thread] = str(fields["by"])
                continue
            if fields["kind"] == "host":
                hosts[thread] = str(fields["host"])
                continue
            if fields["kind"] == "sync":
                fields["by"] = callers.pop(thread, "")
            yield Call(began=began, ended=number, **{**fields, "host": hosts.get(thread, "")})


Fields = dict[str, object] | None


def _text(argument: str) -> bytes:
    match = TEXT.fullmatch(argument)
    if match is None or match[2]:
        raise StorageError(f"a recording holds {argument[:80]}, and not all of a string")
    return bytes.fromhex(match[1].replace("\\x", ""))


def _open(argument: str) -> dict[str, object]:
    """Return the path of an open file, and whether it has lost that name."""
    match = AT.match(argument)
    path = "" if match is None else os.fsdecode(bytes.fromhex(match["path"].replace("\\x", "")))
    return {"path": path, "is_gone": bool(match and match["gone"])}


def _name(argument: str, at: str) -> str:
    return os.path.normpath(os.path.join(at, os.fsdecode(_text(argument))))


def _at(folder: str, argument: str, cwd: str) -> str:
    return _name(argument, str(_open(folder)["path"]) or cwd)


def _creation(name: str, flags: str) -> Fields:
    makes = "O_CREAT" in flags or "O_TRUNC" in flags
    return {"kind": "create", "path": name, "flags": flags} if makes or "O_RDONLY" not in flags else None


def _opened(arguments: str, result: str, cwd: str) -> Fields:
    path, flags, *_ = arguments.split(", ")
    return _creation(_name(path, cwd), flags)


def _opened_at(arguments: str, result: str, cwd: str) -> Fields:
    folder, path, flags, *_ = arguments.split(", ")
    return _creation(_at(folder, path, cwd), flags)


def _written(arguments: str, result: str, cwd: str) -> Fields:
    file, rest = arguments.split(", ", 1)
    size = int(result.split()[0])
    data = b"".join(_text(each[0]) for each in TEXT.finditer(rest))[:size]
    if data.startswith(ACKNOWLEDGED):
        return {"kind": "say", "data": data.removeprefix(ACKNOWLEDGED).strip()}
    if data.startswith(CALLERS):
        return {"kind": "callers", "by": data.removeprefix(CALLERS).decode()}
    if data.startswith(HOST):
        return {"kind": "host", "host": data.removeprefix(HOST).decode()}
    return {"kind": "write", **_open(file), "data": data}


def _written_at(arguments: str, result: str, cwd: str) -> Fields:
    written = _written(arguments, result, cwd)
    offset = arguments.rpartition("]")[2].lstrip(", ") if "iov_base" in arguments else arguments.rsplit(", ", 1)[1]
    return None if written is None else {**written, "offset": int(offset.split(", ")[0])}


def _two(kind: str) -> Callable[[str, str, str], Fields]:
    def read(arguments: str, result: str, cwd: str) -> Fields:
        before, after = arguments.split(", ")[:2]
        return {"kind": kind, "path": _name(before, cwd), "other": _name(after, cwd)}

    return read


def _two_at(kind: str) -> Callable[[str, str, str], Fields]:
    def read(arguments: str, result: str, cwd: str) -> Fields:
        at, before, other_at, after, *flags = arguments.split(", ")
        return {"kind": kind, "path": _at(at, before, cwd), "other": _at(other_at, after, cwd), "flags": "".join(flags)}

    return read


def _one(kind: str) -> Callable[[str, str, str], Fields]:
    return lambda arguments, result, cwd: {"kind": kind, "path": _name(arguments.split(", ")[0], cwd)}


def _one_at(kind: str) -> Callable[[str, str, str], Fields]:
    def read(arguments: str, result: str, cwd: str) -> Fields:
        folder, name, *_ = arguments.split(", ")
        return {"kind": kind, "path": _at(folder, name, cwd)}

    return read


def _of_file(kind: str, size: int = -1) -> Callable[[str, str, str], Fields]:
    """Read a call on an open file; `size` is the number of its argument that is a size."""

    def read(arguments: str, result: str, cwd: str) -> Fields:
        file, *rest = arguments.split(", ")
        return {"kind": kind, **_open(file), "size": int(rest[size]) if size >= 0 else 0}

    return read


def _allocated(arguments: str, result: str, cwd: str) -> Fields:
    file, mode, offset, size = arguments.split(", ")
    if mode not in ("0", "FALLOC_FL_KEEP_SIZE"):
        raise StorageError(f"a recording holds fallocate with {mode}")
    end = int(offset) + int(size) if mode == "0" else 0
    return {"kind": "extend", **_open(file), "size": end}


def _sought(arguments: str, result: str, cwd: str) -> Fields:
    return {"kind": "seek", **_open(arguments.split(", ")[0]), "offset": int(result)}


def _copied(arguments: str, result: str, cwd: str) -> Fields:
    source, start, target, offset, *_ = arguments.split(", ")
    where = -1 if offset == "NULL" else int(offset.strip("[]").split(" ")[0])
    begin = 0 if start == "NULL" else int(start.strip("[]").split(" ")[0])
    return {
        "kind": "copy",
        **_open(target),
        "other": _open(source)["path"],
        "offset": where,
        "size": int(result),
        "flags": str(begin),
    }


def _mapped(arguments: str, result: str, cwd: str) -> Fields:
    _, _, protection, flags, file, _ = arguments.split(", ")
    if "PROT_WRITE" in protection and "MAP_SHARED" in flags and file != "-1":
        return {"kind": "map", **_open(file)}
    return None


def _made_anew(arguments: str, result: str, cwd: str) -> Fields:
    path, _ = arguments.split(", ")
    return _creation(_name(path, cwd), "O_CREAT|O_TRUNC")


def _refused(what: str) -> Callable[[str, str, str], Fields]:
    def read(arguments: str, result: str, cwd: str) -> Fields:
        raise StorageError(f"a recording holds {what}, which is not followed")

    return read


def _symlinked(arguments: str, result: str, cwd: str) -> Fields:
    target, folder, name = arguments.split(", ")
    return {"kind": "symlink", "path": _name(target, cwd), "other": _at(folder, name, cwd)}


READERS: dict[str, Callable[[str, str, str], Fields]] = {
    "open": _opened,
    "openat": _opened_at,
    "creat": _made_anew,
    "chdir": _refused("a change of folder"),
    "mkdir": _one("mkdir"),
    "mkdirat": _one_at("mkdir"),
    "write": _written,
    "writev": _written,
    "pwrite64": _written_at,
    "pwritev": _written_at,
    "pwritev2": _written_at,
    "ftruncate": _of_file("cut", 0),
    "fallocate": _allocated,
    "copy_file_range": _copied,
    "lseek": _sought,
    "rename": _two("rename"),
    "renameat": _two_at("rename"),
    "renameat2": _two_at("rename"),
    "link": _two("link"),
    "linkat": _two_at("link"),
    "symlink": _two("symlink"),
    "symlinkat": _symlinked,
    "unlink": _one("remove"),
    "unlinkat": _one_at("remove"),
    "rmdir": _one("remove"),
    "fsync": _of_file("sync"),
    "fdatasync": _of_file("sync"),
    "mmap": _mapped,
    "io_uring_setup": _refused("an io_uring"),
}
