"""What a block must keep: causality, rotations that see distances alone, masks by place."""

from dataclasses import replace

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import MODELS, config_for, make_engine, small
from trainer.model.block import Block
from trainer.model.microbatch import DropoutKey, MicroBatch
from trainer.ops.rope import rope_turns

ROWS, SEQ, HIDDEN = 2, 16, 32


def block(model: str) -> Block:
    config = small(config_for(model, ParallelLayout()))
    return make_engine(0, replace(config, model=replace(config.model, init_std=0.3))).chunks[0].blocks[0]


def stream() -> torch.Tensor:
    return torch.randn(ROWS * SEQ, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def batch(first_position: int = 0, first_sample: int = 4, dropout: DropoutKey | None = None) -> MicroBatch:
    positions = torch.arange(first_position, first_position + SEQ).repeat(ROWS)
    runs = (range(first_sample * SEQ, (first_sample + ROWS) * SEQ),)
    return MicroBatch(positions, positions, positions, positions, SEQ, runs, dropout)


def stream_after(layer: Block, x: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Add the branch that a block leaves to be added."""
    with layer.unit.passing(adds=False):
        x_TD, branch_TD = layer(x, None, micro_batch)
    return x_TD + branch_TD


@pytest.mark.parametrize("model", sorted(MODELS))
@torch.no_grad()
def test_no_position_sees_a_later_one(model: str) -> None:
    layer, x, y = block(model), stream(), stream()
    later = torch.arange(ROWS * SEQ) % SEQ >= 6
    y[later] += 1.0
    before, after = stream_after(layer, x, batch()), stream_after(layer, y, batch())
    assert torch.equal(before[~later], after[~later])
    assert not torch.isclose(before[later], after[later]).all(-1).any()


@torch.no_grad()
def test_rotations_see_distances_alone() -> None:
    layer, x = block("llama"), stream()
    near, far = (
        replace(each, turns_SH=rope_turns(each.positions_S, 8, 10000.0, torch.float64))
        for each in (batch(), batch(first_position=500))
    )
    torch.testing.assert_close(stream_after(layer, x, near), stream_after(layer, x, far))
    assert not torch.allclose(stream_after(layer, x, near), stream_after(layer, x, batch()))


def test_masks_differ_by_site_layer_step_and_sample() -> None:
    x, key = torch.ones(ROWS * SEQ, HIDDEN), DropoutKey(0.5, seed=1, step=2)
    whole = batch(dropout=key)
    masks = [
        whole.drop(x, layer=0, site=0),
        whole.drop(x, layer=0, site=1),
        whole.drop(x, layer=1, site=0),
        batch(dropout=replace(key, step=3)).drop(x, layer=0, site=0),
        batch(dropout=replace(key, seed=2)).drop(x, layer=0, site=0),
        batch(first_sample=6, dropout=key).drop(x, layer=0, site=0),
    ]
    assert all(not torch.equal(a, b) for n, a in enumerate(masks) for b in masks[:n])
    sample_5 = replace(whole, runs=(range(5 * SEQ, 6 * SEQ),))
    shifted = sample_5.drop(x[:SEQ], layer=0, site=0)
    assert torch.equal(shifted, masks[0][SEQ:]), "sample 5 has its mask wherever it is computed"
