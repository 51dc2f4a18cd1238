"""MegatronOrder: which documents and samples megatron-core 0.19.2's dataset builder chooses; arithmetic, no stores.

It repeats BlendedMegatronDatasetBuilder: `split` cuts the documents of each store, weights become numbers of samples,
with a surplus for each store, and a store's documents are repeated until they hold so many. What is shuffled together
is all of that, but for a last epoch of which less than 80% of the samples are needed: it is shuffled by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from threefold.errors import UserError

PARTS = "train", "valid", "test"
MAX_SEED = 2**32 - 1  # of numpy's RandomState
MAX_ROWS = 2**32 - 3  # of a store: beyond, another shuffle begins
MAX_SOURCES = 32766
_LAST_EPOCH_APART = 0.80


@dataclass(frozen=True, slots=True)
class MegatronOrder:
    """What the order depends on besides stores, weights, seed and row length.

    `num_samples` is what Megatron calls train_samples, of another part what is evaluated. `split` are the shares of
    training, validation and test documents, in any unit. The stream begins at sample `start_sample` of the order.
    """

    num_samples: int
    split: tuple[float, ...] = (1.0,)
    surplus: float = 0.005
    start_sample: int = 0
    part: Literal["train", "valid", "test"] = "train"

    def __post_init__(self) -> None:
        """Raise UserError if a value does not fit."""
        if fault := split_fault(self.split, self.part):
            raise UserError(fault, hint="split = [969, 30, 1]: training, validation, test")
        if self.num_samples < 1 or not 0 <= self.start_sample < self.num_samples:
            raise UserError(
                f"an order of {self.num_samples} samples has no sample {self.start_sample}",
                hint=f"train_samples = {max(self.start_sample, 0) + 1} or more, as in the run to go on with",
            )
        if not 0 <= self.surplus < math.inf:
            raise UserError(f"a surplus of {self.surplus} samples a sample", hint="mid_level_dataset_surplus = 0.005")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of what the order depends on."""
        return {"name": "megatron", **asdict(self), "split": list(self.split)}

    def documents(self, num_documents: int) -> tuple[int, int]:
        """Return the documents [begin, end) of a store that this part reads."""
        begin, end = _bounds(self.split, self.part)
        return round(begin * float(num_documents)), round(end * float(num_documents))

    def sizes(self, weights: Sequence[float]) -> tuple[list[int], int]:
        """Return the samples that each weighted store needs, the surplus included, and those of the whole blend."""
        needed = [math.ceil(self.num_samples * weight) for weight in normalized(weights)]
        return [math.ceil(count * (1 + self.surplus)) for count in needed], sum(needed)


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a store is repeated, what of that is shuffled together, and how many rows it makes."""

    num_epochs: int
    num_rows: int
    together_epochs: int
    together_rows: int

    @classmethod
    def of(cls, num_tokens: int, seq_length: int, num_samples: int | None) -> "Repeats":
        """Return those of a part of so many tokens, more than a row, for so many samples; None for one epoch."""
        count = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // num_tokens))
        num_rows = (count * num_tokens - 1) // seq_length
        before = ((count - 1) * num_tokens - 1) // seq_length
        a_epoch = (num_tokens - 1) // seq_length
        if count > 1 and (num_samples or 0) - before < int(_LAST_EPOCH_APART * a_epoch):
            return cls(count, num_rows, count - 1, before)
        return cls(count, num_rows, count, num_rows)


def normalized(weights: Sequence[float]) -> list[float]:
    """Return weights as shares of their sum, rounded as numpy does."""
    array = np.array(weights, np.float64)
    shares: list[float] = (array / np.sum(array)).tolist()
    return shares


def split_fault(split: Sequence[float], part: str = "train") -> str:
    """Return what is wrong with shares of documents, "" if nothing is."""
    text = ",".join(f"{share:g}" for share in split)
    if not 1 <= len(split) <= len(PARTS):
        return f"split {text} has {len(split)} shares: of training, validation and test documents, one to three"
    if not all(0 <= share < math.inf for share in split) or not 0 < sum(split) < math.inf:
        return f"split {text} does not sum to a number above 0 of shares from 0 on"
    begin, end = _bounds(split, part)
    return "" if begin < end else f"split {text} has no share for the documents of {part}"


def _bounds(split: Sequence[float], part: str) -> tuple[float, float]:
    """Return where the documents of a part begin and end, as shares of all."""
    shares = normalized([*split, *[0.0] * (len(PARTS) - len(split))])
    bounds = list(accumulate(shares, initial=0.0))
    number = PARTS.index(part)
    return bounds[number], bounds[number + 1]
