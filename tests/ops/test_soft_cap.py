"""Soft caps of logits against float64, through the cross-entropy that reads them."""

import pytest
import torch
from torch import Tensor

from trainer.mesh.clock import Clock
from trainer.mesh.group import Group
from trainer.ops.cross_entropy import VocabularyPart, cross_entropy_reference
from trainer.ops.soft_cap import blocks, slopes, soft_cap
from trainer.parallel.cross_entropy import vocab_cross_entropy

WITHIN = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ALONE = Group("test", (0,), 0, Clock(torch.device("cpu")))
CAP, NUM_TRUE = 2.5, 90


def logits_of(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (4 * torch.randn(12, NUM_TRUE + 6, generator=generator, dtype=torch.float64)).to(dtype)


def trained(logits_TV: Tensor, weights_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses, and the gradient of logits, which they are overwritten by."""
    leaf, labels_T = logits_TV.clone().requires_grad_(), torch.arange(len(logits_TV))
    part = VocabularyPart(0, NUM_TRUE, cap=CAP)
    losses_T = vocab_cross_entropy(leaf.view_as(leaf), labels_T, part, ALONE, z_loss=0.1)
    return losses_T.detach(), torch.autograd.grad((losses_T * weights_T).sum(), leaf)[0]


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
def test_losses_and_gradients_are_those_of_capped_logits(dtype: torch.dtype) -> None:
    logits_TV = logits_of(dtype)
    weights_T = torch.linspace(0, 1, len(logits_TV), dtype=torch.float64)
    leaf = logits_TV[:, :NUM_TRUE].double().requires_grad_()
    wanted_T = cross_entropy_reference(CAP * torch.tanh(leaf / CAP), torch.arange(len(leaf)), 0.1)
    (wanted_TV,) = torch.autograd.grad((wanted_T * weights_T).sum(), leaf)
    losses_T, gradient_TV = trained(logits_TV, weights_T.to(losses_dtype(dtype)))
    assert (losses_T.double() - wanted_T).abs().max() <= 20 * WITHIN[dtype]
    assert (gradient_TV[:, :NUM_TRUE].double() - wanted_TV).norm() <= WITHIN[dtype] * weights_T.norm()
    assert not gradient_TV[:, NUM_TRUE:].any(), "padding takes no part"


def losses_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def test_a_row_has_the_same_bits_whichever_are_wide_with_it() -> None:
    logits_TV = logits_of(torch.bfloat16)
    rows = list(blocks(logits_TV, 5 * logits_TV.shape[1] + 1))
    assert [(each.start, len(logits_TV[each])) for each in rows] == [(0, 5), (5, 5), (10, 2)]
    assert [each.start for each in blocks(logits_TV[:2], 1)] == [0, 1]
    whole_TV, parts_TV = logits_TV.clone(), logits_TV.clone()
    soft_cap(whole_TV, CAP)
    for each in rows:
        soft_cap(parts_TV[each], CAP)
        assert torch.equal(slopes(whole_TV, CAP)[each], slopes(parts_TV[each], CAP))
    assert torch.equal(whole_TV, parts_TV)


def test_a_row_without_weight_has_no_gradient_whatever_it_holds() -> None:
    logits_TV, weights_T = logits_of(torch.float32), torch.ones(12)
    logits_TV[3], logits_TV[4, 7], weights_T[3:5] = float("nan"), float("inf"), 0
    _, gradient_TV = trained(logits_TV, weights_T)
    assert not gradient_TV[3:5].any()
    assert gradient_TV.isfinite().all()


def test_no_number_is_beyond_the_cap() -> None:
    x = torch.tensor([[1e-3, -1.0, 1e30, -float("inf")]], dtype=torch.float64)
    soft_cap(x, 5.0)
    torch.testing.assert_close(x, torch.tensor([[1e-3, -0.98687660, 5.0, -5.0]]).double(), rtol=1e-7, atol=0)
