"""Cut linears, embedding and loss on three ranks against the whole ones, forward and backward.

Three ranks hold a vocabulary of four as 2, 2 and 0 rows: the last rank has padding alone.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.weights import CPU, group, handle
from trainer.linear.linear import linear
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh
from trainer.model.embedding import anchor, embed_tokens
from trainer.ops.cross_entropy import VocabularyPart
from trainer.parallel.cross_entropy import vocab_cross_entropy
from trainer.parallel.tensor import TensorParallel
from trainer.verify.threads import run_threads

TP, VOCAB, HIDDEN, INNER, NUM_TOKENS = 3, 4, 5, 6, 9


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TABLE, UP, UP_BIAS = values(VOCAB, HIDDEN, seed=0), values(INNER, HIDDEN, seed=1), values(INNER, seed=2)
DOWN, DOWN_BIAS = values(HIDDEN, INNER, seed=3), values(HIDDEN, seed=4)
TOKENS = torch.tensor([0, 3, 1, 2, 2, 0, 3, 1, 0])
LABELS = torch.tensor([3, 0, 1, 2, 0, 3, 1, 1, 2])
WEIGHTS = values(NUM_TOKENS, seed=5)  # of the token losses in the sum that is differentiated


def own_rows(rank: int) -> list[int]:
    return [row for row in range(VOCAB) if row // 2 == rank]


def cut(rank: int, cuts_tokens: bool, *, network: Network) -> dict[str, Any]:
    """Losses and gradients of one rank."""
    tp = ProcessMesh(ParallelLayout(tp=TP), rank, CPU, timeout_s=60, network=network).tp
    features = slice(2 * rank, 2 * rank + 2)
    rows = torch.full((2, HIDDEN), 9.0, dtype=torch.float64)  # what padding holds must not matter
    rows[: len(own_rows(rank))] = TABLE[own_rows(rank)]
    parts = {"table": rows, "up": UP[features], "up_bias": UP_BIAS[features], "down": DOWN[:, features]}
    handles = {name: handle(part) for name, part in (parts | {"bias": DOWN_BIAS}).items()}
    table, up, up_bias, down, bias = (weight for weight, _ in handles.values())
    tensor = TensorParallel(tp, cuts_tokens)
    x = embed_tokens(TOKENS, table, tensor, anchor(CPU))
    assert len(x) == NUM_TOKENS // (TP if cuts_tokens else 1)
    x = x + tensor.row_linear(torch.tanh(tensor.column_linear(x, [(up, up_bias)])), down, bias)
    logits = linear(tensor.enter(x), table)
    losses = vocab_cross_entropy(logits, LABELS, VocabularyPart(2 * rank, len(own_rows(rank))), tp)
    (losses * WEIGHTS).sum().backward()
    return {"losses": losses.detach()} | {name: gradient for name, (_, gradient) in handles.items()}


@pytest.mark.parametrize("cuts_tokens", [False, True])
def test_three_ranks_equal_the_whole(cuts_tokens: bool) -> None:
    table, up, up_bias, down, bias = (v.clone().requires_grad_() for v in (TABLE, UP, UP_BIAS, DOWN, DOWN_BIAS))
    x = table[TOKENS]
    x = x + F.linear(torch.tanh(F.linear(x, up, up_bias)), down, bias)
    losses = F.cross_entropy(x @ table.T, LABELS, reduction="none")
    (losses * WEIGHTS).sum().backward()
    parts = run_threads(TP, cut, cuts_tokens)
    if cuts_tokens:  # each has what its own tokens ask of the bias
        whole = sum(part["bias"] for part in parts)
        for part in parts:
            part["bias"] = whole
    for rank, part in enumerate(parts):
        features, rows = slice(2 * rank, 2 * rank + 2), own_rows(rank)
        expected = {
            "losses": losses.detach(),
            "up": up.grad[features],
            "up_bias": up_bias.grad[features],
            "down": down.grad[:, features],
            "bias": bias.grad,
        }
        for name, value in expected.items():
            torch.testing.assert_close(part[name], value, msg=f"{name} on rank {rank}")
        torch.testing.assert_close(part["table"][: len(rows)], table.grad[rows])
        assert not part["table"][len(rows) :].any(), "padding gets no gradient"


def test_the_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits = (30 * values(NUM_TOKENS, VOCAB, seed=6)).bfloat16()
    losses = vocab_cross_entropy(logits, LABELS, VocabularyPart(0, VOCAB), group())
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, F.cross_entropy(logits.float(), LABELS, reduction="none"))
