"""LossGroups: what an evaluation sums losses by, the stores of a validation set or the tags of its documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from datakit import Blend, LabelTags
from threefold.errors import UserError
from trainer.data import Int64s

By = Literal["store", "tag"]
NO_TAG = "no tag"


class Labels(Protocol):
    """Names of groups, and which of them a label is of."""

    @property
    def names(self) -> Sequence[str | None]:
        """The names of the groups; None of what has no name."""

    def of(self, samples: npt.ArrayLike) -> Int64s:
        """Return the number in `names` of each label of samples, [samples, seq_length]."""


@dataclass(frozen=True, slots=True)
class LossGroups:
    """The labels of a validation set in groups, by store or by tag."""

    by: By
    labels: Labels

    @property
    def names(self) -> Sequence[str | None]:
        """The names of the groups; None of what has no name."""
        return self.labels.names


class StoreLabels:
    """The stores of a blend by their places; copies of one have one name, and are one group."""

    def __init__(self, blend: Blend) -> None:
        self._blend = blend
        self.names = tuple(dict.fromkeys(store.place for store in blend.stores))
        self._numbers = np.array([self.names.index(store.place) for store in blend.stores], np.int64)

    def of(self, samples: npt.ArrayLike) -> Int64s:
        """Return the number in `names` of the store of each label."""
        sources, _ = self._blend.locate(samples)
        return np.repeat(self._numbers[sources][:, None], self._blend.seq_length, 1)


def groups_of(blends: Sequence[Blend], by: By | None) -> list[LossGroups | None]:
    """Return what losses of each validation set are summed by; UserError for tags that no store has."""
    if by is None:
        return [None] * len(blends)
    if by == "store":
        return [LossGroups(by, StoreLabels(blend)) for blend in blends]
    tags = [LabelTags(blend) for blend in blends]
    if not any(tags):
        stores = ", ".join(dict.fromkeys(store.place for blend in blends for store in blend.stores))
        hint = "--by store; datakit preprocess INPUT --output STORE --tag NAME=GLOB makes a store with tags"
        raise UserError(f"no document of {stores} has a tag", hint=hint)
    return [LossGroups(by, labels) for labels in tags]
