"""How two trials are compared: within a bound, or bit by bit; Different says what differs first."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from trainer.config import Config
from trainer.verify.difference import Different
from trainer.verify.trial import Seen, Trial

LOSSES_WITHIN, WEIGHTS_WITHIN = 1e-10, 1e-9  # of one process, in float64
EVALUATED = "loss of an evaluation", "number of tokens of an evaluation"


def compare_losses(trial: Trial, reference: Trial) -> float:
    """Return the largest relative difference of what ranks saw from what one process did; Different names the first."""
    largest, expected = 0.0, _numbers(reference.ranks[0])
    for rank, seen in enumerate(trial.ranks):
        for (name, own), (_, other) in zip(_numbers(seen), expected, strict=True):
            gap = abs(own - other) / max(abs(other), 1e-300)
            if not gap <= LOSSES_WITHIN:
                raise Different(f"the {name} is {own!r} on rank {rank}, and {other!r} in one process")
            largest = max(largest, gap)
    return largest


def _numbers(seen: Seen) -> list[tuple[str, float]]:
    """Return what a rank saw, step by step, with names."""
    steps = enumerate(zip(seen.num_tokens, seen.losses, seen.norms, strict=True), 1)
    names = ("number of tokens", "loss", "gradient norm")
    numbers = [(f"{name} of step {step}", value) for step, values in steps for name, value in zip(names, values)]
    return numbers + list(zip(EVALUATED, seen.evaluation))


def compare_states(trial: Trial, reference: Trial) -> float:
    """Return the largest difference of two states; Different names the first tensor that differs, and its ranks."""
    try:
        own, expected = (determined(trial.config, each.whole()) for each in (trial, reference))
        return compare_tensors(own, expected)
    except Different as difference:
        name = str(difference).partition("[")[0]
        owners = [rank for rank, seen in enumerate(trial.ranks) if any(piece.name == name for piece in seen.pieces)]
        held = f"; it is held by ranks {', '.join(map(str, owners[:8]))}" if owners else ""
        raise Different(f"{difference}{held}") from None


def determined(config: Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state without what Lion makes of rounding alone: it takes the sign of each gradient, however small.

    Attention without rotary positions does not see what is added to all keys alike, whose gradient is 0.
    """
    added = ".attn.k_norm.bias" if config.model.qk_norm else ".attn.k.bias"
    is_unseen = config.optim.name == "lion" and config.model.position != "rope"
    return {name: tensor for name, tensor in state.items() if not (is_unseen and name.endswith(added))}


def compare_tensors(own: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two states; Different names the first tensor that differs."""
    largest = 0.0
    if own.keys() != expected.keys():
        raise Different(f"one of both has not the tensors {', '.join(sorted(own.keys() ^ expected.keys()))}")
    for name, whole in expected.items():
        gaps = (own[name] - whole).abs()
        gap = float(gaps.max())
        if not gap <= WEIGHTS_WITHIN:
            place = np.unravel_index(int(gaps.nan_to_num(torch.inf).argmax()), tuple(whole.shape))
            raise Different(f"{name}{[int(number) for number in place]} differs by {gap:.1e}")
        largest = max(largest, gap)
    return largest


def compare_bits(trial: Trial, other: Trial, how: str) -> None:
    """Raise Different, with how the other is another, if losses, norms or a bit of the state differ."""
    for name, field in (("loss", "losses"), ("gradient norm", "norms")):
        for step, (own, expected) in enumerate(zip(getattr(other.ranks[0], field), getattr(trial.ranks[0], field)), 1):
            if own != expected:
                raise Different(f"the {name} of step {step} is {own!r} with {how}, and {expected!r} without")
    states = trial.whole(), other.whole()
    for name, tensor in states[0].items():
        if not torch.equal(tensor, states[1][name]):
            raise Different(f"{name} has other bits with {how}")
