"""A prune beside other prunes, beside saves, and beside those who pin: what is good or pinned is never lost."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event

import pytest

from ckptkit.loading.roots import read_root
from ckptkit.runs.catalogue import committed_steps, pin, pin_key
from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from tests.ckptkit.support.saves import SMALL, assert_holds, save_whole
from tests.ckptkit.support.steps import DAY_S, LAST, Watched, age, checked_records, keys, write_steps
from threefold.errors import UserError
from threefold.storage import open_storage


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
            prune(open_storage(tmp_path), LAST)
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
    assert committed_steps(storage) == [10, 12], "10 was to go for 11, which went"


def test_a_newer_step_that_commits_meanwhile_is_not_touched(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2)

    def commit(deleted: list[str]) -> None:
        if not (tmp_path / "step-000000003").exists():
            write_steps(open_storage(tmp_path), 3)

    storage.before = commit
    assert prune(storage, LAST, orphans_older_than_s=0).deleted == [1]
    assert [record.is_good for record in checked_records(storage)] == [True, True]


def test_nothing_more_goes_once_the_newest_good_step_went_away(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2, 3)
    storage.before = lambda deleted: (tmp_path / "step-000000003/root.json").unlink(missing_ok=True)
    report = prune(storage, LAST)
    assert report.deleted == []
    assert report.kept[1] == report.kept[2] == ["step 3, the newest good one, went away meanwhile"]
    assert committed_steps(storage) == [1, 2]
    assert all(record.is_good for record in checked_records(storage))


def test_a_pin_put_before_the_deletion_saves_its_step(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2, 3)
    deleted: list[str] = []

    def pin_too(going: list[str]) -> None:
        deleted.extend(going)
        pin(open_storage(tmp_path), 2)

    storage.before = pin_too
    report = prune(storage, LAST)
    assert (report.deleted, report.kept[2]) == ([1], ["pinned meanwhile"])
    assert {key.split("/")[0] for key in deleted} == {"step-000000001"}
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
    assert all(record.is_good for record in checked_records(storage))


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


def test_a_step_that_is_saved_anew_meanwhile_is_no_orphan(tmp_path: Path) -> None:
    storage, plain = Watched(tmp_path), open_storage(tmp_path)
    write_steps(storage, 1, 2)

    def save_anew(deleted: list[str]) -> None:
        root = read_root(plain, 2)
        if root.attempt == "b":
            return
        for name in keys(plain):
            if name.startswith("step-000000002/a1/"):
                plain.copy(name, name.replace("/a1/", "/b/"))
        parts = (replace(part, data=part.data.replace("a1", "b"), index=part.index.replace("a1", "b"))
                 for part in root.parts)  # fmt: skip
        plain.write("step-000000002/root.json", replace(root, attempt="b", parts=tuple(parts)).to_bytes())

    storage.before = save_anew
    assert prune(storage, LAST, orphans_older_than_s=0).orphans == []
    assert [(record.attempt, record.is_good) for record in checked_records(plain)] == [("b", True)]
    assert prune(plain, LAST, orphans_older_than_s=0).orphans == ["step-000000002/a1"]
