"""A Run finds, reads and quarantines committed steps, on every kind of storage, and remembers nothing."""

import errno
from pathlib import Path

import pytest

from ckptkit import Run, hash_checkpoint
from tests.ckptkit.support.model_tables import values
from tests.ckptkit.support.saves import ONE, SMALL, assert_restored, pieces_of, save_whole
from threefold.errors import StorageError, UserError
from threefold.storage.local import LocalStorage, local_failure


def test_steps_are_found_as_they_come_and_go(url: str) -> None:
    run = Run(url)
    assert (run.steps(), run.newest(), run.is_committed(3), list(run.newest_first())) == ([], None, False, [])
    for step in (20, 3, 100):
        run.storage.write(f"step-{step:09d}/root.json", b"{}")
    run.storage.write("step-000000200/a/part-00000.safetensors", b"not committed")
    assert (run.steps(), run.newest(), run.resolve()) == ([3, 20, 100], 100, 100)
    assert list(run.newest_first()) == [100, 20, 3]
    assert [run.is_committed(step, durably=True) for step in (3, 4, 200)] == [True, False, False]
    run.storage.delete(["step-000000100/root.json"])
    assert (run.newest(), run.is_committed(100)) == (20, False)


def test_the_address_of_a_step_means_that_step_alone(url: str) -> None:
    for step in (3, 20):
        Run(url).storage.write(f"step-{step:09d}/root.json", b"{}")
    run = Run(f"{url}/step-000000003/")
    assert (run.url, run.named, run.steps(), run.newest(), run.resolve()) == (url, 3, [3], 3, 3)
    with pytest.raises(UserError, match="holds no committed step 4") as caught:
        Run(f"{url}/step-000000004").resolve()
    assert caught.value.hint == f"ckptkit ls {run.storage.url}"


def test_nothing_is_opened_before_it_is_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path / "none")
    assert run.newest() is None
    with pytest.raises(StorageError, match="does not exist"):
        run.resolve()
    secret = Run("s3://key:hidden@host/bucket/run")  # nothing answers there
    assert "hidden" not in repr(secret)


def test_a_step_is_read_and_restored(url: str, tmp_path: Path) -> None:
    assert save_whole(tmp_path / "saved", 7, SMALL).ok
    run = Run(tmp_path / "saved")
    assert run.root(7).step == 7
    pieces = pieces_of(SMALL, ONE, 0)
    assert run.restore(7, pieces, tensors=SMALL).attempt == run.root(7).attempt
    assert_restored(pieces, pieces_of(SMALL, ONE, 0, values(SMALL)))
    with run.open(7) as reader:
        assert hash_checkpoint(reader)
    with pytest.raises(UserError, match="no committed step 8"):
        run.root(8)
    with pytest.raises(UserError, match="no committed step 8"):
        run.restore(8, [])


def test_a_quarantined_step_is_not_committed_and_keeps_its_root(url: str) -> None:
    run = Run(url)
    run.storage.write("step-000000002/root.json", b"damaged")
    assert [run.quarantine(step) for step in (1, 2, 2)] == [False, True, False]
    assert [item.key for item in run.storage.list()] == ["step-000000002/damaged-root.json"]
    assert run.storage.read("step-000000002/damaged-root.json") == b"damaged"
    assert run.steps() == []


def test_a_quarantined_step_can_be_saved_again(tmp_path: Path) -> None:
    assert save_whole(tmp_path, 1, SMALL).ok
    run = Run(tmp_path)
    assert run.quarantine(1)
    assert save_whole(tmp_path, 1, SMALL, attempt="again").ok
    assert run.root(1).attempt.startswith("again")


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_root_that_a_disk_does_not_give_back_is_quarantined_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def copy(self: LocalStorage, source: str, target: str) -> None:
        error = OSError(code, "as the disk says")
        raise local_failure(error, "read", source) from error

    assert save_whole(tmp_path, 1, SMALL).ok
    monkeypatch.setattr(LocalStorage, "copy", copy)
    run = Run(tmp_path)
    if code == errno.EIO:
        assert run.quarantine(1)
        assert (tmp_path / "step-000000001/damaged-root.json").read_bytes() == b""
        assert run.steps() == []
    else:
        with pytest.raises(StorageError, match="as the disk says"):
            run.quarantine(1)
        assert run.steps() == [1]
