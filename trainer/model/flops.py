"""How much arithmetic a token costs, by layer and by document.

A token costs 6N + 12LdS operations forward and backward: 6 for each parameter of a matrix product that it goes through,
of experts those of its own alone, and 12 * layers *
num_heads * head_size * keys for attention in full, where a row has as many keys as tokens; a causal mask needs half of
the latter. Documents and windows leave fewer keys: pairs of a query and a key that it sees count twice, as in full.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from datakit import HostBatch
from trainer.config import Config
from trainer.config.resolve import layer_windows, longest_row, row_lengths
from trainer.store.parameter import Parameter

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """Operations a token, forward and backward, by what they are for."""

    products: float  # N without the tables that are only looked up
    looked_up: float  # of those tables, as if they were multiplied
    attention: float  # in full

    @property
    def standard(self) -> float:
        """Return what MFU counts."""
        return self.products + self.attention

    @property
    def with_embeddings(self) -> float:
        """Return the same with N of all parameters."""
        return self.standard + self.looked_up

    @property
    def causal(self) -> float:
        """Return the same with half of the attention."""
        return self.products + self.attention / 2


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """All parameters, those that are only looked up (token table unless tied, position table), and `idle` ones.

    These are of experts that a token does not go to.
    """

    total: int
    looked_up: int
    idle: int = 0

    @property
    def active(self) -> int:
        """Return those that a token goes through, or looks up in."""
        return self.total - self.idle


class BatchFlops:
    """Operations a token of batches of a resolved configuration's run, each document's own attention counted."""

    def __init__(self, config: Config, table: Mapping[str, Parameter]) -> None:
        self._config = config
        self._rows = {length: token_flops(config, table, length) for length in row_lengths(config)}

    def of_rows(self, length: int) -> TokenFlops:
        """Return those in rows of so many tokens, each one document."""
        return self._rows[length]

    def of(self, host: HostBatch) -> TokenFlops:
        """Return those of a rank's step, in documents if it has their bounds."""
        rows = self._rows[host.shape[-1]]
        if host.cu_seqlens is None:
            return rows
        lengths = np.diff(host.cu_seqlens).astype(np.int64)
        return replace(rows, attention=attention_flops(self._config, lengths))


def count_parameters(config: Config, table: Mapping[str, Parameter]) -> ParameterCount:
    """Count the parameters of a resolved configuration's model, tied tables once."""
    sizes = {name: math.prod(row.shape) for name, row in table.items() if not row.placement.tied_to}
    looked_up = ["pos.weight"] if config.model.tie_embeddings else ["pos.weight", "embed.weight"]
    idle = sum(size - active_size(config, name, size) for name, size in sizes.items())
    return ParameterCount(sum(sizes.values()), sum(sizes.get(name, 0) for name in looked_up), idle)


def active_size(config: Config, name: str, size: int) -> int:
    """Return how many of a parameter's elements a token goes through: of experts those of its own."""
    model = config.model
    return size * model.experts_per_token // model.num_experts if ".experts." in name else size


def token_flops(config: Config, table: Mapping[str, Parameter], seq_length: int) -> TokenFlops:
    """Return the operations a token of a resolved configuration's model, in rows of so many tokens."""
    count = count_parameters(config, table)
    attention = attention_flops(config, np.array([seq_length]))
    return TokenFlops(6.0 * (count.active - count.looked_up), 6.0 * count.looked_up, attention)


def attention_flops(config: Config, lengths: Int64s) -> float:
    """Return the operations a token of the attention of all layers, in documents of so many tokens each."""
    windows = Counter(layer_windows(config))
    return sum(num_layers * layer_attention(config, lengths, window) for window, num_layers in windows.items())


def layer_attention(config: Config, lengths: Int64s, window: int | None) -> float:
    """Return the operations a token of one layer's attention, in full: twice the pairs that a causal mask leaves."""
    pairs = 2 * seen_pairs(lengths, window) - lengths
    return 12.0 * config.model.num_heads * config.model.head_size * float(pairs.sum() / lengths.sum())


def seen_pairs(lengths: Int64s, window: int | None) -> Int64s:
    """Return how many pairs of a query and a key that it sees documents have.

    >>> seen_pairs(np.array([5, 2]), None).tolist(), seen_pairs(np.array([5, 2]), 2).tolist()
    ([15, 3], [9, 3])
    """
    width = lengths if window is None else np.minimum(lengths, window)
    return lengths * width - width * (width - 1) // 2


def layers_and_head_flops(config: Config, table: Mapping[str, Parameter]) -> tuple[list[float], float]:
    """Return the operations a token of each layer and of the head, in rows as long as the longest."""
    sizes: Counter[str] = Counter()
    for name, row in table.items():
        if name.startswith("layers."):
            sizes[name.split(".")[1]] += active_size(config, name, math.prod(row.shape))
    length = np.array([longest_row(config)])
    windows = enumerate(layer_windows(config))
    layers = [6.0 * sizes[f"{number}"] + layer_attention(config, length, window) for number, window in windows]
    return layers, 6.0 * math.prod(table["head.weight"].shape)
