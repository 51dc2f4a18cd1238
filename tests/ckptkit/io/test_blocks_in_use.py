"""What other programs and other threads do to files that are read meanwhile: an error that names them, or nothing."""

import ctypes
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.io.blocks import BlockReader, checksums, library
from tests.ckptkit.support.saves import ROOT
from threefold.errors import StorageError

# what another program cuts short while it is mapped ends nothing but the call that reads it
CUT_SHORT = """
import os, sys
from pathlib import Path
import numpy as np
from ckptkit.io.blocks import BlockWriter, checksums, copy_many
from threefold.errors import StorageError
from threefold.storage.new_file import NewFile

path = Path(sys.argv[1]) / "mapped"
path.write_bytes(bytes(3 << 20))
source = np.memmap(path, np.uint8, "r")
os.truncate(path, 1 << 20)
target = np.empty_like(source)

def write():
    with BlockWriter(NewFile(path.parent, "written"), source.nbytes) as writer:
        writer.write(0, [(source.ctypes.data, 100), (source.ctypes.data + 100, source.nbytes - 100)])

for call in (
    lambda: copy_many([(source.ctypes.data, target.ctypes.data, source.nbytes)]),
    lambda: checksums(source),
    write,
):
    try:
        call()
    except StorageError as error:
        print(error.message)
copy_many([(source.ctypes.data, target.ctypes.data, 1 << 20)])
print(sorted(os.listdir(path.parent)))
"""


def test_memory_of_a_file_that_was_cut_short_is_an_error_that_names_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CUT_SHORT, tmp_path], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    *said, left = done.stdout.splitlines()
    assert len(said) == 3
    for line in said:
        assert re.fullmatch(
            f"{tmp_path}/mapped was cut short .* has 1048576 bytes now, and byte \\d+ is asked for", line
        )
    assert left == "['mapped']"


def test_a_reader_that_is_closed_while_others_read_is_freed_by_the_last_of_them(tmp_path: Path) -> None:
    data = np.arange(1 << 19, dtype=np.int64).view(np.uint8)
    data.tofile(tmp_path / "data")
    reader = BlockReader(tmp_path / "data", data.nbytes, checksums(data))
    rows = [(0, data.nbytes, np.empty_like(data).ctypes.data)]
    real, inside, leave = library().ck_reader_read, threading.Event(), threading.Event()

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(library(), name)

        @staticmethod
        def ck_reader_read(handle: ctypes.c_void_p, *rest: Any) -> int:
            inside.set()
            leave.wait(10)
            assert handle, "the handle of a read that runs stays"
            return real(handle, *rest)

    target = np.empty_like(data)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr("ckptkit.io.blocks.library", Library)
        reading = pool.submit(reader.read, [(0, data.nbytes, target.ctypes.data)])
        assert inside.wait(10)
        reader.close()
        leave.set()
        reading.result()
    assert (target == data).all()
    assert not reader._handle
    with pytest.raises(StorageError, match="data is closed, and was to be read"):
        reader.read(rows)
