"""One answer of a server is spoiled, whichever it is: nothing is called damaged or lost, and a line says so."""

from collections.abc import Callable

import pytest

from ckptkit.check.verify import verify_checkpoint
from ckptkit.format.keys import Seat
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import committed_attempt
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.copy import copy_step
from ckptkit.rewrite.reshard import reshard
from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from ckptkit.writer.commit import await_commit
from ckptkit.writer.step import clear
from tests.ckptkit.support.small_steps import hash_of, restored_value, save_rank, save_ranks
from tests.support.flipped import FlippedStorage
from threefold.errors import CheckFailed
from threefold.storage import Storage
from threefold.storage.memory import MemoryStorage

LAYOUT = ParallelLayout(tp=2)
SEAT = Seat("", 2, "a2", 0, 2)


def verified(storage: Storage) -> object:
    with CheckpointReader(storage, 2) as reader:
        return verify_checkpoint(reader).faults


def resharded(storage: Storage) -> object:
    target = MemoryStorage()
    with CheckpointReader(storage, 2) as reader:
        reshard(reader, target, ParallelLayout())
    return hash_of(target, 2)


def copied(storage: Storage) -> object:
    target = MemoryStorage()
    with CheckpointReader(storage, 2) as reader:
        copy_step(reader, target, verify=True)
    return hash_of(target, 2)


def copied_again(storage: FlippedStorage) -> object:
    with CheckpointReader(storage.within, 2) as reader:
        return copy_step(reader, storage).bytes_copied


def pruned(storage: Storage) -> object:
    return prune(storage, Retention(keep_last=2)).deleted


def awaited(storage: Storage) -> object:
    return await_commit(storage, SEAT, lambda: -1.0)


def cleared(storage: Storage) -> object:
    clear(storage, SEAT)
    return restored_value(storage, 2, LAYOUT)


ACTS: dict[str, Callable[[FlippedStorage], object]] = {
    "load": lambda storage: restored_value(storage, 2, ParallelLayout(dp=2)),
    "verify": verified,
    "reshard": resharded,
    "copy": copied,
    "copy onto itself": copied_again,
    "prune": pruned,
    "who committed": lambda storage: committed_attempt(storage, 2),
    "wait for the commit": awaited,
    "clear": cleared,
}


@pytest.fixture
def run() -> MemoryStorage:
    storage = MemoryStorage()
    for step in (1, 2):
        save_ranks(storage, step, f"a{step}", LAYOUT, step)
    return storage


@pytest.mark.parametrize("part", [0.02, 0.5, 0.99])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_bit_that_flips_on_the_way_is_no_damage(
    run: MemoryStorage, capsys: pytest.CaptureFixture[str], act: Callable[[FlippedStorage], object], part: float
) -> None:
    clean = FlippedStorage(run)
    expected = act(clean)
    assert clean.reads
    capsys.readouterr()
    for number in range(len(clean.reads)):
        assert act(FlippedStorage(run, number, part=part)) == expected
    if act in (ACTS["load"], ACTS["reshard"], verified, copied):
        assert "differed once, then was right" in capsys.readouterr().err


@pytest.mark.parametrize("act", [ACTS["load"], ACTS["verify"], ACTS["reshard"]], ids=["load", "verify", "reshard"])
def test_an_answer_that_ends_early_is_no_damage(run: MemoryStorage, act: Callable[[FlippedStorage], object]) -> None:
    clean = FlippedStorage(run)
    expected = act(clean)
    for number, key in enumerate(clean.reads):
        if not key.endswith("root.json"):
            assert act(FlippedStorage(run, number, cuts=True)) == expected


def test_a_commit_reads_the_indexes_of_others_once_more() -> None:
    for number in range(4):
        storage = MemoryStorage()
        for rank in (1, 0):
            seen = FlippedStorage(storage, -1 if rank else number)
            save_rank(seen, Seat("", 1, "a", rank, 2), LAYOUT, 7, awaits_commit=False)
        assert restored_value(storage, 1, LAYOUT) == 7


def test_what_is_stored_damaged_is_damage(run: MemoryStorage, capsys: pytest.CaptureFixture[str]) -> None:
    for key in list(run.list_keys("step-000000002/")):
        storage = MemoryStorage()
        for each in run.list_keys():
            storage.write(each, run.read(each))
        content = bytearray(run.read(key))
        content[len(content) // 2] ^= 1
        storage.write(key, bytes(content))
        with pytest.raises(CheckFailed, match=r"damaged|not a"):
            ACTS["load"](storage)
    assert "then was right" not in capsys.readouterr().err
