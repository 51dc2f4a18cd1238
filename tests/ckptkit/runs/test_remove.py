"""Steps removed by name: roots first, nothing but the format's files, and neither what is pinned nor the newest."""

from pathlib import Path

import pytest

from ckptkit import Run
from ckptkit.runs.catalogue import committed_steps, pin
from ckptkit.runs.pruning import remove
from tests.ckptkit.support.inline_pools import inline_pools
from tests.ckptkit.support.programs import Killed
from tests.ckptkit.support.run_model import Dead
from tests.ckptkit.support.small_steps import LAYOUTS, half_of, save_ranks
from tests.ckptkit.support.steps import Watched, keys, write_steps
from threefold.errors import UserError
from threefold.storage import Storage, open_storage
from threefold.storage.memory import MemoryStorage


def test_steps_go_with_their_files_and_no_others(storage: Storage) -> None:
    write_steps(storage, 1, 2, 3)
    storage.write("step-000000001/notes.txt", b"mine")
    report = remove(storage, [1, 2])
    assert (report.deleted, report.kept, report.num_files) == ([1, 2], {}, 10)
    assert report.left_alone == ["step-000000001/notes.txt"]
    assert committed_steps(storage) == [3]
    assert {key.split("/")[0] for key in keys(storage)} == {"step-000000001", "step-000000003"}
    assert storage.read("step-000000001/notes.txt") == b"mine"


def test_the_roots_go_first(tmp_path: Path) -> None:
    storage, deleted = Watched(tmp_path), []
    write_steps(storage, 1, 2)
    storage.before = deleted.append  # type: ignore[assignment]
    remove(storage, [1])
    assert deleted[0] == ["step-000000001/root.json"]
    assert len(deleted[1]) == 4


def test_what_is_refused_leaves_all(storage: Storage) -> None:
    write_steps(storage, 1, 2, 3)
    pin(storage, 2)
    before = keys(storage)
    with pytest.raises(UserError, match="holds no committed step 7"):
        remove(storage, [1, 7])
    with pytest.raises(UserError, match=r"step 2 of .* is pinned") as pinned:
        remove(storage, [1, 2], newest_too=True)
    assert pinned.value.hint == f"ckptkit unpin {storage.url}/step-000000002"
    with pytest.raises(UserError, match="step 3 is the newest good step of") as newest:
        remove(storage, [1, 3])
    assert newest.value.hint == f"to lose it: ckptkit rm {storage.url}/step-000000003 --newest-too"
    assert keys(storage) == before


def test_the_newest_and_the_only_step_go_when_asked_for() -> None:
    storage = MemoryStorage()
    write_steps(storage, 1, 2)
    assert remove(storage, [2], newest_too=True).deleted == [2]
    with pytest.raises(UserError, match="step 1 is the only step of"):
        remove(storage, [1])
    assert remove(storage, [1], newest_too=True, dry_run=True).num_files == 5
    assert committed_steps(storage) == [1]
    assert remove(storage, [1], newest_too=True).num_files == 5
    assert keys(storage) == []


def test_a_damaged_newest_step_may_go_and_the_good_one_before_it_may_not() -> None:
    storage = MemoryStorage()
    write_steps(storage, 1, 2, 3)
    storage.delete(["step-000000003/a1/part-00000.safetensors"])
    with pytest.raises(UserError, match="step 2 is the newest good step"):
        remove(storage, [2])
    assert remove(storage, [3]).deleted == [3]


def test_of_a_step_whose_root_cannot_be_read_the_root_goes() -> None:
    storage = MemoryStorage()
    write_steps(storage, 1, 2)
    storage.write("step-000000001/root.json", b"not a root")
    assert remove(storage, [1]).deleted == [1]
    assert committed_steps(storage) == [2]
    assert len([key for key in keys(storage) if key.startswith("step-000000001/a1/")]) == 4


def test_of_a_link_the_link_goes(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    write_steps(run.storage, 1, 3)
    write_steps(open_storage(tmp_path / "other"), 2)
    link = tmp_path / "run/step-000000002"
    link.symlink_to(tmp_path / "other/step-000000002")
    assert run.remove(2).deleted == [2]
    assert not link.is_symlink()
    assert committed_steps(open_storage(tmp_path / "other")) == [2]


def test_a_pin_that_is_put_meanwhile_keeps_its_step(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2, 3)

    def pin_too(going: list[str]) -> None:
        if going == ["step-000000001/root.json"]:
            pin(open_storage(tmp_path), 1)

    storage.before = pin_too
    report = remove(storage, [1, 2])
    assert (report.deleted, report.kept) == ([2], {1: ["pinned meanwhile"]})
    assert committed_steps(storage) == [1, 3]


@pytest.mark.parametrize("served", [False, True])
def test_killed_at_any_request_no_half_step_is_listed(monkeypatch: pytest.MonkeyPatch, served: bool) -> None:
    inline_pools(monkeypatch)
    for after in range(200):
        storage = MemoryStorage()
        for step in (1, 2, 3):
            save_ranks(storage, step, f"a{step}", LAYOUTS[1], step)
        try:
            remove(Dead(storage, after, served=served), [1, 2])
            is_killed = False
        except Killed:
            is_killed = True
        there = committed_steps(storage)
        assert there[-1] == 3
        assert not any(half_of(storage, step) for step in there), f"killed at request {after}"
        if not is_killed:
            assert there == [3]
            assert after > 10
            return
    raise AssertionError("it never came to its end")
