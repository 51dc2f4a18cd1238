"""Which file systems are of other machines."""

import os
from pathlib import Path

import pytest

from datakit import TokenStore, write_store
from threefold.storage import file_systems
from threefold.storage.file_systems import is_remote
from threefold.storage.local import LocalStorage

LINE = "36 35 {device} /sub /mnt/data rw,relatime shared:1 master:2 - {kind} host:/export rw,vers=4.2\n"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("ext4", False), ("xfs", False), ("tmpfs", False), ("overlay", False), ("nfs4", True), ("fuse.sshfs", True)],
)
def test_kinds_of_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: bool) -> None:
    status = tmp_path.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    (tmp_path / "mounts").write_text("1 1 999:1 / / rw - nfs x rw\n" + LINE.format(device=device, kind=kind))
    monkeypatch.setattr(file_systems, "_MOUNTS", tmp_path / "mounts")
    assert is_remote(tmp_path) is is_remote(tmp_path / "not" / "yet") is expected
    assert (LocalStorage(tmp_path).afresh() is not None) is expected
    store = write_store(tmp_path / "store", [[1, 2, 3]], vocab_size=4)
    assert TokenStore.open(store.path, reading="auto").is_mapped is not expected
    assert TokenStore.open(store.path, reading="pread").is_mapped is False
    assert TokenStore.open(store.path, reading="mmap").is_mapped is True


def test_what_is_not_known_is_near(tmp_path: Path) -> None:
    assert not is_remote(tmp_path / "missing")
    assert not is_remote(tmp_path, tmp_path / "missing")
    (tmp_path / "mounts").write_text("no list of mounts - \n\n")
    assert not is_remote(tmp_path, tmp_path / "mounts")
