"""Pruning on real storages: what goes, what never does, and kills in its midst."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit.loading.roots import read_root
from ckptkit.runs.catalogue import committed_steps, pin, pin_key, unpin
from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from tests.ckptkit.support.saves import ROOT, strace
from tests.ckptkit.support.steps import DAY_S, LAST, Watched, age, checked_records, keys, write_steps
from tests.support.strace import needs_strace
from threefold.storage import Storage, open_storage


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


@pytest.mark.parametrize("damage", ["missing", "short", "root", "index", "cover"])
def test_the_last_good_step_stays_though_newer_ones_are_listed(tmp_path: Path, damage: str) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2, 3)
    part = tmp_path / "step-000000003/a1/part-00001.safetensors"
    if damage == "missing":
        part.unlink()
    elif damage == "short":
        os.truncate(part, part.stat().st_size - 1)
    elif damage == "index":
        index = part.with_suffix(".index")
        index.write_bytes(index.read_bytes()[:-1] + b"?")
    elif damage == "cover":  # the second writer's files are the first's
        root = read_root(storage, 3)
        first, second = root.parts
        for suffix in ("safetensors", "index"):
            shutil.copy(part.with_name(f"part-00000.{suffix}"), part.with_suffix(f".{suffix}"))
        parts = (first, replace(first, data=second.data, index=second.index))
        storage.write("step-000000003/root.json", replace(root, parts=parts).to_bytes())
    else:
        (tmp_path / "step-000000003/root.json").write_bytes(b"{}")
    report = prune(storage, Retention(keep_last=1))
    assert report.deleted == [1]
    assert "newest good step" in report.kept[2]
    assert "newer than the newest good step" in report.kept[3]
    assert committed_steps(storage) == [2, 3]


def test_a_step_whose_index_is_damaged_fills_no_place(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2, 3, 4, 5, 6)
    for step in (2, 4, 5):
        path = tmp_path / f"step-{step:09d}/a1/part-00001.index"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    report = prune(storage, Retention(keep_last=2, keep_every=4), dry_run=True)
    assert (report.deleted, report.kept) == (
        [1, 2], {3: ["last 2"], 4: ["last 2"], 5: ["last 2"], 6: ["last 2", "every 4", "newest good step"]}
    )  # fmt: skip


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
    root.write_bytes(root.read_bytes().replace(b'"version": 2', b'"version": 3'))
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
    assert report.orphans == [
        "step-000000003/a", "step-000000004/a", "step-000000004/damaged-root.json", "step-000000005/b",
    ]  # fmt: skip
    assert [key for key in keys(storage) if "/a1/" not in key] == [
        "step-000000003/b/notes",
        "step-000000003/young/part-00000.safetensors",
        "step-000000005/half/part-00000.index",
        "step-000000005/half/part-00001.index",
        "step-000000005/root.json",
        "step-000000009/a/part-00000.safetensors",
    ]
    assert "step-000000009/a/part-00000.safetensors" in keys(storage), "a newer step may still be written"
    again = prune(storage, Retention(), orphans_older_than_s=0)
    assert again.orphans == ["step-000000003/young", "step-000000005/half", "step-000000009/a"]


def hidden(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob(".*"))


def test_what_killed_writers_left_under_hidden_names_goes(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 2, 3, 4)
    left = [
        "step-000000001/.root.json.0123456789abcdef.tmp", "step-000000001/b/.part-00001.index.0123456789abcdef.tmp",
        "step-000000002/a1/.part-00000.failed.0123456789abcdef.tmp", "step-000000004/.pin.json.0123456789abcdef.tmp",
    ]  # fmt: skip
    own = [
        "step-000000003/.root.json.tmp", "step-000000003/a1/.notes.txt.0123456789abcdef.tmp",
        "step-000000004/a1/.part-00000.index.0123456789ABCDEF.tmp", "other/.root.json.0123456789abcdef.tmp",
    ]  # fmt: skip
    newer = ["step-000000005/.root.json.0123456789abcdef.tmp"]
    for name in (*left, *own, *newer):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    told = prune(storage, LAST, dry_run=True)
    assert hidden(tmp_path) == sorted((*left, *own, *newer))
    report = prune(storage, LAST)
    assert report.deleted == told.deleted == [2, 3]
    assert report.hidden == told.hidden == [left[2]]
    assert report.num_files == told.num_files == 2 * 5 + 1, "young ones may be in use, but not those of a deleted step"
    assert not (tmp_path / "step-000000002").exists()
    assert hidden(tmp_path) == sorted(each for each in (*left, *own, *newer) if each != left[2])
    age(tmp_path, DAY_S + 60)
    assert prune(storage, LAST).num_files == 3
    assert hidden(tmp_path) == sorted((*own, *newer))
    assert not (tmp_path / "step-000000001").exists()
    assert prune(storage, Retention(), orphans_older_than_s=0).hidden == newer
    assert hidden(tmp_path) == sorted(own)


def test_all_debris_of_a_run_without_commits_goes_at_an_age_that_is_named(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.write("step-000000004/a/part-00000.safetensors", b"killed")
    storage.write("step-000000004/a/part-00001.failed", b"killed")
    storage.write("step-000000007/b/notes.txt", b"mine")
    for name in ("step-000000004/b", "step-000000005/a", "step-000000006", "step-000000007/c", "step-8/a", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step-000000009/a").mkdir(parents=True)
    (tmp_path / "step-000000009/a/.part-00000.index.0123456789abcdef.tmp").write_bytes(b"")
    age(tmp_path, DAY_S / 2)
    assert prune(storage, Retention()).num_files == 0
    assert prune(storage, Retention(), orphans_older_than_s=DAY_S).num_files == 0
    told = prune(storage, Retention(), orphans_older_than_s=3600, dry_run=True)
    report = prune(storage, Retention(), orphans_older_than_s=3600)
    assert (report.orphans, report.num_files) == (told.orphans, told.num_files) == (["step-000000004/a"], 3)
    assert report.hidden == ["step-000000009/a/.part-00000.index.0123456789abcdef.tmp"]
    assert report.empty_folders == told.empty_folders
    assert told.empty_folders == ["step-000000004/b/", "step-000000005/a/", "step-000000006/", "step-000000007/c/"]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "other", "step-000000007", "step-000000007/b", "step-000000007/b/notes.txt", "step-8", "step-8/a",
    ]  # fmt: skip


def test_a_linked_step_loses_its_link_alone(tmp_path: Path) -> None:
    other, storage = open_storage(tmp_path / "other"), open_storage(tmp_path / "run")
    write_steps(other, 1)
    write_steps(storage, 2, 3)
    other.write("step-000000001/b/part-00000.index", b"an orphan there")
    (tmp_path / "other/step-000000001/.root.json.0123456789abcdef.tmp").write_bytes(b"")
    before = sorted((tmp_path / "other").rglob("*"))
    (tmp_path / "run/step-000000001").symlink_to(tmp_path / "other/step-000000001")
    assert prune(storage, Retention(keep_last=3), orphans_older_than_s=0).orphans == []
    assert prune(storage, Retention(keep_last=1), orphans_older_than_s=0).deleted == [1, 2]
    assert sorted((tmp_path / "other").rglob("*")) == before
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-000000003"]


@pytest.mark.parametrize("link", ["step", "attempt", "file"])
def test_behind_links_nothing_is_deleted(tmp_path: Path, link: str) -> None:
    """Steps, attempts and files of another run that are linked into this one."""
    run, other = open_storage(tmp_path / "run"), open_storage(tmp_path / "other")
    write_steps(run, 1, 2, 3)
    write_steps(other, 1)
    inside = {"step": "step-000000001", "attempt": "step-000000001/a1", "file": "step-000000001/a1/part-00000.index"}
    path, other_path = tmp_path / "run" / inside[link], tmp_path / "other" / inside[link]
    path.rename(tmp_path / "away")
    path.symlink_to(other_path)
    (tmp_path / "other/step-000000001/a1/.part-00000.index.0123456789abcdef.tmp").write_bytes(b"theirs")
    if link == "step":
        (other_path / "b2").mkdir()
        (other_path / "b2/part-00000.index").write_bytes(b"an orphan")
    before = {key: other.read(key) for key in keys(other)}
    assert [record.step for record in checked_records(run)] == [1, 2, 3], "a linked step is read"
    assert prune(run, Retention(keep_last=3), orphans_older_than_s=0).num_files == 0
    assert path.is_symlink(), "of a step that stays nothing goes"
    assert prune(run, LAST, orphans_older_than_s=0).deleted == [1, 2]
    assert not path.is_symlink()
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["step-000000003"]
    assert {key: other.read(key) for key in keys(other)} == before
    assert hidden(tmp_path / "other") != []


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


def test_orphans_of_a_pinned_or_unreadable_step_stay(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.write("step-000000001/a/part-00000.index", b"")
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


@pytest.mark.ci
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
    assert all(record.is_good for record in checked_records(storage))
    age(tmp_path, DAY_S)
    prune(storage, LAST)
    assert {key.split("/")[0] for key in keys(storage)} == {"step-000000003"}
