"""Find, load and bind a kit's native library; ctypes releases the GIL around every call into it."""

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threefold.errors import UserError
from threefold.installing import repair

HEADERS = {"datakit": "datakit/datakit.h", "ckptkit": "ckptkit/ckptkit.h", "trainer": "ops/ops.h"}  # in csrc/
Prototypes = Mapping[str, tuple[Any, ...]]  # by C name: the ctypes type of the result (None: void), then the arguments
# the types that prototypes are written in; a pointer is an address, whatever it points to
POINTER, TEXT, DOUBLE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double
INT, INT64, UINT64 = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64


def load_library(kit: str) -> ctypes.CDLL:
    """Load `_native.so` of a kit ("datakit", "ckptkit", "trainer"); UserError says how to build it.

    In a clone it must be one of the header in csrc/: after a change of that, calls of an older library would crash.
    """
    path = library_path(kit)
    library = ctypes.CDLL(str(path))
    header = _package(kit).parent / "csrc" / HEADERS[kit]
    if header.exists() and _digest(header) != _built_of(library):
        raise UserError(f"{kit}: {path} was built of another {header}", hint=rebuild())
    return library


def rebuild() -> str:
    """Return the command that builds a native library again."""
    return f"{repair()}    # in a clone: make native"


def library_path(kit: str) -> Path:
    """Return where a kit's native library is; UserError if it is not built."""
    path = _package(kit) / "_native.so"
    if path.exists():
        return path
    installed = importlib.util.find_spec(f"{kit}._native")  # an editable install keeps it in site-packages
    if installed is None or installed.origin is None:
        raise UserError(f"{kit}: its native library is not built", hint=rebuild())
    return Path(installed.origin)


def _package(kit: str) -> Path:
    """Return the folder of a kit."""
    spec = importlib.util.find_spec(kit)
    assert spec is not None, f"{kit} is a package of this distribution"
    assert spec.origin is not None, f"{kit} is a package with a file of its own"
    return Path(spec.origin).parent


def _digest(header: Path) -> str:
    from hashlib import sha256  # takes 3 ms, and an installed wheel has no csrc/

    return sha256(header.read_bytes()).hexdigest()


def _built_of(library: ctypes.CDLL) -> str | None:
    if not hasattr(library, "threefold_header"):
        return None
    return str(bind(library, {"threefold_header": (TEXT,)}).threefold_header(), "ascii")


def bind(library: ctypes.CDLL, prototypes: Prototypes) -> ctypes.CDLL:
    """Give functions of a library their types; return the library.

    A test compares the tables with the prototypes in csrc/.
    """
    for name, (result, *arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
