"""How much arithmetic a token costs, and how much a device could do: what MFU is made of.

A token costs 6N + 12LdS operations forward and backward: 6 for each parameter that takes part in a matrix product, and
12 * layers * hidden_size * seq_length for attention as if it were full; a causal mask needs half of the latter.
"""

import re
from dataclasses import dataclass

from trainer.config import ModelConfig

# dense bf16 peak in TFLOP/s by the words of a device's name; the first row whose words all occur counts
PEAK_TFLOPS = [
    ({"H100", "PCIE"}, 756.0),
    ({"H100", "NVL"}, 835.0),
    ({"H100"}, 989.0),
    ({"H200"}, 989.0),
    ({"GH200"}, 989.0),
    ({"B200"}, 2250.0),
    ({"A100"}, 312.0),
    ({"A800"}, 312.0),
    ({"H800"}, 989.0),
    ({"H20"}, 148.0),
    ({"L40S"}, 362.0),
    ({"L4"}, 121.0),
    ({"A10"}, 125.0),
    ({"4090"}, 165.0),
]


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """Operations a token, forward and backward, counted in three ways."""

    standard: float  # N without the tables that are only looked up; attention in full
    with_embeddings: float  # N of all parameters; attention in full
    causal: float  # N as in standard; half of the attention


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """All parameters, and those that are only looked up (token table unless tied, position table)."""

    total: int
    looked_up: int


def count_parameters(model: ModelConfig, seq_length: int) -> ParameterCount:
    """Parameters of a resolved model, tied tables once; learned positions have one row a position of a sample."""
    d, heads, vocab = model.hidden_size, model.num_heads, model.vocab_size
    head_size, bias = d // heads, int(model.bias)
    kv = model.num_kv_heads * head_size
    norm = d * (1 + (bias if model.norm == "layernorm" else 0))
    attention = 2 * d * d + 2 * d * kv + bias * (2 * d + 2 * kv)
    attention += 2 * head_size if model.qk_norm else 0
    up = 2 if model.activation == "swiglu" else 1
    mlp = (up + 1) * d * model.ffn_hidden_size + bias * (up * model.ffn_hidden_size + d)
    positions = seq_length * d if model.position == "learned" else 0
    table = vocab * d
    total = model.num_layers * (attention + mlp + 2 * norm) + norm + positions + table
    total += 0 if model.tie_embeddings else table
    return ParameterCount(total, positions + (0 if model.tie_embeddings else table))


def token_flops(model: ModelConfig, seq_length: int) -> TokenFlops:
    """Operations a token of a resolved model."""
    count = count_parameters(model, seq_length)
    attention = 12.0 * model.num_layers * model.hidden_size * seq_length
    standard = 6.0 * (count.total - count.looked_up) + attention
    return TokenFlops(standard, 6.0 * count.total + attention, standard - attention / 2)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 operations a second of a GPU by its name; None for an unknown one, and for a CPU."""
    words = set(re.split(r"[\s\-/]+", device_name.upper()))
    return next((tflops * 1e12 for needed, tflops in PEAK_TFLOPS if needed <= words), None)
