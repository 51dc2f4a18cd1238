"""Finds and loads a kit's native library; ctypes releases the GIL around every call into it."""

import ctypes
import importlib.util
from pathlib import Path

from threefold.errors import UserError

ABI_VERSION = 3
BUILD = "pip install --force-reinstall --no-deps threefold    # in a clone: make native"


def load_library(kit: str) -> ctypes.CDLL:
    """Load `_native.so` of a kit ("datakit", "ckptkit", "trainer"); UserError says how to build it."""
    spec = importlib.util.find_spec(kit)
    assert spec is not None, f"{kit} is a package of this distribution"
    assert spec.origin is not None, f"{kit} is a package with a file of its own"
    path = Path(spec.origin).with_name("_native.so")
    if path.exists():
        return _checked(kit, str(path))
    installed = importlib.util.find_spec(f"{kit}._native")  # an editable install keeps it in site-packages
    if installed is None or installed.origin is None:
        raise UserError(f"{kit}: its native library is not built", hint=BUILD)
    return _checked(kit, installed.origin)


def _checked(kit: str, path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    version = library.threefold_abi_version()
    if version != ABI_VERSION:
        raise UserError(f"{kit}: {path} speaks ABI {version}, this code {ABI_VERSION}", hint=BUILD)
    return library
