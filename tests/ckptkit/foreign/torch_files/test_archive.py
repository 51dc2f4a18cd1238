"""Zips of torch.save: what is not laid out as it writes them is one error, before anything is unpacked."""

import io
import zipfile

import pytest

from ckptkit.foreign.torch_files.archive import read_archive
from ckptkit.foreign.torch_files.pickle_writer import pickled
from threefold.errors import CheckFailed, UserError
from threefold.storage.memory import MemoryStorage


def stored(kind: int, description: bytes) -> MemoryStorage:
    """A file of torch.save whose description is compressed in some way."""
    content, storage = io.BytesIO(), MemoryStorage()
    with zipfile.ZipFile(content, "w", kind) as archive:
        archive.writestr("archive/data.pkl", description)
    storage.write("file.pt", content.getvalue())
    return storage


def test_a_description_that_is_stored_as_it_is_is_read() -> None:
    assert read_archive(stored(zipfile.ZIP_STORED, pickled({"lr": [1, None]})), "file.pt") == {"lr": [1, None]}


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compressed_description_is_refused_unread(kind: int) -> None:
    """A quarter of a GiB of opcodes, each a NONE that is dropped again, is 250 KB here, and minutes of work."""
    storage = stored(kind, b"\x80\x02" + b"N0" * (1 << 18) + b"N.")
    with pytest.raises(UserError, match="is compressed"):
        read_archive(storage, "file.pt")
    data = bytearray(storage.read("file.pt"))
    data[60:70] = b"\xff" * 10
    storage.write("file.pt", bytes(data))
    with pytest.raises(UserError, match="is compressed"):
        read_archive(storage, "file.pt")


def test_a_zip_that_ends_early_is_damage() -> None:
    storage = stored(zipfile.ZIP_STORED, pickled([1] * 100))
    storage.write("file.pt", storage.read("file.pt")[:-30])
    with pytest.raises(CheckFailed, match="is not a file as torch"):
        read_archive(storage, "file.pt")
