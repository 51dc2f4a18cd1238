"""Pruning on real storages: what goes, what never does, and kills in its midst."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.pins import pin, pin_key, unpin
from ckptkit.runs.pruning import prune
from ckptkit.runs.record import Records
from ckptkit.runs.retention import Retention
from tests.ckptkit.saves import ROOT, strace
from tests.ckptkit.steps import DAY_S, LAST, Watched, age, keys, write_steps
from threefold.storage import Storage, open_storage

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture(params=["local", "s3", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return open_storage(request.getfixturevalue("s3_url"))
    return open_storage(tmp_path / "run" if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_steps_that_no_rule_keeps_go_with_all_their_files(storage: Storage) -> None:
    write_steps(storage, 1, 2, 3)
    pin(storage, 1)
    report = prune(storage, LAST)
    assert (report.deleted, report.kept) == ([2], {1: ["pinned"], 3: ["last 1", "newest good step"]})
    assert report.num_files == 5  # a root, two data files, two indexes
    assert committed_steps(storage) == [1, 3]
    assert not any(key.startswith("step-000000002/") for key in keys(storage))
    assert unpin(storage, 1)
    assert prune(storage, LAST).deleted == [1]
    assert {key.split("/")[0] for key in keys(storage)} == {"step-000000003"}


def test_unknown_names_are_left_alone_with_their_folders(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2)
    unknown = [
        "notes.txt", "root.json.bak", "a1/part-00000.safetensors.bak", "a1/deep/part-00000.index", "a1/README",
        "eval/results.json", "part-00000.index",
    ]  # fmt: skip
    for name in unknown:
        storage.write(f"step-000000001/{name}", b"mine")
    storage.write("step-1/part-00000.index", b"mine")
    storage.write("other/a1/part-00000.index", b"mine")
    report = prune(storage, LAST, orphans_older_than_s=0)
    assert report.deleted == [1]
    assert sorted(report.left_alone) == sorted(f"step-000000001/{name}" for name in unknown)
    mine = [item.key for item in storage.list() if storage.read(item.key) == b"mine"]
    assert len(mine) == len(unknown) + 2
    assert [key for key in keys(storage) if key.startswith("step-000000001")] == sorted(report.left_alone)


def test_the_root_goes_first(tmp_path: Path) -> None:
    storage, deleted = Watched(tmp_path), []
    write_steps(storage, 1, 2)
    storage.before = deleted.append  # type: ignore[assignment]
    prune(storage, LAST)
    assert deleted[0] == ["step-000000001/root.json"]
    assert len(deleted[1]) == 4


def test_a_dry_run_tells_the_same_and_deletes_nothing(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2, 3)
    storage.write("step-000000002/b/part-00000.index", b"orphan")
    before = keys(storage)
    told = prune(storage, LAST, orphans_older_than_s=0, dry_run=True)
    assert keys(storage) == before
    done = prune(storage, LAST, orphans_older_than_s=0)
    assert (told.deleted, told.orphans, told.num_files) == (done.deleted, done.orphans, done.num_files)
    assert (done.deleted, done.orphans) == ([1, 2], ["step-000000002/b"])


@pytest.mark.parametrize("damage", ["missing", "short", "root"])
def test_the_last_good_step_stays_though_newer_ones_are_listed(tmp_path: Path, damage: str) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2, 3)
    part = tmp_path / "step-000000003/a1/part-00001.safetensors"
    if damage == "missing":
        part.unlink()
    elif damage == "short":
        os.truncate(part, part.stat().st_size - 1)
    else:
        (tmp_path / "step-000000003/root.json").write_bytes(b"{}")
    report = prune(storage, Retention(keep_last=1))
    assert report.deleted == [1]
    assert "newest good step" in report.kept[2]
    assert "newer than the newest good step" in report.kept[3]
    assert committed_steps(storage) == [2, 3]


def test_where_nothing_is_good_nothing_goes(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2)
    for path in tmp_path.rglob("part-00000.index"):
        path.unlink()
    assert prune(storage, LAST).deleted == []


def test_a_step_of_a_newer_format_stays(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2, 3)
    root = tmp_path / "step-000000001/root.json"
    root.write_bytes(root.read_bytes().replace(b'"version": 1', b'"version": 2'))
    report = prune(storage, LAST, orphans_older_than_s=0)
    assert (report.deleted, report.kept[1]) == ([2], ["its root cannot be read"])
    assert len(keys(storage)) == 10


def test_orphans_are_swept_past_an_age_only(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 5)
    for key in (
        "step-000000003/a/part-00000.safetensors", "step-000000003/a/part-00001.failed", "step-000000003/b/notes",
        "step-000000005/b/part-00000.1.index", "step-000000009/a/part-00000.safetensors",
        "step-000000004/damaged-root.json", "step-000000004/a/part-00000.index",
    ):  # fmt: skip
        storage.write(key, b"left behind")
    age(tmp_path, DAY_S + 60)
    storage.write("step-000000003/young/part-00000.safetensors", b"being written")
    storage.write("step-000000005/half/part-00001.index", b"old")
    age(tmp_path / "step-000000005/half", DAY_S + 60)
    storage.write("step-000000005/half/part-00000.index", b"young")
    report = prune(storage, Retention())
    assert report.orphans == ["step-000000003/a", "step-000000004/a", "step-000000005/b"]
    assert [key for key in keys(storage) if "/a1/" not in key] == [
        "step-000000003/b/notes",
        "step-000000003/young/part-00000.safetensors",
        "step-000000005/half/part-00000.index",
        "step-000000005/half/part-00001.index",
        "step-000000005/root.json",
        "step-000000009/a/part-00000.safetensors",
    ]
    again = prune(storage, Retention(), orphans_older_than_s=0)
    assert again.orphans == ["step-000000003/young", "step-000000005/half"]
    assert "step-000000009/a/part-00000.safetensors" in keys(storage), "a newer step may still be written"


def hidden(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob(".*"))


def test_what_killed_writers_left_under_hidden_names_goes(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 2, 3, 4)
    left = [
        "step-000000001/.root.json.0123456789abcdef.tmp", "step-000000001/b/.part-00001.index.0123456789abcdef.tmp",
        "step-000000002/a1/.part-00000.failed.0123456789abcdef.tmp", "step-000000004/.pin.json.0123456789abcdef.tmp",
    ]  # fmt: skip
    mine = [
        "step-000000003/.root.json.tmp", "step-000000003/a1/.notes.txt.0123456789abcdef.tmp",
        "step-000000004/a1/.part-00000.index.0123456789ABCDEF.tmp", "other/.root.json.0123456789abcdef.tmp",
    ]  # fmt: skip
    newer = ["step-000000005/.root.json.0123456789abcdef.tmp"]
    for name in (*left, *mine, *newer):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    told = prune(storage, LAST, dry_run=True)
    assert hidden(tmp_path) == sorted((*left, *mine, *newer))
    report = prune(storage, LAST)
    assert report.deleted == told.deleted == [2, 3]
    assert report.num_files == told.num_files == 2 * 5 + 1, "young ones may be in use, but not those of a deleted step"
    assert not (tmp_path / "step-000000002").exists()
    assert hidden(tmp_path) == sorted(each for each in (*left, *mine, *newer) if each != left[2])
    age(tmp_path, DAY_S + 60)
    assert prune(storage, LAST).num_files == 3
    assert hidden(tmp_path) == sorted((*mine, *newer))
    assert not (tmp_path / "step-000000001").exists()


@needs_strace
def test_a_writer_killed_at_a_commit_leaves_no_folder_behind(tmp_path: Path) -> None:
    writing = (
        "from threefold.storage import open_storage;"
        f"open_storage({str(tmp_path)!r}).write('step-000000001/root.json', b'x', if_absent=True)"
    )
    died = subprocess.run([*strace("link,linkat:signal=KILL:when=1"), sys.executable, "-c", writing], cwd=ROOT,
                          check=False, timeout=60)  # fmt: skip
    assert died.returncode == -signal.SIGKILL
    storage = open_storage(tmp_path)
    assert hidden(tmp_path) != []
    write_steps(storage, 2)
    prune(storage, LAST, orphans_older_than_s=0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002"]


def test_orphans_of_a_pinned_or_unreadable_step_and_of_an_empty_run_stay(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.write("step-000000001/a/part-00000.index", b"")
    assert prune(storage, LAST, orphans_older_than_s=0).num_files == 0
    storage.write(pin_key(1), b"")
    storage.write("step-000000002/root.json", b"torn")
    storage.write("step-000000002/a/part-00000.index", b"")
    write_steps(storage, 3)
    assert prune(storage, LAST, orphans_older_than_s=0).num_files == 0


def test_a_time_that_a_storage_does_not_tell_makes_no_orphan(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 2)
    storage.write("step-000000001/a/part-00000.index", b"")
    os.utime(tmp_path / "step-000000001/a/part-00000.index", (0, 0))
    assert prune(storage, LAST, orphans_older_than_s=0).orphans == []


@needs_strace
@pytest.mark.parametrize("call", [1, 2, 6, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 5, 7, 8, 9, 10))])
def test_a_prune_that_is_killed_in_a_deletion_continues(tmp_path: Path, call: int) -> None:
    """Two steps of a root and four files each."""
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2, 3)
    command = [*strace(f"unlink,unlinkat:signal=KILL:when={call}"), sys.executable, "-m", "ckptkit"]
    died = subprocess.run([*command, "prune", str(tmp_path), "--keep-last", "1"], cwd=ROOT, check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert len(keys(storage)) > 5
    assert all(record.is_good for record in Records(storage, check_parts=True).read())
    age(tmp_path, DAY_S)
    prune(storage, LAST)
    assert {key.split("/")[0] for key in keys(storage)} == {"step-000000003"}
