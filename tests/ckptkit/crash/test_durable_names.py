"""A process is killed before any of its fsyncs; what others acknowledge, or name in a root, is durable all the same."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ckptkit.foreign.dcp.export import export_dcp
from ckptkit.format.keys import Seat
from ckptkit.format.root import Root
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import root_info
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.copy import copy_step
from ckptkit.rewrite.reshard import WHOLE, reshard
from ckptkit.rewrite.shard import Shard
from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from ckptkit.runs.rollback import rollback, undo_rollback
from ckptkit.writer.commit import await_commit
from ckptkit.writer.step import StepTarget, commit_parts, write_step
from tests.ckptkit.support.small_steps import NUM_LAYERS, TABLE, files, save_ranks
from tests.support.durable_names import DurableNames
from threefold.errors import StorageError
from threefold.storage import Storage, open_storage

LAYOUT = ParallelLayout(tp=2)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DurableNames:
    (tmp_path / "disk").mkdir()
    return DurableNames(tmp_path / "disk", monkeypatch, commits=("root.json",))


def seat(storage: Storage, rank: int, step: int = 1) -> Seat:
    return Seat(storage.address, step, "a", rank, 2)


def put(storage: Storage, rank: int) -> None:
    """Put one rank's files."""
    parts = [source for source, _ in files(7, LAYOUT, rank)]
    write_step(StepTarget(storage, seat(storage, rank)), parts, None, lambda _: -1.0, awaits_commit=False)


def commit(storage: Storage) -> None:
    """Commit as the first rank if the files of all are there."""
    tensors = {info.name: info for info in TABLE}
    root = Root(1, "a", LAYOUT, NUM_LAYERS, tensors, (), {"value": 7})
    commit_parts(StepTarget(storage, seat(storage, 0)), root, lambda: -1.0)


def each_kill(
    names: DurableNames, begin: Callable[[Storage], object], work: Callable[[Storage], object]
) -> Iterator[Storage]:
    """Yield a run for every fsync that work was killed before, and for the work that ended."""

    def run(folder: Path) -> Storage:
        return open_storage(folder / "run")

    return map(run, names.each_kill(lambda folder: begin(run(folder)), lambda folder: work(run(folder))))


def test_no_root_names_a_part_that_another_rank_had_not_made_durable(names: DurableNames) -> None:
    num_committed = 0
    for storage in each_kill(names, lambda storage: put(storage, 0), lambda storage: put(storage, 1)):
        with suppress(StorageError):  # the part is not there
            commit(storage)
            num_committed += 1
            assert names.lost() == []
        assert names.on_commit == []
    assert num_committed >= 2  # the part had its name, and no more; then all of it


def test_a_rank_that_sees_the_root_returns_once_its_name_is_durable(names: DurableNames) -> None:
    def first(storage: Storage) -> None:
        put(storage, 0)
        commit(storage)

    num_committed = 0
    for storage in each_kill(names, lambda storage: put(storage, 1), first):
        with suppress(StorageError):  # no root
            await_commit(storage, seat(storage, 1), lambda: -1.0)
            num_committed += 1
            assert names.lost() == []
    assert num_committed >= 2


@pytest.mark.ci
@pytest.mark.slow
def test_no_step_goes_before_the_name_of_the_newest_is_durable(names: DurableNames) -> None:
    num_pruned = 0
    before, newer = (partial(save_ranks, step=step, attempt="a", layout=LAYOUT, value=step) for step in (1, 2))
    for storage in each_kill(names, before, newer):
        prune(storage, Retention(keep_last=1))
        if root_info(storage, 1) is None:
            num_pruned += 1
            assert names.lost() == []
    assert num_pruned >= 2


def test_steps_that_come_back_are_durable_before_what_kept_them_goes(names: DurableNames) -> None:
    def begin(storage: Storage) -> None:
        for step in (1, 2):
            save_ranks(storage, step, "a", LAYOUT, step)
        rollback(storage, 1)

    for storage in each_kill(names, begin, lambda storage: undo_rollback(storage, 1)):
        undo_rollback(storage, 1)
        assert root_info(storage, 2)
        assert names.lost() == []


def copied(storage: Storage) -> None:
    """Copy the step of a run."""
    with CheckpointReader(storage, 1) as source:
        copy_step(source, open_storage(f"{storage.address}-copies/run"))


def resharded(storage: Storage, shard: Shard = WHOLE) -> None:
    """Make the step of a run, or a share of its files, for another layout."""
    layout = ParallelLayout(pp=shard.count)
    with CheckpointReader(storage, 1) as source:
        reshard(source, open_storage(f"{storage.address}-resharded/run"), layout, shard=shard)


def exported(storage: Storage) -> None:
    """Write the step of a run as a folder of torch.distributed.checkpoint."""
    with CheckpointReader(storage, 1) as source:
        export_dcp(source, open_storage(f"{storage.address}-exported"), kind="dcp", max_shard_bytes=300)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("verb", [copied, resharded, exported])
def test_what_a_killed_verb_left_is_durable_once_the_same_call_ends(
    names: DurableNames, verb: Callable[[Storage], None]
) -> None:
    for storage in each_kill(names, lambda storage: save_ranks(storage, 1, "a", LAYOUT, 7), verb):
        verb(storage)
        assert names.on_commit == names.lost() == []


@pytest.mark.ci
@pytest.mark.slow
def test_the_last_shard_commits_no_file_of_another_that_is_not_durable(names: DurableNames) -> None:
    begin = partial(save_ranks, step=1, attempt="a", layout=LAYOUT, value=7)
    for storage in each_kill(names, begin, lambda storage: resharded(storage, Shard(0, 2))):
        resharded(storage, Shard(1, 2))
        assert names.on_commit == []
        if root_info(open_storage(f"{storage.address}-resharded/run"), 1):
            assert names.lost() == []


def test_an_export_that_is_there_is_durable_once_the_same_call_ends(names: DurableNames) -> None:
    storage = open_storage(names.folder / "run")
    save_ranks(storage, 1, "a", LAYOUT, 7)
    for _ in range(2):
        names.forget()
        exported(storage)
        assert [path for path in names.lost() if path.startswith("run-exported/")] == []
