"""A granule that came with other bytes is read once more on the file system of a server, and only there."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptkit.io import data_files
from ckptkit.io.blocks import GRANULE_BYTES, BlockReader, DamagedGranule, checksums
from ckptkit.io.data_files import open_reader
from tests.ckptkit.support.saves import ROOT, strace
from threefold.storage import open_storage

SIZE = 3 * GRANULE_BYTES + 100
READ = """
import sys
import numpy as np
from ckptkit.io.blocks import BlockReader, checksums
path, direct, again = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
content = np.zeros(int(sys.argv[4]), np.uint8)
target = np.ones_like(content)
reader = BlockReader(path, content.nbytes, checksums(content), direct=direct, again=again)
try:
    reader.read([(0, content.nbytes, target.ctypes.data)], num_threads=1)
    print("equal" if (target == content).all() else "other", reader.num_differed)
except Exception as error:
    print(type(error).__name__)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(SIZE))
    return path


@pytest.mark.parametrize("direct", [0, 1], ids=["buffered", "direct"])
@pytest.mark.parametrize(("again", "message"), [(1, "equal 1"), (0, "DamagedGranule")], ids=["server", "disk"])
def test_a_read_that_returned_a_flipped_bit(file: Path, direct: int, again: int, message: str) -> None:
    command = [*strace("pread64:poke_exit=@arg2=04:when=1"), "-P", str(file), sys.executable, "-c", READ, str(file)]
    words = [*command, str(direct), str(again), str(SIZE)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"this strace changes no results: {done.stderr}")
    assert done.stdout.strip() == message


def test_what_the_disk_holds_is_damage_at_the_second_look_too(file: Path) -> None:
    content = np.fromfile(file, np.uint8)
    with file.open("r+b") as stream:
        stream.seek(2 * GRANULE_BYTES + 5)
        stream.write(b"\1")
    target = np.ones_like(content)
    for num_threads in (1, 4):
        reader = BlockReader(file, SIZE, checksums(content), again=True)
        with pytest.raises(DamagedGranule) as caught:
            reader.read([(0, SIZE, target.ctypes.data)], num_threads=num_threads)
        assert (caught.value.granule, reader.num_differed) == (2, 0)
        reader.close()


@pytest.mark.parametrize("kind", [True, False])
def test_files_of_servers_alone_are_looked_at_again(file: Path, monkeypatch: pytest.MonkeyPatch, kind: bool) -> None:
    seen: list[bool] = []
    usual = BlockReader.__init__

    def noted(reader: BlockReader, *args: object, again: bool = False, **options: object) -> None:
        seen.append(again)
        usual(reader, *args, again=again, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(data_files, "is_remote", lambda folder: kind)
    monkeypatch.setattr(BlockReader, "__init__", noted)
    open_reader(open_storage(file.parent), file.name, os.path.getsize(file), None).close()
    assert seen == [kind]
