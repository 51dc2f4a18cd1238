"""Steps that are timed: ranks that share samples have the same random tokens."""

from pathlib import Path

import torch

from benchmarks.trainer.step import random_batch
from trainer.config.walk import load_config
from trainer.mesh.mesh import mesh_of
from trainer.run.stage_times import Nobody


def test_ranks_of_tp_and_pp_have_the_same_tokens_and_those_of_dp_others() -> None:
    model = Path(__file__).parents[2] / "benchmarks/trainer/124m.toml"
    layout = {"parallel.tp": 2, "parallel.pp": 2, "parallel.dp": 2, "train.device": "cpu"}
    config = load_config(
        str(model), {**layout, "train.global_batch_size": 2, "train.micro_batch_size": 1}, world_size=8
    )
    meshes = [mesh_of(config, rank, torch.device("cpu"), network=Nobody(8)) for rank in range(8)]
    first, *others = [(mesh.dp.index, random_batch(config, mesh).tokens) for mesh in meshes]
    assert {index for index, _ in others} == {0, 1}
    assert all(torch.equal(tokens, first[1]) == (index == first[0]) for index, tokens in others)
