"""Two machines at once export into one folder, or make one step, of other checkpoints: one of them wins whole."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.foreign.folder_claim import FolderClaim
from ckptkit.foreign.zarr.export import export_tensorstore
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.copy import copy_step
from ckptkit.rewrite.reshard import reshard
from tests.ckptkit.support.small_steps import save_ranks
from tests.support.interrupted import interrupted
from threefold.errors import StorageError, UserError
from threefold.storage import Storage, open_storage
from threefold.storage.memory import MemoryStorage

Verb = Callable[[CheckpointReader, Storage], object]


@pytest.fixture
def readers(tmp_path: Path) -> tuple[CheckpointReader, CheckpointReader]:
    """Two checkpoints of the same names, shapes and sizes."""
    for value in (1, 2):
        save_ranks(open_storage(tmp_path / f"run{value}"), 1, f"a{value}", ParallelLayout(tp=2), value)
    return CheckpointReader(open_storage(tmp_path / "run1"), 1), CheckpointReader(open_storage(tmp_path / "run2"), 1)


def objects_of(storage: Storage) -> dict[str, bytes]:
    return {key: storage.read(key) for key in storage.list_keys()}


def alone(verb: Verb, reader: CheckpointReader) -> dict[str, bytes]:
    storage = MemoryStorage()
    verb(reader, storage)
    return objects_of(storage)


def test_of_two_exports_into_one_folder_the_second_is_refused(
    readers: tuple[CheckpointReader, CheckpointReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, refused = MemoryStorage(), list[str]()

    def other() -> None:
        with pytest.raises(UserError, match="was begun from another checkpoint or in another way"):
            export_tensorstore(readers[1], target)
        refused.append("second")

    interrupted(monkeypatch, FolderClaim, "__exit__", other)
    export_tensorstore(readers[0], target)
    assert refused
    assert objects_of(target) == alone(export_tensorstore, readers[0])


@pytest.mark.parametrize("is_done", [True, False])
def test_an_export_that_looked_before_another_began_leaves_that_as_it_is(
    readers: tuple[CheckpointReader, CheckpointReader], monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    target = MemoryStorage()

    def other() -> None:
        if is_done:
            export_tensorstore(readers[1], target)
        else:
            target.write(".export.json", b"of another machine")

    interrupted(monkeypatch, FolderClaim, "__enter__", other)
    with pytest.raises(UserError, match=r"holds files already|was begun from another checkpoint"):
        export_tensorstore(readers[0], target)
    expected = alone(export_tensorstore, readers[1]) if is_done else {".export.json": b"of another machine"}
    assert objects_of(target) == expected


def test_where_nothing_is_exclusive_the_call_that_lost_its_note_fails(
    readers: tuple[CheckpointReader, CheckpointReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = MemoryStorage()
    interrupted(monkeypatch, FolderClaim, "__exit__", lambda: target.write(".export.json", b"of another machine"))
    with pytest.raises(StorageError, match="was taken by another call"):
        export_tensorstore(readers[0], target)


def test_of_two_equal_exports_the_one_that_lost_its_note_fails_and_names_the_other(
    readers: tuple[CheckpointReader, CheckpointReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second goes on as if the first had been killed; the first, at its end, has not made the folder."""
    target, refusals = MemoryStorage(), list[str]()

    def other() -> None:
        interrupted(monkeypatch, FolderClaim, "__exit__", first_ends)
        export_tensorstore(readers[0], target)

    def first_ends() -> None:
        with pytest.raises(StorageError, match=r"was taken by another call \(.+:[0-9]+:[0-9a-f]+\)") as caught:
            claims[0].__exit__(None, None, None)
        refusals.append(str(caught.value))

    claims: list[FolderClaim] = []
    enter = FolderClaim.__enter__
    monkeypatch.setattr(FolderClaim, "__enter__", lambda claim: (claims.append(claim), enter(claim))[1])
    interrupted(monkeypatch, FolderClaim, "__exit__", other)
    with pytest.raises(StorageError, match="was taken by another call, and the note of this one is gone"):
        export_tensorstore(readers[0], target)
    assert refusals
    assert objects_of(target) == alone(export_tensorstore, readers[0])


def test_an_export_does_not_delete_what_another_call_took_over(
    readers: tuple[CheckpointReader, CheckpointReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first finds its source damaged, while the second writes the same."""
    target, ended = MemoryStorage(), list[str]()
    usual = FolderClaim.__exit__

    def first_fails(claim: FolderClaim, *error: Any) -> None:
        monkeypatch.setattr(FolderClaim, "__exit__", second_ends)
        export_tensorstore(readers[0], target)
        usual(claim, UserError, UserError("damaged"), None)

    def second_ends(claim: FolderClaim, *error: Any) -> None:
        usual(claims[0], UserError, UserError("damaged"), None)
        usual(claim, *error)
        ended.append("second")

    claims: list[FolderClaim] = []
    enter = FolderClaim.__enter__
    monkeypatch.setattr(FolderClaim, "__enter__", lambda claim: (claims.append(claim), enter(claim))[1])
    monkeypatch.setattr(FolderClaim, "__exit__", first_fails)
    export_tensorstore(readers[0], target)
    assert ended
    assert objects_of(target) == alone(export_tensorstore, readers[0])


def test_an_export_leaves_the_files_that_another_process_writes(
    readers: tuple[CheckpointReader, CheckpointReader], tmp_path: Path
) -> None:
    """Those of a try that was killed go; a call that runs at the same time keeps its own."""
    export_tensorstore(readers[0], open_storage(tmp_path / "out"))
    chunk = next(path for path in (tmp_path / "out").rglob("0") if path.is_file())
    killed, written = (chunk.with_name(f".{chunk.name}.{number:016x}.tmp") for number in (1, 2))
    for path in (killed, written):
        path.write_bytes(b"begun")
    with open(written, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        export_tensorstore(readers[0], open_storage(tmp_path / "out"))
    assert [killed.exists(), written.exists()] == [False, True]


VERBS: dict[str, Verb] = {
    "copy": copy_step,
    "reshard": lambda reader, storage: reshard(reader, storage, ParallelLayout()),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_of_two_that_make_one_step_the_second_is_refused_and_takes_nothing_from_the_first(
    readers: tuple[CheckpointReader, CheckpointReader], monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    target = MemoryStorage()
    write = MemoryStorage.write

    def late(storage: MemoryStorage, key: str, *args: Any, **options: Any) -> None:
        if key.endswith("root.json") and storage is target:
            monkeypatch.setattr(MemoryStorage, "write", write)
            verb(readers[1], target)
        write(storage, key, *args, **options)

    monkeypatch.setattr(MemoryStorage, "write", late)
    with pytest.raises(UserError, match=r"exists already|by another attempt first"):
        verb(readers[0], target)
    expected = alone(verb, readers[1])
    assert {key: data for key, data in objects_of(target).items() if key in expected} == expected
