"""Local files under real faults: full disks, killed writers, missing permission."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.durable_names import DurableNames
from threefold.errors import StorageError
from threefold.storage import folders, is_same_place, open_storage
from threefold.storage.folders import make_folders
from threefold.storage.local import LocalStorage, keep_file, local_failure, sync_name

WRITE = """
import sys
from threefold.storage import open_storage
storage = open_storage(sys.argv[1])
storage.write("step/root", b"y" * 100_000, if_absent=True)
"""


def strace(*options: str) -> list[str]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    return ["strace", "-f", "-qq", "-o", os.devnull, *options]


def test_a_full_disk_is_told_and_leaves_nothing(small_disk: Path) -> None:
    storage = open_storage(small_disk / "run")
    storage.write("old", b"kept")
    with pytest.raises(StorageError, match=r"cannot write .*run/step/big: No space left") as caught:
        storage.write("step/big", iter([b"x" * (1 << 20)] * 10))
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(f"df -h {small_disk}")
    assert caught.value.exit_code == 3
    assert [item.key for item in storage.list()] == ["old"]
    assert list((small_disk / "run/step").iterdir()) == []
    storage.write("step/small", b"x" * (1 << 20))


@pytest.mark.parametrize("point", ["write", "fsync", "linkat"])
def test_a_killed_write_is_never_listed(tmp_path: Path, point: str) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.write("other", b"x")
    storage.write("step/other", b"x")
    command = strace("-e", f"inject={point}:signal=KILL:when=1")
    done = subprocess.run([*command, sys.executable, "-c", WRITE, str(tmp_path / "run")], check=False, timeout=60)
    assert done.returncode not in (0, 1)
    assert [item.key for item in storage.list()] == ["other", "step/other"]
    assert storage.info("step/root") is None
    storage.write("step/root", b"z", if_absent=True)
    assert storage.read("step/root") == b"z"


def test_a_failing_fsync_is_an_error(tmp_path: Path) -> None:
    command = strace("-e", "inject=fsync:error=EIO")
    program = [sys.executable, "-c", WRITE, str(tmp_path / "run")]
    done = subprocess.run([*command, *program], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 1
    assert "StorageError: cannot write" in done.stderr
    assert "Input/output error" in done.stderr
    assert list(LocalStorage(tmp_path / "run").list()) == []


def test_a_file_that_cannot_be_made_durable_is_removed_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, usual, synced = LocalStorage(tmp_path), os.fsync, set[int]()

    def fail_once(descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        if not synced:
            synced.add(inode)
            os.dup(descriptor)  # so that no other file gets its number
            raise OSError(errno.EIO, "Input/output error")
        assert inode not in synced, "an fsync that failed says nothing when it is made again"
        usual(descriptor)

    storage.write("key", b"old")
    monkeypatch.setattr(os, "fsync", fail_once)
    for act in (lambda: storage.write("key", b"new"), lambda: keep_file(storage, "key")):
        synced.clear()
        with pytest.raises(StorageError, match=r"cannot write .*/key: Input/output error"):
            act()
    assert list(tmp_path.iterdir()) == [], "what could not be kept is gone"
    storage.write("key", b"new")
    keep_file(storage, "key")
    assert storage.read("key") == b"new"


def test_a_write_syncs_the_file_before_its_name_and_the_folder_after(tmp_path: Path) -> None:
    log = tmp_path / "log"
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    command = ["strace", "-f", "-qq", "-y", "-o", str(log), "-e", "trace=fsync,linkat,mkdir,mkdirat"]
    subprocess.run([*command, sys.executable, "-c", WRITE, str(tmp_path / "run")], check=True, timeout=60)
    calls = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines() if str(tmp_path) in line]
    seen = [(call.split("(")[0], ".tmp" in call, "/step>" in call) for call in calls]
    assert seen == [
        ("mkdir", False, False), ("fsync", False, False), ("fsync", False, False),
        ("mkdirat", False, False), ("fsync", False, False),
        ("fsync", True, False), ("linkat", True, True), ("fsync", False, True),
    ]  # fmt: skip


def test_a_path_through_a_file_is_an_error(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("file", b"x")
    with pytest.raises(StorageError, match="cannot write"):
        storage.write("file/below", b"x")


@pytest.mark.parametrize(
    ("code", "hint"), [(errno.ENOSPC, "df -h"), (errno.EACCES, "ls -ld"), (errno.EROFS, "mounted")]
)
def test_hints_fit_the_cause(code: int, hint: str) -> None:
    failure = local_failure(OSError(code, os.strerror(code)), "write", "/a/b")
    assert os.strerror(code) in failure.message
    assert failure.hint is not None
    assert hint in failure.hint


def test_links_that_lead_back_are_not_followed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.write("step/x", b"1")
    elsewhere = LocalStorage(tmp_path / "elsewhere")
    elsewhere.write("moved/y", b"2")
    for link, target in {"step/up": "..", "self": "self", "none": "nothing", "far": "../elsewhere",
                         "../elsewhere/back": "../run"}.items():  # fmt: skip
        (tmp_path / "run" / link).symlink_to(target)
    assert [item.key for item in storage.list()] == ["far/moved/y", "step/x"]
    assert list(storage.list_folders()) == ["far", "step"]


def test_a_folder_of_somebody_else_stops_no_listing_of_folders(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("step/x", b"1")
    (tmp_path / "lost+found").mkdir(mode=0)
    program = "import sys; from threefold.storage import open_storage; print(*open_storage(sys.argv[1]).list_folders())"
    command = [sys.executable, "-c", program, str(tmp_path)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is not installed")
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["lost+found", "step"]


def test_a_file_in_a_folders_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"/run is not a folder"):
        make_folders(tmp_path / "run" / "step")


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a deletion does that empties it."""
    usual, removed = os.mkdir, list[Path]()

    def mkdir(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if name == "attempt" and len(removed) < 2:
            removed.append(tmp_path / "step")
            removed[-1].rmdir()
        usual(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", mkdir)
    LocalStorage(tmp_path).write("step/attempt/key", b"x")
    assert (tmp_path / "step/attempt/key").read_bytes() == b"x"
    assert len(removed) == 2
    with pytest.raises(FileNotFoundError):
        make_folders(Path("/proc/none/at/all"))


def test_a_hidden_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, lock = list[Path](), fcntl.flock

    def beside_another(descriptor: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.glob(".*"))
            removed[0].unlink()
        lock(descriptor, how)

    monkeypatch.setattr("threefold.storage.new_file.fcntl.flock", beside_another)
    LocalStorage(tmp_path).write("key", b"content")
    assert len(removed) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").read_bytes() == b"content"


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")  # as FAT does

    monkeypatch.setattr(os, "link", refuse)
    storage = LocalStorage(tmp_path)
    with pytest.raises(
        StorageError, match=r"root\.json once and only once: its file system has no hard links"
    ) as raised:
        storage.write("root.json", b"x", if_absent=True)
    assert raised.value.hint
    assert list(tmp_path.iterdir()) == []
    storage.write("plain", b"x")


def test_one_place_under_two_names_is_seen(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    names = ["a", "link", f"../{tmp_path.name}/a"]
    for there in (False, True):
        storages = [LocalStorage(tmp_path / name) for name in names]
        assert all(is_same_place(one, other) for one in storages for other in storages)
        assert not any(is_same_place(one, LocalStorage(tmp_path / "b")) for one in storages)
        assert not is_same_place(storages[0], open_storage("memory://a"))
        if not there:
            (tmp_path / "a").mkdir()


def test_one_place_under_two_mounts_is_seen(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    subprocess.run(["mount", "--bind", str(small_disk), str(tmp_path / "again")], check=True)
    try:
        first, second = LocalStorage(small_disk / "run"), LocalStorage(tmp_path / "again/run")
        assert is_same_place(first, second)  # before it is made, and after
        first.write("x", b"1")
        assert is_same_place(first, second)
        assert not is_same_place(first, LocalStorage(tmp_path / "again"))
    finally:
        subprocess.run(["umount", str(tmp_path / "again")], check=True)


def test_what_is_written_is_durable_with_all_folders_that_a_killed_process_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = DurableNames(tmp_path / "disk", monkeypatch)
    for folder in names.each_kill(os.makedirs, lambda folder: open_storage(folder / "runs/one").write("a/b/c", b"x")):
        (folder / "runs/one/a/b").mkdir(parents=True, exist_ok=True)
        open_storage(folder / "runs/one").write("a/b/d", b"y")
        assert [lost for lost in names.lost() if lost.endswith(("runs", "one", "a", "b", "d"))] == []


def test_a_name_that_another_process_put_becomes_durable_with_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = DurableNames(tmp_path / "disk", monkeypatch)
    (names.folder / "run/step/a").mkdir(parents=True)
    (names.folder / "run/step/a/part").write_bytes(b"x")
    sync_name(open_storage(names.folder / "run"), "step/a/part")
    assert names.lost() == []


@pytest.mark.parametrize("has_handles", [True, False])
@pytest.mark.parametrize("removed", ["runs", "runs/one", "runs/one/step", "runs/one/step/a"])
def test_a_folder_that_another_made_again_is_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str, has_handles: bool
) -> None:
    """It has the same path, and mostly the same inode."""
    names = DurableNames(tmp_path / "disk", monkeypatch)
    if not has_handles:
        monkeypatch.setattr(folders, "_handle", lambda _: None)
    storage = open_storage(names.folder / "runs/one")
    for name in ("b", "c"):
        storage.write(f"step/a/{name}", b"x")
        assert names.lost() == []
        shutil.rmtree(names.folder / removed)
        (names.folder / "runs/one/step/a").mkdir(parents=True, exist_ok=True)
    storage.write("step/a/d", b"x")
    assert names.lost() == []


def test_the_way_to_a_folder_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, synced, fsync = open_storage(tmp_path / "runs/one"), list[str](), os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}/runs/"))
        fsync(descriptor)

    storage.write("step/a/b", b"x")
    with folders.opened(tmp_path) as folder:
        if folders._handle(folder) is None:
            pytest.skip("the file system has no handles")
    monkeypatch.setattr(os, "fsync", noted)
    storage.write("step/a/c", b"x")
    assert [name for name in synced if ".tmp" not in name] == ["one/step/a"]
    synced.clear()
    storage.write("step/b/c", b"x")
    sync_name(storage, "step/b/c")
    assert [name for name in synced if ".tmp" not in name] == ["one/step", "one/step/b", "one/step/b"]


def test_the_name_of_a_link_on_the_way_becomes_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = DurableNames(tmp_path / "disk", monkeypatch)
    (names.folder / "run").mkdir(parents=True)
    (names.folder / "other/step").mkdir(parents=True)
    (names.folder / "other/step/part").write_bytes(b"x")
    (names.folder / "run/step").symlink_to(names.folder / "other/step")
    sync_name(open_storage(names.folder / "run"), "step/part")
    assert names.lost() == []


def test_a_folder_above_that_is_not_to_be_read_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    real = folders.sync_folder

    def refused(folder: Path | str, *, inside: int | None = None) -> None:
        if inside is not None and os.readlink(f"/proc/self/fd/{inside}") == str(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(folder, inside=inside)

    monkeypatch.setattr(folders, "sync_folder", refused)
    open_storage(tmp_path / "mine").write("a", b"x")
    assert open_storage(tmp_path / "mine").read("a") == b"x"
