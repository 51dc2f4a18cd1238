"""Losses of a linear whose outputs are made for some tokens at a time against those whose outputs are made at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.weights import CPU, handle
from trainer.linear.linear import linear
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.cross_entropy import VocabularyPart
from trainer.parallel.collectives import copy_to
from trainer.parallel.cross_entropy import linear_cross_entropy, tokens_at_once, vocab_cross_entropy
from trainer.verify.threads import run_threads

VOCAB, HIDDEN, NUM_TOKENS = 5, 6, 13  # on four ranks 2, 2, 1 and 0 rows of the vocabulary
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(rank: int, tp: int, at_once: int, dtype: torch.dtype, z_loss: float, *, network: Network) -> dict[str, Any]:
    """Two micro-batches on one rank: losses, and the gradients of the input and of the matrix."""
    group = ProcessMesh(ParallelLayout(tp=tp), rank, CPU, timeout_s=60, network=network).tp
    num_rows = -(-VOCAB // tp)
    table = torch.full((num_rows * tp, HIDDEN), 9.0, dtype=torch.float64)  # what padding holds must not matter
    table[:VOCAB] = values(VOCAB, HIDDEN, seed=0)
    matrix, gradient = handle(table[rank * num_rows : (rank + 1) * num_rows].to(dtype))
    part = VocabularyPart(rank * num_rows, max(min(VOCAB - rank * num_rows, num_rows), 0))
    gradients: dict[str, Any] = {"matrix": gradient}
    for number in range(2):
        x = values(NUM_TOKENS, HIDDEN, seed=1 + number).to(dtype).requires_grad_()
        labels = torch.arange(NUM_TOKENS) % VOCAB
        weights = values(NUM_TOKENS, seed=3).abs().to(gradient.dtype)
        weights[: 5 + number] = 0  # masked: all tokens of the first parts
        replicated = copy_to(x, group)
        if at_once:
            losses = linear_cross_entropy(
                replicated, matrix, labels, part, group, weights_T=weights, z_loss=z_loss, tokens_at_once=at_once
            )
        else:
            losses = vocab_cross_entropy(linear(replicated, matrix), labels, part, group, z_loss=z_loss)
        (losses * weights).sum().backward()
        gradients |= {f"losses {number}": losses.detach(), f"x {number}": x.grad}
    return gradients


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("at_once", [1, 4, 99])
def test_parts_equal_the_whole(tp: int, dtype: torch.dtype, at_once: int) -> None:
    whole = run_threads(tp, trained, tp, 0, dtype, 0.1)
    for rank, found in enumerate(run_threads(tp, trained, tp, at_once, dtype, 0.1)):
        for name, value in whole[rank].items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            torch.testing.assert_close(found[name], value, rtol=WITHIN[dtype], atol=WITHIN[dtype], msg=name)


def test_without_weights_nothing_is_differentiated() -> None:
    group = ProcessMesh(ParallelLayout(), 0, CPU, timeout_s=60).tp
    matrix, gradient = handle(values(VOCAB, HIDDEN, seed=0))
    x, labels = values(NUM_TOKENS, HIDDEN, seed=1), torch.arange(NUM_TOKENS) % VOCAB
    found = linear_cross_entropy(
        x, matrix, labels, VocabularyPart(0, VOCAB), group, weights_T=None, z_loss=0.0, tokens_at_once=3
    )
    wanted = torch.nn.functional.cross_entropy(x @ matrix.values.T, labels, reduction="none")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert gradient.isnan().all(), "nothing was handed over"


@pytest.mark.parametrize(
    ("num_tokens", "token_bytes", "max_bytes", "expected"),
    [
        (32768, 1 << 18, 2**30, 4096),
        (32768, 1 << 15, 2**30, 32768),
        (32768, 64000, 2**30, 16384),
        (1100, 1 << 20, 2**30, 640),
        (1000, 1 << 20, 100 << 20, 100),
        (16, 488, 1074, 2),
        (3, 1 << 40, 2**30, 1),
        (32768, 1 << 18, 0, 32768),
        (0, 1 << 18, 2**30, 0),
    ],
)
def test_tokens_at_once(num_tokens: int, token_bytes: int, max_bytes: float, expected: int) -> None:
    found = tokens_at_once(num_tokens, token_bytes, max_bytes)
    assert found == expected
    assert not max_bytes or found * token_bytes <= max(max_bytes, token_bytes)
