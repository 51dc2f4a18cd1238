"""Saves to a first tier that is full: room is made by the rules of retention, and else the next tier takes them."""

import errno
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.format.keys import Seat
from ckptkit.handoff.protocol import Area, Ring, SaveOrder, StagedFile
from ckptkit.handoff.report import SaveReport
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps, pin
from ckptkit.runs.retention import Retention
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.tiers.tier import Tier
from ckptkit.writer.commit import NoRoom, wait_for_parts
from ckptkit.writer.overflow import Room, save_where_room_is
from ckptkit.writer.retries import Retries
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import ONE, assert_holds, pieces_of, save_one
from tests.support.small_disk import small_disk
from threefold.errors import StorageError
from threefold.storage import Storage, open_storage
from tools.fault_proxy import Fault, FaultProxy

TENSORS = gpt_tensors(hidden=64, kv=32, ffn=96, vocab=61)
STEP_BYTES = sum(info.size_bytes for info in TENSORS) * 1.06  # with part indexes and root, in whole pages
TP2 = ParallelLayout(tp=2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that holds two steps, but not three."""
    with small_disk(tmp_path / "disk", int(STEP_BYTES * 2.7)) as folder:
        yield folder


def saver(
    run: Path, *tiers: Path | str, every: int = 0, keep_last: int = 1, attempt: str = "b", rank: int = 0,
    world_size: int = 1, **options: Any,
) -> Checkpointer:  # fmt: skip
    found = CheckpointerOptions(
        deadline_s=20.0, tiers=tuple(Tier(str(tier), every=every, newest=0) for tier in tiers),
        retention=Retention(keep_last=keep_last), **options,
    )  # fmt: skip
    return Checkpointer(str(run), attempt=attempt, rank=rank, world_size=world_size, options=found)


def fill(run: Path, *steps: int) -> None:
    """Save steps without any rule, as a run does that had others."""
    for step in steps:
        arrays = {name: array * step for name, array in values(TENSORS).items()}
        ckptkit.save(
            str(run), step, pieces_of(TENSORS, ONE, 0, arrays), tensors=TENSORS, layout=ONE, num_layers=3,
            metadata={"scale": step},
        )  # fmt: skip


def save(checkpointer: Checkpointer, *steps: int) -> list[SaveReport]:
    reports = []
    for step in steps:
        save_one(checkpointer, step, TENSORS, scale=step)
        reports += checkpointer.wait()
    return [report for report in [*reports, *checkpointer.close()] if report.url == checkpointer.url]


def steps_of(run: Path | str) -> list[int]:
    return committed_steps(open_storage(run))


def test_room_is_made_at_the_start(disk: Path) -> None:
    fill(disk / "run", 6, 7)
    [report] = save(saver(disk / "run"), 8)
    assert report.ok, report.error
    assert report.warning == ""
    assert steps_of(disk / "run") == [8]
    assert_holds(disk / "run", 8, TENSORS, scale=8)


def test_a_step_that_the_next_tier_lacks_stays_until_that_has_a_newer_one(disk: Path, tmp_path: Path) -> None:
    """An earlier writer may be copying it still."""
    fill(disk / "run", 6, 7)
    slow = tmp_path / "slow"
    first, second = save(saver(disk / "run", slow, every=6), 8, 9)
    assert first.warning == f"in {slow}, as {disk / 'run'} has no room"
    assert first.ok
    assert (second.ok, second.warning) == (True, "")
    assert steps_of(slow) == [8]
    assert steps_of(disk / "run") == [9]
    assert_holds(slow, 8, TENSORS, scale=8)


def test_a_step_that_a_tier_is_to_have_stays_though_the_first_save_is_not_due_there(disk: Path, tmp_path: Path) -> None:
    """What the tier holds was not known when the run began."""
    fill(disk / "run", 6, 7)
    options = CheckpointerOptions(deadline_s=20.0, tiers=(Tier(str(tmp_path / "slow"), every=6),),
                                  retention=Retention(keep_last=1))  # fmt: skip
    [report] = save(Checkpointer(str(disk / "run"), attempt="b", options=options), 8)
    assert (report.ok, report.warning) == (True, f"in {tmp_path / 'slow'}, as {disk / 'run'} has no room")


@pytest.mark.slow
@pytest.mark.ci
def test_steps_stay_for_a_tier_that_is_silent_as_long_as_saves_find_a_place(disk: Path, tmp_path: Path) -> None:
    """Once one did not, the next one does: a run of a full disk and a tier that takes nothing goes on."""
    fill(disk / "run", 6, 7)
    (tmp_path / "file").write_text("not a folder")
    failed, saved = save(saver(disk / "run", tmp_path / "file" / "slow", every=6), 8, 9)
    assert "has no room for step 8; nor did the next tier take it" in failed.error
    assert (saved.ok, saved.warning) == (True, "no place took step 8: older steps did not wait for slower tiers")
    assert steps_of(disk / "run") == [9]


def test_a_tier_that_does_not_answer_may_lack_all_that_it_is_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept(Place):
        """What is needed is seen."""

        def make_room(self, retention: Retention, needed: set[int], debris_s: float) -> None:
            self.needed = needed

    def opened(url: str) -> Storage:
        if url == "s3://silent":
            raise StorageError("no answer")
        return open_storage(url)

    fill(tmp_path / "run", 5, 6, 7)
    monkeypatch.setattr("ckptkit.writer.overflow.open_storage", opened)
    place = Kept()
    found = room(place, intervals={"s3://silent": 6, str(tmp_path / "slow"): 5})
    found = replace(found, is_new=True, order=found.order.moved(str(tmp_path / "run")))
    found.make()
    assert place.needed == {5, 6}


def test_older_steps_than_the_next_tier_has_go(disk: Path, tmp_path: Path) -> None:
    fill(disk / "run", 6, 7)
    shutil.copytree(disk / "run" / "step-000000007", tmp_path / "slow" / "step-000000007")
    [report] = save(saver(disk / "run", tmp_path / "slow", every=8), 8)
    assert (report.ok, report.warning) == (True, "")
    assert steps_of(tmp_path / "slow") == [7, 8]
    assert steps_of(disk / "run") == [8]


def test_pinned_steps_stay_and_the_next_tier_takes_what_follows(disk: Path, tmp_path: Path) -> None:
    fill(disk / "run", 6, 7)
    pin(open_storage(disk / "run"), 6)
    reports = save(saver(disk / "run", tmp_path / "slow", every=100), 8, 9)
    assert [(report.ok, report.warning[:3]) for report in reports] == [(True, "in "), (True, "in ")]
    assert steps_of(disk / "run") == [6, 7]
    assert steps_of(tmp_path / "slow") == [8, 9]


def test_without_a_rule_nothing_goes_and_without_a_next_tier_saves_fail(disk: Path) -> None:
    fill(disk / "run", 6, 7)
    [report] = save(saver(disk / "run", keep_last=0), 8)
    assert "No space left" in report.error
    assert steps_of(disk / "run") == [6, 7]


def test_what_must_stay_never_fails_a_save(disk: Path, tmp_path: Path) -> None:
    """With keep_last=2 a save needs room for three: each third step goes to the next tier, and none is lost."""
    reports = save(saver(disk / "run", tmp_path / "slow", every=100, keep_last=2), *range(1, 10))
    assert all(report.ok for report in reports)
    overflowed = {report.step for report in reports if report.warning}
    assert overflowed == {3, 6, 9}
    assert steps_of(tmp_path / "slow") == sorted(overflowed)
    assert steps_of(disk / "run") == [8]


def test_a_window_goes_to_the_next_tier_if_there_is_no_room_before_it_begins(disk: Path, tmp_path: Path) -> None:
    fill(disk / "run", 6, 7)
    pin(open_storage(disk / "run"), 6)
    [report] = save(saver(disk / "run", tmp_path / "slow", window_bytes=1 << 16), 8)
    assert report.ok, report.error
    assert_holds(tmp_path / "slow", 8, TENSORS, scale=8)


def test_all_ranks_go_to_the_next_tier_together(disk: Path, tmp_path: Path) -> None:
    """Whichever of them found no room; and they come back once there is some."""
    fill(disk / "run", 6, 7)
    pin(open_storage(disk / "run"), 6)
    slow = tmp_path / "slow"
    savers = [saver(disk / "run", slow, every=100, rank=rank, world_size=2) for rank in range(2)]
    for step in (8, 9):
        for rank, checkpointer in enumerate(savers):
            save_one(checkpointer, step, TENSORS, TP2, rank, scale=step)
        for checkpointer in savers:
            [report] = checkpointer.wait()
            assert report.ok, report.error
            assert bool(report.warning) == (step == 8)
        assert_holds(slow if step == 8 else disk / "run", step, TENSORS, scale=step)
        (disk / "run" / "step-000000006" / "pin.json").unlink(missing_ok=True)
    for checkpointer in savers:
        checkpointer.close()
    assert steps_of(disk / "run") == [9]
    assert {path.name for path in (disk / "run").iterdir()} == {"step-000000009"}, "no word of the failed try is left"


@pytest.mark.ci
@pytest.mark.slow
def test_a_copied_step_goes_although_no_save_follows(tmp_path: Path, s3_proxy: FaultProxy, s3_url: str) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.4)
    checkpointer = saver(tmp_path / "run", s3_url, every=6)
    for step in (6, 7):
        save_one(checkpointer, step, TENSORS, scale=step)
    assert all(report.ok for report in checkpointer.wait())
    assert steps_of(tmp_path / "run") == [6, 7]
    checkpointer.close()
    assert steps_of(s3_url) == [6]
    assert steps_of(tmp_path / "run") == [7]


class Place:
    """A place of a save whose room is as a test says."""

    def __init__(self, *has_room: bool) -> None:
        self.answers, self.num_pruned = list(has_room), 0

    def has_room(self, num_bytes: int) -> bool:
        return self.answers.pop(0) if self.answers else True

    def make_room(self, *arguments: object) -> None:
        self.num_pruned += 1


def room(place: Place, *, num_writers: int = 1, writer: int = 0, overflow: bool = True, **changes: Any) -> Room:
    seat = Seat("/fast", 8, "a", writer, num_writers)
    order = SaveOrder(
        seat=seat, files=(StagedFile(100, 0, Area(0, 10)),), ring=Ring(0, 8, 2, 2), draft=Area(0, 0),
        layout={}, num_layers=1, metadata={}, arena_bytes=0, deadline_s=1.0, retry_s=0.0,
        retention=Retention(keep_last=1), code="", stripe_count=0, stripe_size_bytes=0, num_threads=1,
        overflow=replace(seat, url="/slow") if overflow else None,
    )  # fmt: skip
    return Room(replace(order, **changes), place, lambda: (), lambda: True, is_new=False)


class Writing:
    """Saves that fail at some places, so many times."""

    def __init__(self, *failures: Exception | None) -> None:
        self.failures, self.urls = list(failures), list[str]()

    def __call__(self, seat: Seat) -> None:
        self.urls.append(seat.url)
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure


def full() -> StorageError:
    error = StorageError("no room")
    error.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")
    return error


def test_a_quota_that_is_used_up_shows_in_the_write_alone() -> None:
    """The save is tried again where room was made, and then elsewhere."""
    for failures, urls in (([full()], ["/fast", "/fast"]), ([full(), full()], ["/fast", "/fast", "/slow"])):
        place, writing = Place(), Writing(*failures)
        seat, _ = save_where_room_is(room(place), writing, lambda: 1.0, Retries())
        assert (writing.urls, seat.url, place.num_pruned) == (urls, urls[-1], 1)


def test_what_is_staged_once_is_never_written_twice() -> None:
    writing = Writing(full())
    with pytest.raises(StorageError, match="no room"):
        save_where_room_is(room(Place(), ring=Ring(0, 8, 1, 2)), writing, lambda: 1.0, Retries())
    assert writing.urls == ["/fast"]


def test_other_failures_are_raised_and_both_of_two_places_are_named() -> None:
    writing = Writing(StorageError("refused"))
    with pytest.raises(StorageError, match=r"^refused"):
        save_where_room_is(room(Place()), writing, lambda: 1.0, Retries())
    assert writing.urls == ["/fast"]
    with pytest.raises(StorageError, match="no room; nor did the next tier take it: gone"):
        save_where_room_is(room(Place()), Writing(full(), full(), StorageError("gone")), lambda: 1.0, Retries())


def test_another_writer_prunes_nothing_and_follows_the_leader() -> None:
    place, writing = Place(), Writing(NoRoom("writer 0 failed: no room"))
    seat, _ = save_where_room_is(room(place, num_writers=2, writer=1), writing, lambda: 1.0, Retries())
    assert (writing.urls, seat.url, place.num_pruned) == (["/fast", "/slow"], "/slow", 0)


def test_a_writer_that_fails_otherwise_is_not_waited_for_where_the_others_go(tmp_path: Path) -> None:
    """Its leader found no room, and had left before that writer failed."""
    found = room(Place(), num_writers=3, writer=2)
    seat, elsewhere = (replace(found.order.seat, url=str(tmp_path / name)) for name in ("fast", "slow"))
    found = replace(found, order=replace(found.order, seat=seat, overflow=elsewhere))
    open_storage(seat.url).write(replace(seat, writer=0).failed_key, b"no room: the disk is full")
    with pytest.raises(StorageError, match=r"^refused"):
        save_where_room_is(found, Writing(StorageError("refused")), lambda: 1.0, Retries())
    with pytest.raises(StorageError, match="writer 2 failed: refused"):
        wait_for_parts(open_storage(elsewhere.url), replace(elsewhere, writer=0), lambda: 30.0)
