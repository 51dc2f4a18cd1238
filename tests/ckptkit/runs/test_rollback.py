"""A rollback: newer steps are set aside and come back, whatever kills it; what is pinned or damaged is refused."""

import time
import uuid
from pathlib import Path

import pytest

from ckptkit import Run
from ckptkit.format.keys import ASIDE_NAME, aside_key
from ckptkit.loading.roots import latest_step, read_root, root_key
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps, pin, pin_key
from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from ckptkit.runs.rollback import rollback, undo_rollback
from tests.ckptkit.support.inline_pools import inline_pools
from tests.ckptkit.support.programs import Killed
from tests.ckptkit.support.run_model import Dead
from tests.ckptkit.support.small_steps import half_of, restored_value, save_ranks
from tests.ckptkit.support.steps import DAY_S, LAST, Watched, age, keys, write_steps
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import AlreadyExists, Storage, open_storage
from threefold.storage.fault import FaultStorage
from threefold.storage.memory import MemoryStorage

LAYOUT = ParallelLayout(tp=2)


@pytest.fixture(params=["local", "s3", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return open_storage(request.getfixturevalue("s3_url"))
    return open_storage(tmp_path / "run" if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def saved(storage: Storage, *steps: int, attempt: str = "a", first_value: int = 0) -> Storage:
    for step in steps:
        save_ranks(storage, step, f"{attempt}{step}", LAYOUT, first_value + step)
    return storage


def test_newer_steps_are_set_aside_and_come_back(storage: Storage) -> None:
    saved(storage, 1, 2, 3, 4)
    before = keys(storage)
    report = rollback(storage, 2)
    assert (report.set_aside, report.quarantined) == ([4, 3], [])
    assert (committed_steps(storage), latest_step(storage)) == ([1, 2], 2)
    assert rollback(storage, 2).set_aside == []
    assert undo_rollback(storage, 2).brought_back == [3, 4]
    assert keys(storage) == before
    assert [restored_value(storage, step, LAYOUT) for step in (3, 4)] == [3, 4]
    assert undo_rollback(storage, 2).brought_back == []


def test_a_dry_run_says_the_same_and_changes_nothing() -> None:
    storage = saved(MemoryStorage(), 1, 2, 3)
    before = keys(storage)
    assert rollback(storage, 1, dry_run=True).set_aside == [3, 2]
    assert keys(storage) == before
    rollback(storage, 1)
    before = keys(storage)
    assert undo_rollback(storage, 1, dry_run=True).brought_back == [2, 3]
    assert keys(storage) == before


def test_a_step_that_is_set_aside_can_be_saved_again() -> None:
    storage = saved(MemoryStorage(), 1, 2, 3)
    rollback(storage, 1)
    saved(storage, 2, attempt="b", first_value=10)
    assert read_root(storage, 2).attempt == "b2"
    with pytest.raises(UserError, match="step 2 of memory://test was saved again") as caught:
        undo_rollback(storage, 1)
    assert caught.value.hint == "to lose that save: ckptkit rm memory://test/step-000000002 --newest-too"
    assert committed_steps(storage) == [1, 2]
    assert undo_rollback(storage, 2).brought_back == [3]
    assert [restored_value(storage, step, LAYOUT) for step in (2, 3)] == [12, 3]


def test_of_two_tries_the_one_set_aside_last_comes_back() -> None:
    storage = saved(MemoryStorage(), 1, 2)
    rollback(storage, 1)
    saved(storage, 2, attempt="b", first_value=10)
    rollback(storage, 1)
    assert undo_rollback(storage, 1).brought_back == [2]
    assert read_root(storage, 2).attempt == "b2"
    assert storage.info(aside_key(2, "a2"))
    with pytest.raises(UserError, match="saved again"):
        undo_rollback(storage, 1)
    rollback(storage, 1)
    storage.delete([aside_key(2, "b2")])
    assert undo_rollback(storage, 1).brought_back == [2]
    assert read_root(storage, 2).attempt == "a2"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("served", "undo"),
    [
        (True, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, False), (False, True), (True, False))),
    ],
)
def test_killed_at_any_request_it_leaves_a_run_and_is_continued(
    monkeypatch: pytest.MonkeyPatch, undo: bool, served: bool
) -> None:
    inline_pools(monkeypatch)
    for after in range(200):
        storage = saved(MemoryStorage(), 1, 2, 3, 4)
        if undo:
            rollback(storage, 1)
        work = undo_rollback if undo else rollback
        try:
            work(Dead(storage, after, served=served), 1)
            is_killed = False
        except Killed:
            is_killed = True
        there = committed_steps(storage)
        assert there == [1, 2, 3, 4][: len(there)], f"killed at request {after}"
        assert there
        assert not any(half_of(storage, step) for step in there)
        work(storage, 1)
        assert committed_steps(storage) == ([1, 2, 3, 4] if undo else [1])
        assert bool([key for key in keys(storage) if key.endswith(ASIDE_NAME)]) is not undo
        undo_rollback(storage, 1)
        assert [restored_value(storage, step, LAYOUT) for step in committed_steps(storage)] == [1, 2, 3, 4]
        if not is_killed:
            assert after > 10
            return
    raise AssertionError("it never came to its end")


def test_pinned_newer_steps_are_refused() -> None:
    storage = saved(MemoryStorage(), 1, 2, 3, 4)
    pin(storage, 1)
    pin(storage, 2)
    pin(storage, 3)
    before = keys(storage)
    with pytest.raises(UserError, match="steps 2, 3 of memory://test are pinned") as caught:
        rollback(storage, 1)
    assert caught.value.hint == "ckptkit unpin memory://test/step-000000002 memory://test/step-000000003"
    assert keys(storage) == before
    assert rollback(storage, 3).set_aside == [4]


def test_a_pin_that_is_put_meanwhile_brings_the_root_back(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    saved(storage, 1, 2, 3)
    storage.before = lambda deleted: storage.write(pin_key(2), b"") if deleted == [root_key(2)] else None
    with pytest.raises(UserError, match=r"step 2 of .* is pinned"):
        rollback(storage, 1)
    assert committed_steps(storage) == [1, 2]
    assert storage.info(aside_key(2, "a2")) is None


def test_a_step_that_is_pruned_meanwhile_brings_a_newer_one_back(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    saved(storage, 1, 2)
    other = open_storage(tmp_path)
    storage.before = lambda deleted: other.delete([root_key(1)]) if deleted == [root_key(2)] else None
    with pytest.raises(StorageError, match=r"step 1 of .* was pruned meanwhile, so step 2 stays"):
        rollback(storage, 1)
    assert committed_steps(storage) == [2]
    assert storage.info(aside_key(2, "a2")) is None


def test_a_prune_brings_back_what_it_took_beside_a_rollback(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    saved(storage, 1, 2)
    other = open_storage(tmp_path)
    storage.before = lambda deleted: rollback(other, 1) if deleted == [root_key(1)] else None
    assert prune(storage, LAST).deleted == []
    assert committed_steps(storage) == [1]
    assert restored_value(storage, 1, LAYOUT) == 1


def test_a_step_that_is_missing_or_damaged_is_not_gone_back_to() -> None:
    storage = saved(MemoryStorage(), 1, 2, 3)
    with pytest.raises(UserError, match="holds no committed step 7"):
        rollback(storage, 7)
    storage.delete(["step-000000001/a1/part-00000.safetensors"])
    with pytest.raises(CheckFailed, match=r"step 1 of memory://test is damaged: .*part-00000.safetensors is missing"):
        rollback(storage, 1)
    assert committed_steps(storage) == [1, 2, 3]


def test_a_newer_step_whose_root_is_damaged_goes_into_quarantine() -> None:
    storage = saved(MemoryStorage(), 1, 2, 3)
    storage.write(root_key(2), b"not a root")
    report = rollback(storage, 1)
    assert (report.set_aside, report.quarantined) == ([3], [2])
    assert committed_steps(storage) == [1]
    assert undo_rollback(storage, 1).brought_back == [3]


def test_what_is_not_whole_any_more_stays_aside() -> None:
    storage = saved(MemoryStorage(), 1, 2, 3)
    rollback(storage, 1)
    storage.delete(["step-000000002/a2/part-00001.index"])
    report = undo_rollback(storage, 1)
    assert report.brought_back == [3]
    assert "part-00001.index is missing" in report.left[2]
    assert committed_steps(storage) == [1, 3]


def test_a_sweep_leaves_what_was_set_aside_until_that_is_a_day_ago(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2)
    age(tmp_path, 9 * DAY_S)
    rollback(storage, 1)
    write_steps(storage, 3)  # the run was saved past it
    assert prune(storage, LAST).orphans == []
    prune(storage, Retention(), orphans_older_than_s=3600)
    assert undo_rollback(storage, 1).brought_back == [2]
    rollback(storage, 2)
    write_steps(storage, 4)
    age(tmp_path, DAY_S + 60)
    report = prune(storage, Retention())
    assert report.orphans == ["step-000000003/a1"]
    assert undo_rollback(storage, 1).brought_back == []


def test_a_sweep_takes_the_root_that_is_aside_first_and_sees_one_that_comes_back(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    saved(storage, 1, 2)
    rollback(storage, 1)
    root = storage.read(aside_key(2, "a2"))
    deleted: list[list[str]] = []

    def come_back(going: list[str]) -> None:
        deleted.append(going)
        if going == [aside_key(2, "a2")]:
            open_storage(tmp_path).write(root_key(2), root)

    storage.after = come_back
    prune(storage, Retention(), orphans_older_than_s=0)
    assert deleted[0] == [aside_key(2, "a2")]
    assert committed_steps(storage) == [1, 2]
    assert not half_of(storage, 2)


def test_an_undo_beside_a_sweep_commits_no_half_step(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    saved(storage, 1, 2)
    rollback(storage, 1)
    other = open_storage(tmp_path)

    class Swept(FaultStorage):
        """Takes what is aside as the root comes back."""

        def write(self, key: str, data: bytes, **options: object) -> None:  # type: ignore[override]
            if key == root_key(2):
                prune(other, Retention(), orphans_older_than_s=0)
            super().write(key, data, **options)  # type: ignore[arg-type]

    with pytest.raises(StorageError, match="swept or brought back meanwhile"):
        undo_rollback(Swept(storage), 1)
    assert committed_steps(storage) == [1]
    assert undo_rollback(storage, 1).left.keys() == {2}


def test_a_save_that_takes_the_place_meanwhile_wins() -> None:
    storage = saved(MemoryStorage(), 1, 2)
    rollback(storage, 1)

    class Late(FaultStorage):
        """Another job saves the step as it comes back."""

        def write(self, key: str, data: bytes, **options: object) -> None:  # type: ignore[override]
            saved(storage, 2, attempt="b", first_value=10)
            super().write(key, data, **options)  # type: ignore[arg-type]

    with pytest.raises(AlreadyExists):
        undo_rollback(Late(storage), 1)
    assert restored_value(storage, 2, LAYOUT) == 12


def test_nothing_is_changed_through_a_link(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "run")
    saved(storage, 1, 3)
    saved(open_storage(tmp_path / "other"), 2)
    (tmp_path / "run/step-000000002").symlink_to(tmp_path / "other/step-000000002")
    assert committed_steps(storage) == [1, 2, 3]
    with pytest.raises(UserError, match="step-000000002 is a link") as caught:
        rollback(storage, 1)
    assert str(caught.value.hint).startswith("ckptkit rm ")
    assert committed_steps(storage) == [1, 2, 3]


def test_a_run_goes_back_whatever_else_it_holds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_steps(run.storage, 5, 10, 15)
    run.storage.write("step-000000010/notes.txt", b"mine")
    started = time.time()
    assert run.rollback(5).set_aside == [15, 10]
    assert run.newest() == 5
    assert run.storage.read("step-000000010/notes.txt") == b"mine"
    info = run.storage.info(aside_key(10, "a1"))
    assert info is not None
    assert info.modified_s > started - 2
    assert run.undo_rollback(5).brought_back == [10, 15]
    assert run.set_aside_after(7).set_aside == [15, 10]
