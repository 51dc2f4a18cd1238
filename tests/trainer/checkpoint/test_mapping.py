"""Which rank saves which elements: of a model of true size each once, planned without any of its data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit import ParallelLayout, plan_save, save
from ckptkit.check.hash import read_slabs
from ckptkit.loading.reader import CheckpointReader
from ckptkit.plan.cover import Cover
from ckptkit.runs.run import resolve
from tests.support.measured import ckptkit
from threefold.options import FlagText
from tools.make_checkpoint import chunk_values, element_values
from trainer.checkpoint.mapping import saved_pieces, tensor_table
from trainer.config import Config
from trainer.config.walk import load_config
from trainer.engine import Engine
from trainer.mesh.mesh import mesh_of
from trainer.run.stage_times import Nobody

PRESET = Path(__file__).parents[3] / "examples" / "llama-3-8b.toml"
META = torch.device("meta")
LAYOUTS: dict[int, dict[str, Any]] = {
    8: {"dp": 8, "zero_stage": 3},
    64: {"tp": 2, "cp": 2, "pp": 2, "dp": 8, "zero_stage": 2, "virtual_stages": 2, "pipeline_layout": "cost"},
    1024: {"tp": 8, "cp": 2, "pp": 4, "dp": 16, "dp_shard": 4, "zero_stage": 3},
}


def config_on(num_ranks: int) -> Config:
    flags = {f"parallel.{name}": FlagText(str(value), name) for name, value in LAYOUTS[num_ranks].items()}
    flags |= {"train.global_batch_size": FlagText("1024", "batch"), "ops.attention": FlagText("reference", "attention")}
    return load_config(str(PRESET), flags, world_size=num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(8, marks=pytest.mark.ci), pytest.param(64, marks=pytest.mark.ci), 1024],
)
def test_each_element_of_llama_8b_is_saved_by_one_rank(num_ranks: int) -> None:
    config = config_on(num_ranks)
    tensors = tensor_table(Engine(config, mesh_on(config, num_ranks, 0)).table, torch.bfloat16)
    assert sum(np.prod(info.shape, dtype=np.int64) for info in tensors) == 3 * 8_030_261_248  # masters and moments
    cover, left_out = Cover(tensors), Cover(tensors)
    for rank in range(num_ranks):
        pieces = saved_pieces(Engine(config, mesh_on(config, num_ranks, rank)).store)
        for file in plan_save(pieces, tensors).files:
            cover.add(file.draft_index(), f"rank {rank}")
            if rank != 5:
                left_out.add(file.draft_index(), f"rank {rank}")
    assert cover.faults(list) == []
    assert len(left_out.faults(list)) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_8_ranks_saved_of_a_quarter_of_its_widths_moves_in_little_memory(tmp_path: Path) -> None:
    config = config_on(8)
    narrow = {"hidden_size": 1024, "ffn_hidden_size": 3584, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 32064}
    config = replace(config, model=replace(config.model, **narrow))
    tensors = tensor_table(Engine(config, mesh_on(config, 8, 0)).table, torch.bfloat16)
    infos, source, target = {info.name: info for info in tensors}, str(tmp_path / "saved"), str(tmp_path / "moved")
    for rank in reversed(range(8)):  # rank 0 commits
        planned = saved_pieces(Engine(config, mesh_on(config, 8, rank)).store)
        pieces = [
            replace(piece, data=chunk_values(infos[piece.name], piece.box, piece.start, piece.stop))
            for piece in planned
        ]
        save(
            source,
            1,
            pieces,
            tensors=tensors,
            layout=ParallelLayout(dp=8),
            num_layers=32,
            metadata={},
            rank=rank,
            world_size=8,
            attempt="simulated",
            awaits_commit=False,
        )
    report, rss_bytes = ckptkit("reshard", source, target, "--tp", "4", "--pp", "2")
    share_bytes = sum(info.size_bytes for info in tensors) // 8
    print(f"{report['seconds']:.1f} s, share {share_bytes >> 20} MiB, RSS {rss_bytes >> 20} MiB")
    assert rss_bytes <= share_bytes + (600 << 20)
    assert report["bytes_read"] <= 1.05 * report["bytes_needed"]
    assert ckptkit("hash", source)[0]["all"] == ckptkit("hash", target)[0]["all"]
    with CheckpointReader(*resolve(target)) as reader:
        for slab, data in read_slabs(reader):
            positions = np.arange(slab.start, slab.stop, dtype=np.uint64)
            assert np.frombuffer(data, np.float32).tobytes() == element_values(slab.info.name, positions).tobytes()


def mesh_on(config: Config, num_ranks: int, rank: int) -> Any:
    return mesh_of(config, rank, META, network=Nobody(num_ranks))
