"""Finds and loads a kit's native library; ctypes releases the GIL around every call into it."""

import ctypes
import importlib.util
from pathlib import Path

ABI_VERSION = 1


def load_library(kit: str) -> ctypes.CDLL:
    """Load `_native.so` of a kit ("datakit", "ckptkit", "trainer"); ImportError says how to build it."""
    spec = importlib.util.find_spec(kit)
    assert spec is not None, f"{kit} is a package of this distribution"
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / "_native.so"
        if path.exists():
            return _checked(kit, str(path))
    installed = importlib.util.find_spec(f"{kit}._native")  # an editable install keeps it in site-packages
    if installed is None or installed.origin is None:
        raise ImportError(f"{kit}: its native library is not built; run: pip install -e .")
    return _checked(kit, installed.origin)


def _checked(kit: str, path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    version = library.threefold_abi_version()
    if version != ABI_VERSION:
        raise ImportError(f"{kit}: {path} speaks ABI {version}, this code {ABI_VERSION}; run: pip install -e .")
    return library
