"""Pruning on real storages: what goes and what never does, kills in its midst, and others at work beside it."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from ckptkit.format.root import Part, Root
from ckptkit.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.pins import pin, pin_key, unpin
from ckptkit.runs.pruning import Pruner, prune
from ckptkit.runs.record import Records
from ckptkit.runs.retention import Retention
from tests.ckptkit.checkpoints import write_checkpoint
from tests.ckptkit.model_tables import gpt_tensors, values
from tests.ckptkit.saves import ROOT, SMALL, assert_holds, save_whole, strace
from threefold.errors import StorageError, UserError
from threefold.storage import Storage, open_storage
from threefold.storage.local import LocalStorage

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
TENSORS = gpt_tensors(1)
VALUES = values(TENSORS)
LAST = Retention(keep_last=1)
DAY_S = 24 * 3600.0


def write_steps(storage: Storage, *steps: int) -> None:
    for step in steps:
        write_checkpoint(storage, step, ParallelLayout(tp=2), 1, TENSORS, VALUES)


def keys(storage: Storage) -> list[str]:
    return [item.key for item in storage.list()]


def age(folder: Path, seconds: float) -> None:
    """Make all files look older."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - seconds, time.time() - seconds))


class Watched(LocalStorage):
    """Calls `before(keys)` before each deletion and `after(keys)` after it."""

    before: Callable[[list[str]], None] = staticmethod(lambda keys: None)
    after: Callable[[list[str]], None] = staticmethod(lambda keys: None)

    def delete(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        self.before(listed)
        super().delete(listed)
        self.after(listed)


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


class Killed(BaseException):
    pass


@pytest.mark.parametrize("when", range(1, 5))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_prune_that_is_killed_continues(tmp_path: Path, when: int, moment: str) -> None:
    storage, calls = Watched(tmp_path), []
    write_steps(storage, 1, 2, 3)

    def die(deleted: list[str]) -> None:
        calls.append(deleted)
        if len(calls) == when:
            raise Killed

    setattr(storage, moment, die)
    with pytest.raises(Killed):
        prune(storage, LAST)
    storage.before = storage.after = lambda deleted: None
    for record in Records(storage, check_parts=True).read():
        assert record.is_good, "a listed step is whole"
    assert committed_steps(storage)[-1] == 3
    prune(storage, LAST)
    age(tmp_path, DAY_S)
    prune(storage, LAST)
    assert {key.split("/")[0] for key in keys(storage)} == {"step-000000003"}
    assert len(keys(storage)) == 5


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
@pytest.mark.parametrize("call", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5, 6, 7, 8, 9, 10))])
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


# --- others at work at the same time


def test_many_prunes_at_once_end_as_one(tmp_path: Path) -> None:
    steps = range(1, 13)
    write_steps(open_storage(tmp_path), *steps)
    start = Barrier(4)

    def work(number: int) -> list[int]:
        start.wait()
        return prune(open_storage(tmp_path), Retention(keep_last=2, keep_every=5)).deleted

    with ThreadPoolExecutor(4) as pool:
        deleted = [step for found in pool.map(work, range(4)) for step in found]
    assert committed_steps(open_storage(tmp_path)) == [5, 10, 11, 12]
    assert set(deleted) == set(steps) - {5, 10, 11, 12}
    assert len(keys(open_storage(tmp_path))) == 4 * 5


def test_prunes_beside_a_job_that_saves(tmp_path: Path) -> None:
    ended = Event()

    def work() -> int:
        num_prunes = 0
        while not ended.is_set():
            prune(open_storage(tmp_path), LAST, orphans_older_than_s=0)
            num_prunes += 1
            time.sleep(0.01)
        return num_prunes

    with ThreadPoolExecutor(1) as pool:
        pruning = pool.submit(work)
        try:
            reports = [save_whole(tmp_path, step, SMALL, scale=step) for step in range(1, 5)]
        finally:
            ended.set()
        assert pruning.result() > 1
    assert [report.error for report in reports] == [""] * 4
    assert committed_steps(open_storage(tmp_path))[-1] == 4
    assert_holds(tmp_path, 4, SMALL, scale=4)


@pytest.mark.parametrize("method", ["read", "list"])
def test_a_step_that_goes_while_it_is_read_is_none(tmp_path: Path, method: str) -> None:
    storage = LocalStorage(tmp_path)
    write_steps(storage, 1, 2)
    usual = getattr(storage, method)

    def gone(key: str) -> object:
        if key.startswith("step-000000001"):
            for path in (tmp_path / "step-000000001").rglob("*.*"):
                path.unlink()
        return usual(key)

    setattr(storage, method, gone)
    assert [record.step for record in Records(storage, check_parts=True).read()] == [2]


def test_two_prunes_at_once(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2, 3, 4)
    other: list[list[int]] = []

    def prune_too(deleted: list[str]) -> None:
        if not other:
            other.append([])
            other[0] = prune(open_storage(tmp_path), LAST).deleted

    storage.after = prune_too
    report = prune(storage, LAST)
    assert report.deleted == [1]
    assert other == [[2, 3]]
    assert list(report.kept) == [4]
    assert committed_steps(storage) == [4]
    age(tmp_path, DAY_S)
    prune(storage, LAST)
    assert len(keys(storage)) == 5


def test_prunes_of_different_policies_leave_the_newest_good_step(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 10, 11)
    seen: list[object] = []

    def other(deleted: list[str]) -> None:
        if not seen:
            seen.append(None)
            write_steps(open_storage(tmp_path), 12)  # a save beside both
            seen.append(prune(open_storage(tmp_path), Retention(keep_every=10)).deleted)

    storage.before = other
    prune(storage, LAST)
    assert seen[1] == [11]
    assert committed_steps(storage) == [12]


def test_a_newer_step_that_commits_meanwhile_is_not_touched(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2)

    def commit(deleted: list[str]) -> None:
        if not (tmp_path / "step-000000003").exists():
            write_steps(open_storage(tmp_path), 3)

    storage.before = commit
    assert prune(storage, LAST, orphans_older_than_s=0).deleted == [1]
    assert [record.is_good for record in Records(storage, check_parts=True).read()] == [True, True]


def test_nothing_more_goes_once_the_newest_good_step_went_away(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2, 3)
    storage.before = lambda deleted: (tmp_path / "step-000000003/root.json").unlink(missing_ok=True)
    report = prune(storage, LAST)
    assert report.deleted == [1]
    assert report.kept[2] == ["step 3, the newest good one, went away meanwhile"]
    assert committed_steps(storage) == [2]


def test_a_pin_put_before_the_deletion_saves_its_step(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2, 3)
    storage.before = lambda deleted: pin(open_storage(tmp_path), 2)
    report = prune(storage, LAST)
    assert (report.deleted, report.kept[2]) == ([1], ["pinned meanwhile"])
    assert committed_steps(storage) == [2, 3]


def test_a_pin_that_is_put_while_the_root_goes_brings_it_back(tmp_path: Path) -> None:
    """The pin is written after the last look for it, and its writer has not looked for the root yet."""
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2)
    root = (tmp_path / "step-000000001/root.json").read_bytes()
    storage.before = lambda deleted: open_storage(tmp_path).write(pin_key(1), b"{}")
    report = prune(storage, LAST)
    assert (report.deleted, report.kept[1]) == ([], ["pinned meanwhile"])
    assert (tmp_path / "step-000000001/root.json").read_bytes() == root
    assert all(record.is_good for record in Records(storage, check_parts=True).read())


def test_a_pin_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    storage, refused = Watched(tmp_path), []
    write_steps(storage, 1, 2)

    def late(deleted: list[str]) -> None:
        if len(deleted) > 1:  # the looks for pins are past, and the root is gone
            with pytest.raises(UserError, match="holds no committed step 1") as caught:
                pin(open_storage(tmp_path), 1)
            refused.append(caught)

    storage.before = late
    assert prune(storage, LAST).deleted == [1]
    assert refused
    assert {key.split("/")[0] for key in keys(storage)} == {"step-000000002"}


# --- after a save


def test_after_a_save_only_what_is_new_is_read(tmp_path: Path) -> None:
    class Counting(LocalStorage):
        reads: list[str] = []  # noqa: RUF012  # emptied by the test

        def read(self, key: str) -> bytes:
            self.reads.append(key)
            return super().read(key)

    storage, pruner, policy = Counting(tmp_path), Pruner(), Retention(keep_last=3)
    for step in range(1, 7):
        write_steps(storage, step)
        storage.reads.clear()
        assert pruner.after_save(storage, step, policy) == ""
        roots = [key for key in storage.reads if key != f"step-{step - 3:09d}/root.json"]  # read before it goes
        assert roots == [f"step-{step:09d}/root.json"]
    assert committed_steps(storage) == [4, 5, 6]


def test_after_a_save_that_is_not_whole_nothing_goes(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2, 3)
    (tmp_path / "step-000000003/a1/part-00000.index").unlink()
    assert "a1/part-00000.index is missing" in Pruner().after_save(storage, 3, LAST)
    assert "step 4 is not listed" in Pruner().after_save(storage, 4, LAST)
    assert Pruner().after_save(storage, 3, Retention()) == ""
    assert committed_steps(storage) == [1, 2, 3]


@pytest.mark.parametrize("error", [StorageError("disk on fire"), ZeroDivisionError("ours")])
def test_a_failure_to_prune_is_a_warning(tmp_path: Path, error: Exception) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2)

    def fail(deleted: list[str]) -> None:
        raise error

    storage.before = fail
    warning = Pruner().after_save(storage, 2, LAST)
    assert warning.startswith("older steps were not pruned: ")
    assert str(error) in warning


def test_a_root_saved_anew_is_read_anew(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2)
    records = Records(storage, check_parts=True)
    assert [record.problem for record in records.read()] == ["", ""]
    parts = (Part("b/part-00000.safetensors", 1, "b/part-00000.index", 1, 1),)
    root = Root(1, "b", ParallelLayout(), 1, {}, parts, {})
    storage.write("step-000000001/root.json", root.to_bytes())
    assert [record.attempt for record in records.read()] == ["b", "a1"]
    storage.delete(["step-000000001/root.json"])
    assert [record.step for record in records.read()] == [2]
