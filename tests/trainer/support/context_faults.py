"""Faults of rows whose tokens are cut over ranks: of who has which token, who sees what, and what is counted where."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.faults import Fault, Patch, read_at_once, wrapping
from trainer import engine
from trainer.engine import Engine
from trainer.mesh.group import Group
from trainer.mesh.layout import OVER_DATA, Axes, Axis
from trainer.model import table
from trainer.model.microbatch import MicroBatch
from trainer.parallel import context

CP, CP_DP = ParallelLayout(cp=2), ParallelLayout(cp=2, dp=2)


def of_the_first(*fields: str) -> Callable[[Patch], None]:
    """Let parts of what each rank has be those of the first rank."""

    def part(real: Any, self: MicroBatch, runs: Any) -> MicroBatch:
        [whole] = self.runs
        size = sum(map(len, runs))
        first = real(self, (range(whole.start, whole.start + size),))
        return replace(real(self, runs), **{name: getattr(first, name) for name in fields})

    return wrapping(MicroBatch, "part", part)


def positions_from_zero(real: Any, self: MicroBatch, runs: Any) -> MicroBatch:
    part = real(self, runs)
    return part if part is self else replace(part, positions_S=torch.arange(len(part.positions_S)))


def cut_documents(real: Any, self: MicroBatch, runs: Any) -> MicroBatch:
    """What a query sees begins with the first token of its rank."""
    part = real(self, runs)
    if part is self:
        return part
    bounds = torch.arange(0, len(self.tokens_S) + 1, len(part.tokens_S), dtype=torch.int32)
    if self.documents is not None:
        bounds = torch.cat([self.documents[0], bounds]).unique()
    return replace(part, documents=(bounds, len(part.tokens_S)))


def held_without_cp(real: Any, *args: Any, **options: Any) -> Axes:
    axes: Axes = real(*args, **options)
    return (Axis.DP,) if axes == OVER_DATA else axes


def counted_on_each(real: Any, self: Group, kind: str, tensor: torch.Tensor, *args: Any) -> Any:
    is_count = self.name == "dp" and kind == "all_reduce"
    return real(self, kind, tensor * 2 if is_count else tensor, *args)


def evaluated_on_each(real: Any, self: Engine, batch: Any) -> Any:
    cp = self.mesh.cp
    loss, count = real(self, batch)
    return loss, count * cp.size


def loss_of_the_first(real: Any, self: Engine, *args: Any) -> torch.Tensor:
    return real(self, *args) * (self.mesh.coords.cp == 0)


def first_of_repeated(real: Any, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    repeats = len(x) * x.shape[2] // shape[1]
    return real(x[::repeats], shape)


CONTEXT_FAULTS = [
    Fault(
        "the parts of a row change places",
        CP,
        wrapping(engine, "share_of", lambda real, runs, index, size: real(runs, size - 1 - index, size)),
    ),
    Fault("each cp rank embeds the tokens of the first", CP, of_the_first("tokens_S")),
    Fault("each cp rank has the labels of the first", CP, of_the_first("labels_S")),
    Fault("losses on each cp rank have the weights of the first", CP, of_the_first("loss_mask_S")),
    Fault("dropout on each cp rank is that of the first", CP, of_the_first("runs"), model={"position": "rope"}),
    Fault("positions begin at zero on each cp rank", CP, wrapping(MicroBatch, "part", positions_from_zero)),
    Fault(
        "rotary positions begin at zero on each cp rank",
        CP,
        wrapping(MicroBatch, "part", positions_from_zero),
        model={"position": "rope"},
    ),
    Fault("a row is seen from the first token of a rank on", CP, wrapping(MicroBatch, "part", cut_documents)),
    Fault(
        "a document is seen without what is on the rank before",
        CP,
        wrapping(MicroBatch, "part", cut_documents),
        documents=True,
    ),
    Fault("holders are without cp", CP_DP, wrapping(table, "holders", held_without_cp)),
    Fault("tokens are counted on each cp rank", CP_DP, wrapping(Group, "start", counted_on_each)),
    Fault("evaluation counts on each cp rank", CP, wrapping(Engine, "eval_batch", evaluated_on_each)),
    Fault("the loss is that of the first cp rank", CP, wrapping(Engine, "_run", loss_of_the_first)),
    Fault(
        "heads go to another cp rank",
        CP,
        wrapping(context, "_by_rank", lambda real, x, num_ranks: real(x, num_ranks).flip(0)),
    ),
    Fault(
        "of a head that two cp ranks have one gradient counts",
        CP,
        wrapping(context, "_by_token", first_of_repeated),
        model={"num_kv_heads": 1},
    ),
    Fault("heads are read before they are there", CP, read_at_once("all_to_all", "cp")),
]
