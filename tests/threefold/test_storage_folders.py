"""Links below a local storage: read through, never written or deleted through."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from threefold.errors import StorageError
from threefold.storage import is_local, local_root
from threefold.storage.dry_run import DryRunStorage
from threefold.storage.folders import Folder, linked_folder
from threefold.storage.local import LocalStorage, keep_file
from threefold.storage.memory import MemoryStorage

Act = Callable[[LocalStorage], None]
KEY = "step/attempt/file"
ACTS: dict[str, Act] = {
    "write": lambda storage: storage.write(KEY, b"new"),
    "write once": lambda storage: storage.write(KEY, b"new", if_absent=True),
    "copy": lambda storage: storage.copy("other", KEY),
    "keep": lambda storage: keep_file(storage, KEY),
    "make folders": lambda storage: Folder(storage.folder, "step/attempt", make=True).close(),
    "delete": lambda storage: storage.delete([KEY]),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Somebody else's files, with all names that are below the link."""
    for name in ("step/attempt/file", "attempt/file", "file"):
        path = tmp_path / "outside" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"precious")
    return tmp_path / "outside"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dangles", [False, True])
@pytest.mark.parametrize("link", ["step", "step/attempt", "step/attempt/file"])
@pytest.mark.parametrize("act", ACTS)
def test_nothing_is_written_or_deleted_through_a_link(
    tmp_path: Path, outside: Path, act: str, link: str, dangles: bool
) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.write("other", b"other")
    path, at = tmp_path / "run" / link, {"step": "step", "step/attempt": "attempt", "step/attempt/file": "file"}[link]
    path.parent.mkdir(parents=True, exist_ok=True)
    target = tmp_path / "nowhere" / at if dangles else outside / at
    path.symlink_to(target)
    before = files(outside)
    if (act, path.name) in (("delete", "file"), ("make folders", "file")):
        ACTS[act](storage)
        assert path.is_symlink() is (act == "make folders"), "of a file that is a link the link goes"
    else:
        with pytest.raises(StorageError, match=f"{path} is a link") as raised:
            ACTS[act](storage)
        assert raised.value.hint
        assert str(path) in raised.value.hint
        assert os.readlink(path) == str(target)
    assert files(outside) == before
    assert not (tmp_path / "nowhere").exists()
    assert [each.name for each in (tmp_path / "run").rglob(".*")] == [], "no temporary is left"


def test_a_storage_may_be_a_link_itself_and_reads_through_others(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "disk/real").mkdir(parents=True)
    (tmp_path / "way").symlink_to("disk")
    (tmp_path / "run").symlink_to("way/real")
    storage = LocalStorage(tmp_path / "run")
    storage.write("step/attempt/file", b"mine", if_absent=True)
    assert (tmp_path / "disk/real/step/attempt/file").read_bytes() == b"mine"
    storage.delete(["step/attempt/file"])
    assert list((tmp_path / "disk/real").iterdir()) == []
    (tmp_path / "run/step").symlink_to(outside / "step")
    assert storage.read("step/attempt/file") == b"precious"
    assert [item.key for item in storage.list()] == ["step/attempt/file"]
    assert linked_folder(storage, "step/attempt") == "step"
    storage.delete(["step"])
    assert list((tmp_path / "disk/real").iterdir()) == []
    assert linked_folder(storage, "step/attempt") is None
    assert len(files(outside)) == 3


def test_a_link_in_place_of_a_temporary_is_not_written_through(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threefold.storage.new_file.temporary_name", lambda name: f".{name}.tmp")
    (tmp_path / ".key.tmp").symlink_to(outside / "file")
    with pytest.raises(StorageError, match=r"cannot write .*/key: File exists"):
        LocalStorage(tmp_path).write("key", b"new")
    assert (outside / "file").read_bytes() == b"precious"
    assert (tmp_path / ".key.tmp").is_symlink()


def test_a_storage_on_a_local_disk_says_so(tmp_path: Path) -> None:
    local = LocalStorage(tmp_path / "run")
    assert local_root(local) == tmp_path / "run"
    storages = local, MemoryStorage(), DryRunStorage(local)  # the last hides its files
    assert [is_local(storage) for storage in storages] == [True, False, False]


def test_whether_a_storage_is_local_is_asked_in_one_place() -> None:
    root = Path(__file__).parents[2]
    kits = ("datakit", "ckptkit", "threefold", "trainer")
    files = [path for kit in kits for path in (root / kit).rglob("*.py") if 'local_path("any")' in path.read_text()]
    assert [str(path.relative_to(root)) for path in files] == ["threefold/storage/folders.py"]
