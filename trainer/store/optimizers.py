"""Optimizers by name: which states a row of the parameter table has beside its master, and who updates its parts.

One is an entry of OPTIMIZERS, and a row names it: the store keeps its states, a checkpoint has them as
`optim.<state>/<parameter>`, the dry run counts them. A state of one name is the same thing for all that have it:
`exp_avg` is a running average of gradients.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.config import OptimConfig
from trainer.ops.adamw import Interval, IntervalTable
from trainer.ops.momentum import MomentumPart, MomentumTable
from trainer.store.parameter import Parameter


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How rows are updated. `part` takes a part's tensors by name, its states among them; `update` a `parts` of such.

    All states have the dtype of the moments. With `counts` an update
    depends on how many were before it; else it is passed their number all the same. Without an `update` the store
    updates matrices as a whole.
    """

    states: tuple[str, ...]
    part: Callable[..., Any]
    parts: Callable[[Sequence[Any]], Any]
    update: Callable[..., None] | None
    counts: bool = False


def _sgd_part(*, momentum: Tensor, **others: Any) -> MomentumPart:
    return MomentumPart(moment=momentum, **others)


def _sgd(table: MomentumTable, optim: OptimConfig, lr: float, updates: int, *, form: str, **decisions: Tensor) -> None:
    table.sgd(optim, lr, **decisions)


def _average_part(*, exp_avg: Tensor, **others: Any) -> MomentumPart:
    return MomentumPart(moment=exp_avg, **others)


def _lion(table: MomentumTable, optim: OptimConfig, lr: float, updates: int, *, form: str, **decisions: Tensor) -> None:
    table.lion(optim, lr, **decisions)


OPTIMIZERS = {
    "adamw": Optimizer(("exp_avg", "exp_avg_sq"), Interval, IntervalTable, IntervalTable.adamw, counts=True),
    "lion": Optimizer(("exp_avg",), _average_part, MomentumTable, _lion),
    "muon": Optimizer(("exp_avg",), _average_part, MomentumTable, None),
    "sgd": Optimizer(("momentum",), _sgd_part, MomentumTable, _sgd),
}


def states_of(rows: Iterable[Parameter]) -> list[str]:
    """Return the names of the states that any of some rows has, each once, in order."""
    return list(dict.fromkeys(state for row in rows for state in OPTIMIZERS[row.optimizer].states))


class Updates:
    """Parts of parameters with their rows, walked by one call for each optimizer and pair of factors among them."""

    def __init__(self, parts: Iterable[tuple[Parameter, Any]]) -> None:
        """Take parts, each made by its row's optimizer."""
        found: dict[tuple[str, float, float], list[Any]] = defaultdict(list)
        for row, part in parts:  # one that does not decay goes with those that do
            found[row.optimizer, row.rate, row.decay or 1.0].append(part)
        self._tables = [(*kind, OPTIMIZERS[kind[0]].parts(some)) for kind, some in found.items()]

    def update(
        self, optim: OptimConfig, lr: float, updates: int, *, is_bad: Tensor, late: tuple[Tensor, int] | None = None,
        **others: Any,
    ) -> None:  # fmt: skip
        """Make one update in place, of each part with the factors of its row, after `updates` less those `late`.

        The host does not know how many are late, only their most: it starts an update for each number that it can be,
        and the device makes the one that is right. So each number has the bits that it has where nothing is late.
        An optimizer that does not count makes one.
        """
        left_out = [is_bad]
        if late is not None:
            count, most = late
            left_out = [is_bad.where(count == number, torch.ones_like(is_bad)) for number in range(most + 1)]
        for name, rate, decay, table in self._tables:
            make = OPTIMIZERS[name].update
            assert make is not None, f"{name} takes whole matrices"
            factored = optim if decay == 1.0 else replace(optim, weight_decay=optim.weight_decay * decay)
            for number, flag in enumerate(left_out if OPTIMIZERS[name].counts else [is_bad]):
                make(table, factored, lr * rate, updates - number, is_bad=flag, **others)
