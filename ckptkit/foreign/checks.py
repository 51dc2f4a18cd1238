"""What foreign data says, checked and shown: sizes, names of files; damage is a CheckFailed.

A message shows few characters of it, whatever the data is; no object of it is printed whole.
"""

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage

MAX_CHARACTERS, MAX_PARTS = 100, 3
SCALARS = (str, bytes, bool, int, float, type(None))
FETCH = "fetch the folder again"
UNSOUND = (  # what reading damaged or hostile data raises: a closed list, so that a full disk or an interrupt is itself
    zipfile.BadZipFile, struct.error, EOFError, KeyError, IndexError, TypeError, ValueError, AttributeError,
    OverflowError, NotImplementedError, RuntimeError,
)  # fmt: skip


@contextmanager
def checked(fault: str, hint: str | None = None) -> Iterator[None]:
    """Raise CheckFailed with a fault, and what it comes of, for whatever data that is not sound leads to."""
    try:
        yield
    except UserError:
        raise
    except UNSOUND as error:
        raise CheckFailed(f"{fault}: {words_of(error)}", hint=hint) from None


def size_of(storage: Storage, key: str, max_bytes: int | None = None, *, hint: str | None = FETCH) -> int:
    """Return the size of a file; CheckFailed if it is missing, with a hint, or larger than such a file may be."""
    info = storage.info(key)
    return checked_size(f"{storage.url}/{key}", None if info is None else info.size_bytes, max_bytes, hint=hint)


def checked_size(where: str, size_bytes: int | None, max_bytes: int | None, *, hint: str | None = FETCH) -> int:
    """Return a size that was looked up, None for a file that is missing; CheckFailed as of `size_of`."""
    if size_bytes is None:
        raise CheckFailed(f"{where} is missing", hint=hint)
    if max_bytes is not None and size_bytes > max_bytes:
        raise CheckFailed(f"{where} has {size_bytes:,} bytes, more than such a file may have")
    return size_bytes


def row_of_sizes(values: Any) -> tuple[int, ...]:
    """Return sizes or places of dims; ValueError for anything else."""
    if not isinstance(values, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in values):
        raise ValueError(f"{shown(values)} is not a row of sizes")
    return tuple(values)


def inner_file(name: Any) -> str:
    """Return the name of a file of the folder; ValueError for anything else, and for what leads out of it."""
    if not isinstance(name, str) or not all(word not in ("", ".", "..") for word in name.split("/")):
        raise ValueError(f"{shown(name)} is not a file of the folder")
    return name


def shown(value: Any) -> str:
    """Return a value in words: a short number, the beginning of a text, else what it is one of."""
    match value:
        case None | bool() | float():
            return repr(value)
        case int():
            return repr(value) if value.bit_length() <= 64 else f"a number of {value.bit_length():,} bits"
        case str() | bytes():
            rest = f" and {len(value) - MAX_CHARACTERS:,} more" if len(value) > MAX_CHARACTERS else ""
            return f"{(value if isinstance(value, bytes) else str(value))[:MAX_CHARACTERS]!r}{rest}"
        case object(name=str(name)):
            return shown(str(name))
        case list() | tuple() if len(value) <= MAX_PARTS and all(type(part) in SCALARS for part in value):
            return f"[{', '.join(map(shown, value))}]"
        case list() | tuple() | dict() | set() | frozenset():
            return f"a {type(value).__name__} of {len(value):,}"
        case _:
            return f"a {type(value).__name__}"


def words_of(error: BaseException) -> str:
    """Return what an exception says that foreign data led to, in few characters."""
    match error:
        case KeyError(args=[key, *_]):
            return f"it has no {shown(key)}"
        case EOFError():
            return "it ends too early"
    text = str(error)
    return f"{text[:MAX_CHARACTERS]}..." if len(text) > MAX_CHARACTERS + 3 else text or type(error).__name__
