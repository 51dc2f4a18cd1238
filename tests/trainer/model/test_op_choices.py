"""Attention is chosen for the tensors that a run has."""

from dataclasses import replace

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from datakit import MixtureConfig
from tests.trainer.support.parity import config_for
from trainer.mesh.mesh import mesh_of
from trainer.model import op_choices
from trainer.ops.attention.seam import Mask
from trainer.run.stage_times import Nobody


@pytest.mark.parametrize("document_mask", [False, True])
def test_attention_is_chosen_with_the_longest_rows(monkeypatch: pytest.MonkeyPatch, document_mask: bool) -> None:
    config = config_for("llama", ParallelLayout())
    length, num_rows = config.train.seq_length, config.train.micro_batch_size
    changes = MixtureConfig(from_step=5, seq_length=4 * length), MixtureConfig(from_step=9, seq_length=2 * length)
    config = replace(config, data=replace(config.data, mixture=changes, document_mask=document_mask))
    asked: list[tuple[int, Mask]] = []

    def choose(q_TNH: torch.Tensor, k_UKH: torch.Tensor, mask: Mask, *, deterministic: bool) -> str:
        assert len(q_TNH) == len(k_UKH)
        asked.append((len(q_TNH), mask))
        return "reference"

    monkeypatch.setattr(op_choices, "choose", choose)
    mesh = mesh_of(config, 0, torch.device("cpu"), network=Nobody(1))
    found = op_choices.choose_attention(config, mesh, torch.float32, None, by_timing=True)
    [(num_tokens, mask)] = asked
    assert found.name == "reference"
    assert num_tokens == num_rows * 4 * length
    assert mask.max_q == (length if document_mask else 4 * length)
