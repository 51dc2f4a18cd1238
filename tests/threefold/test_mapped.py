"""An address in a mapped file leads to the file and the byte, whatever became of the file since."""

import os
from pathlib import Path

import pytest

from datakit.format.shard import map_file
from threefold.mapped import mapped_file, unreadable

PAGE_BYTES = 4096


def mapped(path: Path) -> tuple[memoryview, int]:
    """A file of three pages, and the address that it is mapped at."""
    import numpy as np

    path.write_bytes(bytes(3 * PAGE_BYTES))
    view = map_file(path)
    return view, np.frombuffer(view, np.uint8).ctypes.data


@pytest.mark.parametrize("name", ["plain", "with blanks  and 'quotes'", "café"])
def test_the_file_behind_an_address_is_found(name: str, tmp_path: Path) -> None:
    view, address = mapped(tmp_path / name)
    assert mapped_file(address + PAGE_BYTES + 5) == (str(tmp_path / name), PAGE_BYTES + 5)
    del view


def test_memory_that_is_no_file_has_none() -> None:
    assert mapped_file(0) is None
    assert str(unreadable(0)).startswith("memory at 0x0 cannot be read")


def test_the_error_says_what_became_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shard.bin"
    view, address = mapped(path)
    assert str(unreadable(address)).startswith(f"{path} cannot be read at byte 0: its disk does not answer\nhint: ")
    os.truncate(path, 100)
    cut = f"{path} was cut short while it was read: it has 100 bytes now, and byte 8192 is asked for\nhint: restore"
    assert str(unreadable(address + 2 * PAGE_BYTES)).startswith(cut)
    path.unlink()
    assert str(unreadable(address)).startswith(f"{path}, which is mapped, cannot be read at byte 0, and is gone")
    del view
