"""The frequencies of rotary positions: powers of theta, or scaled ones for longer texts than a model was trained on."""

import math

import torch
from torch import Tensor

from trainer.config import ModelConfig


def rotary_frequencies(model: ModelConfig, *, device: torch.device) -> Tensor:
    """Return the angle a position of each pair of a head, [H / 2], float64.

    llama3 counts the turns that a frequency makes in the original length. It divides those of few turns by the factor,
    leaves those of many, and takes a weighted mean in between (Llama 3.1).
    """
    size = model.head_size
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float64) / size
    frequencies = model.rope_theta**-exponents
    if model.rope_scaling == "none":
        return frequencies
    scaled = frequencies / model.rope_factor
    if model.rope_scaling == "linear":
        return scaled
    turns = model.rope_original_length * frequencies / (2 * math.pi)
    low, high = model.rope_low_factor, model.rope_high_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return share * frequencies + (1 - share) * scaled
