"""What initial values must be, by the name of a parameter: written apart from the table of parameters, and compared.

Norms begin at one, biases and moments at zero. Matrices are normal with the configured deviation; those whose result is
added to the residual stream have it over the root of twice the number of layers (GPT-2).
"""

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.verify.difference import Different

SIGMAS = 6.0  # of a mean and a deviation of so many draws, about: one sound run of 10**8 is beyond


def deviation_of(model: ModelConfig, name: str) -> tuple[float, float]:
    """Return the mean and the deviation that a tensor's initial values have."""
    *_, module, kind = name.split(".")
    if name.startswith("optim.") or kind != "weight":
        return 0.0, 0.0
    if module.startswith("norm") or module.endswith("_norm"):
        return 1.0, 0.0
    adds = module in ("out", "down")
    return 0.0, model.init_std / (math.sqrt(2 * model.num_layers) if adds else 1.0)


def compare_initial(model: ModelConfig, state: Mapping[str, Tensor]) -> float:
    """Return the most by which a deviation is off, relative; Different names a tensor that has another one.

    Tensors of one kind are counted together over the layers. No two may have the same values.
    """
    kinds: dict[str, list[Tensor]] = defaultdict(list)
    drawn: dict[bytes, str] = {}
    for name, value in state.items():
        mean, deviation = deviation_of(model, name)
        if not deviation:
            if not bool((value == mean).all()):
                raise Different(f"{name} begins with other values than {mean:g}")
            continue
        first = value.flatten()[:8].numpy().tobytes()
        if first in drawn:
            raise Different(f"{name} begins with the values of {drawn[first]}")
        drawn[first] = name
        kinds[".".join(part for part in name.split(".") if not part.isdecimal())].append(value.flatten())
    largest = 0.0
    for name, values in kinds.items():
        whole = torch.cat(values)
        _, deviation = deviation_of(model, name)
        own = float(whole.square().mean().sqrt())
        off, allowed = abs(own / deviation - 1), SIGMAS / math.sqrt(2 * len(whole))
        if not off <= allowed:
            raise Different(f"{name} begins with a deviation of {own:.4g}, and {deviation:.4g} is configured")
        if not abs(float(whole.mean())) <= SIGMAS * deviation / math.sqrt(len(whole)):
            raise Different(f"{name} begins with a mean of {float(whole.mean()):.4g}, and 0 is meant")
        largest = max(largest, off)
    return largest
