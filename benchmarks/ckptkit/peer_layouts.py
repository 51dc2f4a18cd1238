"""What peers save and load of a checkpoint under some layout, one rank after the other in this process."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit import Box, CheckpointReader, ChunkTable, Coords, ParallelLayout, Partition, Run


@dataclass(frozen=True)
class Peer:
    """How one writes what a step holds as the ranks of a layout would, and reads what each rank of another holds."""

    save: Callable[[CheckpointReader, ParallelLayout, Path], None]
    load: Callable[[Path, Path, ParallelLayout], int]


def rank_tables(reader: CheckpointReader, layout: ParallelLayout) -> list[ChunkTable]:
    """Return what each rank of a layout holds, each element once."""
    return [rank_table(reader, layout, rank) for rank in range(layout.world_size)]


def rank_table(reader: CheckpointReader, layout: ParallelLayout, rank: int) -> ChunkTable:
    """Return what one rank holds."""
    partition = Partition(list(reader.root.tensors.values()), reader.root.num_layers, layout)
    return partition.table(layout.coords(rank))


def boxes_of(table: ChunkTable) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return the boxes of a rank that holds whole boxes: name, offset and shape."""
    boxes = [(table.names[tensor], table.box(row)) for row, tensor in enumerate(table.tensor.tolist())]
    return [(name, box.offset, box.shape) for name, box in boxes if box.numel]


def save_by_dcp(reader: CheckpointReader, layout: ParallelLayout, folder: Path) -> None:
    """Write what a step holds as the ranks of a layout would by DCP, a file a rank."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    shapes = {name: torch.Size(info.shape) for name, info in reader.root.tensors.items()}
    tables = rank_tables(reader, layout)
    plans = [
        SavePlan([
            WriteItem(
                MetadataIndex(name, offset), WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)), TensorProperties(torch.float32),
                    shapes[name],
                ),
            )
            for name, offset, shape in boxes_of(table)
        ])
        for table in tables
    ]  # fmt: skip
    plans, metadata = create_default_global_save_plan(plans)
    writer = dcp.FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.prepare_local_plan(plans[0])
    results = []
    for plan, table in zip(writer.prepare_global_plan(plans), tables, strict=True):
        memory = np.empty(int(table.size_bytes.sum()), np.uint8)
        begins = np.cumsum(table.size_bytes) - table.size_bytes
        reader.execute(reader.plan(table), memory.ctypes.data + begins)
        tensors = {
            (table.names[tensor], table.box(row).offset): torch.from_numpy(
                memory[begin : begin + size].view(np.float32).reshape(table.box(row).shape)
            )
            for row, (tensor, begin, size) in enumerate(
                zip(table.tensor.tolist(), begins.tolist(), table.size_bytes.tolist(), strict=True)
            )
        }
        planner = Resolving(tensors)
        results.append(writer.write_data(plan, planner).wait())  # type: ignore[arg-type]
    writer.finish(metadata, results)


class Resolving:
    """What a DCP writer or reader asks of a planner: the tensor of an item."""

    def __init__(self, tensors: dict[tuple[str, tuple[int, ...]], Any]) -> None:
        self._tensors = tensors

    def resolve_data(self, item: Any) -> Any:
        return self._tensors[item.index.fqn, tuple(item.index.offset)]

    def resolve_tensor(self, item: Any) -> Any:
        whole = self._tensors[item.dest_index.fqn, tuple(item.dest_index.offset)]
        return whole[tuple(slice(a, a + n) for a, n in zip(item.dest_offsets, item.lengths, strict=True))]

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        """Nothing is left to do."""


def load_by_dcp(place: Path, run: Path, layout: ParallelLayout) -> int:
    """Have DCP read what each rank of a layout holds; return how many bytes that is."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    with Run(str(run)).open(Run(str(run)).resolve()) as reader:
        tables = rank_tables(reader, layout)
    needed = 0
    for table in tables:
        source = dcp.FileSystemReader(place)
        metadata = source.read_metadata()
        source.set_up_storage_reader(metadata, True)
        items, tensors = [], {}
        for name, offset, shape in boxes_of(table):
            chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
            items += create_read_items_for_chunk_list(name, metadata.state_dict_metadata[name], [chunk])
            tensors[name, offset] = torch.empty(shape)
        source.read_data(LoadPlan(items), Resolving(tensors)).wait()  # type: ignore[arg-type]
        needed += sum(each.nbytes for each in tensors.values())
    return needed


class Cuts:
    """How the tensors of a run are cut under a layout, in the words of torch_checkpointing."""

    def __init__(self, reader: CheckpointReader, layout: ParallelLayout) -> None:
        self._root, self._layout = reader.root, layout
        self.tables = rank_tables(reader, layout)

    def of(self, name: str, me: int = 0) -> Any:
        """Return the sharding of a tensor: the ranks of its stage in parts, each of which some hold alike.

        Rank `me` and rank 0 change names: without torch.distributed a program is rank 0.
        """
        from torch_checkpointing.dtensor_metadata import (
            DTensorShardingMetadata,
            ReplicateSpec,
            ShardSpec,
            get_device_mesh_spec,
        )

        info, layout = self._root.tensors[name], self._layout
        stage = next(pp for pp in range(layout.pp) if info.placement.on_stage(self._root.num_layers, layout, pp))
        ranks = tuple(layout.rank(Coords(tp=tp, pp=stage)) for tp in range(layout.tp))
        ranks = tuple({0: me, me: 0}.get(rank, rank) for rank in ranks)
        cuts = info.placement.cuts
        parts = cuts[0].num_parts(layout.tp) if cuts else 1
        mesh = get_device_mesh_spec("cpu", (parts, layout.tp // parts), ranks)
        stride = [int(np.prod(info.shape[dim + 1 :])) for dim in range(len(info.shape))]
        placements = (ShardSpec(cuts[0].dim) if cuts else ReplicateSpec(), ReplicateSpec())
        return DTensorShardingMetadata(info.shape, "torch.float32", tuple(stride), mesh, placements)

    def tensors_of(self, rank: int) -> dict[str, Any]:
        """Return empty tensors of what a rank holds, by name, replicas included."""
        import torch
        from torch_checkpointing.default_resharder import compute_local_shard_info

        untied = [name for name in self._root.tensors if self._root.tensors[name].placement.tied_to is None]
        sharding = {name: self.of(name) for name in untied}
        return {
            name: torch.empty(compute_local_shard_info(each, rank)[0])
            for name, each in sharding.items()
            if rank in each.mesh_spec.mesh_data
        }


def save_by_torch_checkpointing(reader: CheckpointReader, layout: ParallelLayout, folder: Path) -> None:
    """Write what a step holds as the ranks of a layout would by torch_checkpointing, a file a rank."""
    import torch
    from torch_checkpointing.default_resharder import compute_local_shard_info
    from torch_checkpointing.distributed_metadata import (
        DistributedItemMetadata,
        DistributedMetadata,
        GlobalObjectMetadata,
    )  # fmt: skip

    cuts, groups = Cuts(reader, layout), {}
    folder.mkdir()
    for rank in range(layout.world_size):
        tensors = cuts.tensors_of(rank)
        chunks = []
        for name, tensor in tensors.items():
            sharding = cuts.of(name)
            offset = compute_local_shard_info(sharding, rank)[1]
            chunks.append((reader.root.tensors[name], Box(tuple(offset), tuple(tensor.shape)), 0, tensor.numel()))
            groups[(name,)] = [GlobalObjectMetadata(sharding, sharding.mesh_spec.mesh_data)]
        table = ChunkTable.of(chunks)
        addresses = np.array([each.data_ptr() for each in tensors.values()], np.uint64)
        reader.execute(reader.plan(table), addresses)
        torch.save(tensors, folder / f"model_{rank}.pt")
    item = DistributedItemMetadata(groups, dict.fromkeys(range(layout.world_size)))
    metadata = DistributedMetadata({"model": item}, layout.world_size)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata.to_dict()))


def load_by_torch_checkpointing(place: Path, run: Path, layout: ParallelLayout) -> int:
    """Have torch_checkpointing read what each rank of a layout holds; return how many bytes that is."""
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.distributed_metadata import DistributedMetadata
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    with Run(str(run)).open(Run(str(run)).resolve()) as reader:
        cuts = Cuts(reader, layout)
    storage, needed = LocalFileSystemStorageConfig(use_direct_io=False).create_storage(), 0
    for rank in range(layout.world_size):
        source = DistributedMetadata.from_dict(pickle.loads((place / "metadata.pkl").read_bytes())).metadata["model"]
        held = cuts.tensors_of(rank)
        wanted = {(name,): cuts.of(name, rank) for name in held}
        left = DefaultResharder().load(place, "model", wanted, source, held, storage)
        assert not left, left
        needed += sum(each.nbytes for each in held.values())
    return needed


PEERS = {"DCP": Peer(save_by_dcp, load_by_dcp)}
if find_spec("torch_checkpointing") is not None:
    PEERS["torch_checkpointing"] = Peer(save_by_torch_checkpointing, load_by_torch_checkpointing)
