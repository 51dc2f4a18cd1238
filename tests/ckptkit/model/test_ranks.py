"""Partition: what many ranks store costs no more than one look at the table, and is what each rank would say alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.check.verify import verify_checkpoint
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model import ranks as partition_module
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.ranks import Partition
from ckptkit.model.tensor import storage_order
from ckptkit.rewrite import target_files as target_files_module
from ckptkit.rewrite.reshard import reshard
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, rank_chunks, values
from threefold.storage import open_storage

LAYERS = 4
TENSORS = gpt_tensors(LAYERS, tied=True)


def counted(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[None]:
    """A list that grows by one with each call of a function."""
    calls: list[None] = []
    usual: Callable[..., Any] = getattr(place, name)

    def call(*arguments: Any) -> Any:
        calls.append(None)
        return usual(*arguments)

    monkeypatch.setattr(place, name, call)
    return calls


@pytest.mark.parametrize("layout", [ParallelLayout(tp=2, dp=3, pp=2), ParallelLayout(tp=8), ParallelLayout(dp=7)])
def test_all_ranks_at_once_and_one_by_one_store_the_same(layout: ParallelLayout) -> None:
    partition = Partition(TENSORS, LAYERS, layout)
    order = {info.name: place for place, info in enumerate(sorted(TENSORS, key=storage_order))}
    for rank in range(layout.world_size):
        chunks = partition.chunks(layout.coords(rank))
        assert chunks == rank_chunks(TENSORS, LAYERS, layout, layout.coords(rank))
        assert [info.name for info, *_ in chunks] == sorted((info.name for info, *_ in chunks), key=order.__getitem__)


def test_a_table_is_that_of_the_chunks() -> None:
    layout = ParallelLayout(tp=2, dp=3, pp=2)
    partition = Partition(TENSORS, LAYERS, layout)
    for rank in range(layout.world_size):
        table, same = partition.table(layout.coords(rank)), ChunkTable.of(partition.chunks(layout.coords(rank)))
        assert (table.names, table.dtypes, table.tensors.ndims) == (same.names, same.dtypes, same.tensors.ndims)
        for column in ("tensor", "offset", "shape", "start", "stop"):
            np.testing.assert_array_equal(getattr(table, column), getattr(same, column))


def test_ranks_that_store_the_same_tensors_share_their_names() -> None:
    layout = ParallelLayout(tp=4)
    partition = Partition(TENSORS, LAYERS, layout)
    tables = [partition.table(layout.coords(rank)) for rank in range(4)]
    assert tables[1].tensors is tables[2].tensors is tables[3].tensors
    assert set(tables[1].names) < set(tables[0].names), "replicated tensors are stored by the first rank alone"


def test_a_reshard_to_many_ranks_sorts_the_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(open_storage(tmp_path / "a"), 1, ParallelLayout(tp=2), LAYERS, TENSORS, values(TENSORS))
    sorts = counted(monkeypatch, partition_module, "storage_order")
    looks = counted(monkeypatch, target_files_module, "positions_before")
    with CheckpointReader(open_storage(tmp_path / "a"), 1) as reader:
        reshard(reader, open_storage(tmp_path / "b"), ParallelLayout(tp=4, dp=4))
    assert len(sorts) == len(TENSORS)
    assert not looks, "no slab is less than its tensor"


def test_verify_plans_no_load_of_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(open_storage(tmp_path), 1, ParallelLayout(tp=2), LAYERS, TENSORS, values(TENSORS))
    tables = counted(monkeypatch, ChunkTable, "of")
    with CheckpointReader(open_storage(tmp_path), 1) as reader:
        assert verify_checkpoint(reader, share=0).ok
    assert tables == []
