"""A fault of experts that equal scores show: others take the tokens."""

from typing import Any

import torch

from tests.support.checks import require_equal
from tests.trainer.support.faults import ShownFault
from tests.trainer.support.moe import engine_of, mixture
from tests.trainer.support.parity import local_batch
from trainer.model import router
from trainer.verify.faults.planting import wrapping
from trainer.verify.plain_model import logits


def higher_numbers_first(real: Any, scores_TE: torch.Tensor, k: int) -> torch.Tensor:
    return scores_TE.shape[1] - 1 - real(scores_TE.flip(1), k)


def compare_ties() -> None:
    """Where all scores are equal, the first experts take each token, as in plain torch."""
    config = mixture("plain")
    live = engine_of(config, router=0.0)
    batch = local_batch(config, 0, live.mesh)
    state = {name: value.double() for name, value in live.store.values()}
    tokens, labels, positions = (part.flatten(0, 1) for part in (batch.tokens, batch.labels, batch.positions))
    logs = torch.log_softmax(logits(config.model, state, tokens, positions, lambda x, **place: x), -1)
    losses = -logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    expected = (losses * batch.loss_mask.flatten(0, 1)).sum().item()
    total, _ = live.eval_batch(batch)
    require_equal(abs(total / expected - 1) < 1e-10, f"{total} in place of {expected}")


MOE_FAULTS = [
    ShownFault("equal scores go to higher numbers", wrapping(router, "best", higher_numbers_first), compare_ties)
]
