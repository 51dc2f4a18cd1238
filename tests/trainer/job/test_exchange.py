"""The ranks of a job restore together over gloo: the bytes a restore alone gives, each read once, errors on all."""

from pathlib import Path

import numpy as np
import pytest

from ckptkit.loading.exchange import agreed
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore_from
from ckptkit.model.layout import ParallelLayout
from tests.ckptkit.support.exchange_program import BIG
from tests.ckptkit.support.model_tables import values
from tests.ckptkit.support.saves import assert_restored, pieces_of, save_whole
from tests.trainer.support.ranks import run_ranks
from threefold.errors import CheckFailed
from threefold.storage import open_storage

LAYOUTS = {0: ("tp1", 0), 1: ("tp2", 1)}  # rank 2 wants nothing


def restore_together(rank: int, url: str) -> int:
    from ckptkit.torch import GroupExchange

    layout, place = LAYOUTS.get(rank, ("tp1", -1))
    pieces = pieces_of(BIG, ParallelLayout.parse(layout), place) if place >= 0 else []
    with CheckpointReader(open_storage(url), 1, exchange=GroupExchange()) as reader:
        restore_from(reader, pieces, tensors=BIG)
        if pieces:
            assert_restored(pieces, pieces_of(BIG, ParallelLayout.parse(layout), place, values(BIG)))
        return reader.bytes_read


def talk(rank: int) -> bool:
    from ckptkit.torch import GroupExchange

    exchange = GroupExchange()
    assert exchange.all_gather(b"x" * rank) == [b"x" * r for r in range(3)]
    for number in (0, 3, 50_000):
        got = exchange.all_to_all([np.full(number * to, rank, np.uint8).data for to in range(3)])
        assert [bytes(each) for each in got] == [bytes([r]) * number * rank for r in range(3)]

    def fail() -> bytes:
        if rank == 1:
            raise CheckFailed("it is damaged")
        return b""

    with pytest.raises(CheckFailed, match="it is damaged"):
        agreed(exchange, fail)
    return True


@pytest.mark.ci
@pytest.mark.slow
def test_each_byte_is_read_once_a_job(tmp_path: Path) -> None:
    assert save_whole(tmp_path, 1, BIG).ok
    read = run_ranks(3, restore_together, str(tmp_path))
    needed = sum(info.size_bytes for info in BIG)
    assert needed <= sum(read) <= 1.05 * needed
    assert read[2] == 0


@pytest.mark.ci
@pytest.mark.slow
def test_bytes_and_errors_reach_all_ranks() -> None:
    assert run_ranks(3, talk) == [True] * 3
