"""Which rank saves which elements: of a model of true size each once, planned without any of its data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit import plan_save
from ckptkit.plan.cover import Cover
from threefold.options import FlagText
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


def mesh_on(config: Config, num_ranks: int, rank: int) -> Any:
    return mesh_of(config, rank, META, network=Nobody(num_ranks))
