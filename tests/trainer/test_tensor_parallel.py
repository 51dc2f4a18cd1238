"""Cut linears, embedding and loss on three ranks against the whole ones, forward and backward.

Three ranks hold a vocabulary of four as 2, 2 and 0 rows: the last rank has padding alone.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.ranks import run_ranks
from trainer.loss import vocab_cross_entropy
from trainer.mesh.clock import Clock
from trainer.mesh.group import Group
from trainer.mesh.mesh import ProcessMesh
from trainer.tensor_parallel import ColumnLinear, RowLinear, VocabMatrix, enter

TP, VOCAB, HIDDEN, INNER, NUM_TOKENS = 3, 4, 5, 6, 7


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TABLE, UP, UP_BIAS = values(VOCAB, HIDDEN, seed=0), values(INNER, HIDDEN, seed=1), values(INNER, seed=2)
DOWN, DOWN_BIAS = values(HIDDEN, INNER, seed=3), values(HIDDEN, seed=4)
TOKENS = torch.tensor([0, 3, 1, 2, 2, 0, 3])
LABELS = torch.tensor([3, 0, 1, 2, 0, 3, 1])
WEIGHTS = values(NUM_TOKENS, seed=5)  # of the token losses in the sum that is differentiated


def own_rows(rank: int) -> list[int]:
    return [row for row in range(VOCAB) if row // 2 == rank]


def cut(rank: int) -> dict[str, Any]:
    """Losses and gradients of one rank."""
    group = ProcessMesh(ParallelLayout(tp=TP), rank, torch.device("cpu"), timeout_s=60).tp
    table = VocabMatrix(VOCAB, HIDDEN, group=group).double()
    up = ColumnLinear(HIDDEN, INNER, bias=True, group=group).double()
    down = RowLinear(INNER, HIDDEN, bias=True, group=group).double()
    features = slice(2 * rank, 2 * rank + 2)
    with torch.no_grad():
        table.weight.fill_(9.0)  # what padding holds must not matter
        table.weight[: len(own_rows(rank))] = TABLE[own_rows(rank)]
        for parameter, value in ((up.weight, UP[features]), (up.bias, UP_BIAS[features])):
            parameter.copy_(value)
        for parameter, value in ((down.weight, DOWN[:, features]), (down.bias, DOWN_BIAS)):
            parameter.copy_(value)
    x = table.embed(TOKENS)
    x = x + down(torch.tanh(up(enter(x, group))))
    losses = vocab_cross_entropy(
        table.logits(enter(x, group)),
        LABELS,
        first_row=table.first_row,
        num_true_rows=table.num_true_rows,
        group=group,
    )
    (losses * WEIGHTS).sum().backward()
    gradients = {"table": table.weight, "up": up.weight, "up_bias": up.bias, "down": down.weight, "bias": down.bias}
    return {"losses": losses.detach().numpy()} | {name: value.grad.numpy() for name, value in gradients.items()}


def test_three_ranks_equal_the_whole() -> None:
    table, up, up_bias, down, bias = (v.clone().requires_grad_() for v in (TABLE, UP, UP_BIAS, DOWN, DOWN_BIAS))
    x = table[TOKENS]
    x = x + F.linear(torch.tanh(F.linear(x, up, up_bias)), down, bias)
    losses = F.cross_entropy(x @ table.T, LABELS, reduction="none")
    (losses * WEIGHTS).sum().backward()
    for rank, part in enumerate(run_ranks(TP, cut)):
        features, rows = slice(2 * rank, 2 * rank + 2), own_rows(rank)
        expected = {
            "losses": losses.detach(),
            "up": up.grad[features],
            "up_bias": up_bias.grad[features],
            "down": down.grad[:, features],
            "bias": bias.grad,
        }
        for name, value in expected.items():
            torch.testing.assert_close(torch.from_numpy(part[name]), value, msg=f"{name} on rank {rank}")
        gradient = torch.from_numpy(part["table"])
        torch.testing.assert_close(gradient[: len(rows)], table.grad[rows])
        assert not gradient[len(rows) :].any(), "padding gets no gradient"


def test_the_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits = (30 * values(NUM_TOKENS, VOCAB, seed=6)).bfloat16()
    alone = Group("tp", (0,), 0, Clock(torch.device("cpu")))
    losses = vocab_cross_entropy(logits, LABELS, first_row=0, num_true_rows=VOCAB, group=alone)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, F.cross_entropy(logits.float(), LABELS, reduction="none"))
