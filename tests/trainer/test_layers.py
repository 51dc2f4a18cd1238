"""What a block must keep: causality, rotations that see distances alone, norms of the right rows."""

from dataclasses import replace

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import MODELS
from trainer.layers import Block, Noise, Rotation
from trainer.mesh.mesh import ProcessMesh

BATCH, SEQ = 2, 10


def block(model: str) -> Block:
    mesh = ProcessMesh(ParallelLayout(), 0, torch.device("cpu"), timeout_s=60)
    config = MODELS[model]
    made = Block(replace(config, num_kv_heads=config.num_kv_heads or 4, ffn_hidden_size=48), 0, mesh.tp).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return made


def stream() -> torch.Tensor:
    return torch.randn(BATCH, SEQ, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rotation(first_position: int) -> Rotation:
    positions = torch.arange(first_position, first_position + SEQ).expand(BATCH, SEQ)
    return Rotation.of(positions, 8, 10000.0, torch.float64)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_no_position_sees_a_later_one(model: str) -> None:
    layer, x, y = block(model), stream(), stream()
    y[:, 6:] += 1.0
    before, after = layer(x, rotation(0), None), layer(y, rotation(0), None)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.isclose(before[:, 6:], after[:, 6:]).all(-1).any()


def test_rotations_see_distances_alone() -> None:
    layer, x = block("llama"), stream()
    torch.testing.assert_close(layer(x, rotation(0), None), layer(x, rotation(500), None))
    assert not torch.allclose(layer(x, rotation(0), None), layer(x, None, None))


def test_masks_differ_by_site_layer_step_and_sample() -> None:
    x = torch.ones(BATCH, SEQ, 32)
    noise = Noise(0.5, seed=1, step=2, first_sample=4)
    masks = [
        noise.apply(x, layer=0, site=0),
        noise.apply(x, layer=0, site=1),
        noise.apply(x, layer=1, site=0),
        replace(noise, step=3).apply(x, layer=0, site=0),
        replace(noise, seed=2).apply(x, layer=0, site=0),
        replace(noise, first_sample=6).apply(x, layer=0, site=0),
    ]
    assert all(not torch.equal(a, b) for n, a in enumerate(masks) for b in masks[:n])
    shifted = replace(noise, first_sample=5).apply(x[:1], layer=0, site=0)
    assert torch.equal(shifted[0], masks[0][1]), "sample 5 has its mask wherever it is computed"
