"""Faults of rows whose tokens are cut over ranks: of who has which token, who sees what, and what is counted where."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ckptkit import ParallelLayout
from trainer.engine import Engine
from trainer.mesh.group import Group
from trainer.mesh.layout import OVER_DATA, Axes, Axis
from trainer.model import table
from trainer.model.microbatch import MicroBatch
from trainer.ops.attention.weights import WeightDropout
from trainer.parallel import context
from trainer.parallel.context import ContextParallel, _Halves
from trainer.verify.faults.fault import CP, Fault
from trainer.verify.faults.planting import Patch, not_summed, read_at_once, wrapping

CP_DP = ParallelLayout(cp=2, dp=2)


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
    """Let a query see nothing before the first token of its rank."""
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
    sums = real(self, batch)
    return tuple(number * cp.size if place % 2 else number for place, number in enumerate(sums))


def loss_of_the_first(real: Any, self: Engine, *args: Any) -> torch.Tensor:
    return real(self, *args) * (self.mesh.coords.cp == 0)


def first_of_repeated(real: Any, parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    repeats = len(parts[0]) * sum(part.shape[2] for part in parts) // shape[1]
    return real([part[::repeats] for part in parts], shape)


def without_prefix(real: Any, bounds: torch.Tensor, longest: int, num: int, length: int, chunk: range) -> Any:
    """Let the keys of a document begin with the chunk."""
    begins = torch.arange(chunk.start, num, length, dtype=bounds.dtype)
    return real(torch.cat([bounds, begins]).unique(), longest, num, length, chunk)


def prefix_of_a_row(real: Any, self: ContextParallel, tokens: torch.Tensor, *rest: Any) -> Any:
    """Of a row's keys the last ones before a chunk are left out."""
    return tuple(replace(mask, max_k=min(mask.max_k, 2 * mask.max_q)) for mask in real(self, tokens, *rest))


def of_one_half(number: int) -> Callable[[Patch], None]:
    """Let the gradients of keys be those of one half's queries."""

    def backward(real: Any, ctx: Any, dout: torch.Tensor) -> Any:
        half = len(dout) // 2
        only = torch.zeros_like(dout)
        only[number * half : (number + 1) * half] = dout[number * half : (number + 1) * half]
        dq, *_ = real(ctx, dout)
        return dq, *real(ctx, only)[1:]

    return wrapping(context._ToKeys, "backward", backward)


def halves_in_order(real: Any, run: range, length: int, index: int, num_ranks: int) -> Any:
    runs = real(run, length, index, num_ranks)
    return runs[len(runs) // 2 :] + runs[: len(runs) // 2]


def second_halves_by_rank(real: Any, self: Any, *heads: torch.Tensor) -> torch.Tensor:
    whole = real(self, *heads)
    chunks = whole.clone().unflatten(0, (-1, 2 * self.group.size, self._size))
    chunks[:, self.group.size :] = chunks[:, self.group.size :].flip(1)
    return chunks.flatten(0, 2)


def keys_not_summed(real: Any, self: Group, whole: torch.Tensor, share: torch.Tensor | None = None) -> Any:
    return not_summed(real, self, whole, share) if self.name == "cp" else real(self, whole, share)


ROPE: dict[str, Any] = {"model": {"position": "rope"}}

CONTEXT_FAULTS = (
    Fault(
        "cp-parts-swapped",
        "the parts of a row change places",
        CP,
        wrapping(context, "share_of", lambda real, runs, index, size: real(runs, size - 1 - index, size)),
    ),
    Fault("cp-tokens-of-first", "each cp rank embeds the tokens of the first", CP, of_the_first("tokens_S")),
    Fault("cp-labels-of-first", "each cp rank has the labels of the first", CP, of_the_first("labels_S")),
    Fault(
        "cp-loss-mask-of-first",
        "losses on each cp rank have the weights of the first",
        CP,
        of_the_first("loss_mask_S"),
        data={"packing": "pad"},
    ),
    Fault(
        "cp-weights-of-first-heads",
        "attention's dropout numbers heads within a cp rank",
        CP,
        wrapping(WeightDropout, "of_heads", lambda real, self, first: self),
        model={"position": "rope", "attention_dropout": 0.2},
    ),
    Fault("cp-dropout-of-first", "dropout on each cp rank is that of the first", CP, of_the_first("runs"), **ROPE),
    Fault(
        "cp-positions-from-zero",
        "positions begin at zero on each cp rank",
        CP,
        wrapping(MicroBatch, "part", positions_from_zero),
    ),
    Fault(
        "cp-rotary-from-zero",
        "rotary positions begin at zero on each cp rank",
        CP,
        wrapping(MicroBatch, "part", positions_from_zero),
        **ROPE,
    ),
    Fault(
        "cp-row-cut", "a row is seen from the first token of a rank on", CP, wrapping(MicroBatch, "part", cut_documents)
    ),
    Fault(
        "cp-document-cut",
        "a document is seen without what is on the rank before",
        CP,
        wrapping(MicroBatch, "part", cut_documents),
        documents=True,
    ),
    Fault("cp-holders-left-out", "holders are without cp", CP_DP, wrapping(table, "holders", held_without_cp)),
    Fault(
        "cp-tokens-counted-twice",
        "tokens are counted on each cp rank",
        CP_DP,
        wrapping(Group, "start", counted_on_each),
        peer="NVIDIA/Megatron-LM#673",
    ),
    Fault(
        "cp-evaluation-counts",
        "evaluation counts on each cp rank",
        CP,
        wrapping(Engine, "eval_batch", evaluated_on_each),
    ),
    Fault(
        "cp-loss-of-first",
        "the loss is that of the first cp rank",
        CP,
        wrapping(Engine, "_run", loss_of_the_first),
        peer="NVIDIA/Megatron-LM#906",
    ),
    Fault(
        "cp-heads-to-another",
        "heads go to another cp rank",
        CP,
        wrapping(context, "_by_rank", lambda real, x, num_ranks: real(x, num_ranks).flip(0)),
    ),
    Fault(
        "cp-one-gradient-of-repeated",
        "of a head that two cp ranks have one gradient counts",
        CP,
        wrapping(context, "_by_token", first_of_repeated),
        model={"num_kv_heads": 1},
    ),
    Fault(
        "cp-heads-back-swapped",
        "halves of a rank's heads change places on the way back",
        CP,
        wrapping(context, "_by_token", lambda real, parts, shape: real(parts[::-1], shape)),
        model={"num_heads": 8, "num_kv_heads": 4},
    ),
    Fault("cp-heads-read-early", "heads are read before they are there", CP, read_at_once("all_to_all", "cp")),
    *(
        replace(fault, cp_method="allgather")
        for fault in (
            Fault(
                "cp-halves-swapped",
                "halves of a rank's tokens change places",
                CP,
                wrapping(context, "halves_of", halves_in_order),
            ),
            Fault(
                "cp-chunks-of-another",
                "a rank has the chunks of another",
                CP,
                wrapping(context, "halves_of", lambda real, run, length, i, n: real(run, length, n - 1 - i, n)),
            ),
            Fault(
                "cp-second-halves-by-rank",
                "second halves are in the order of ranks",
                CP,
                wrapping(_Halves, "gathered", second_halves_by_rank),
            ),
            Fault("cp-second-half-asks-nothing", "the second half asks nothing of keys", CP, of_one_half(0)),
            Fault("cp-first-half-asks-nothing", "the first half asks nothing of keys", CP, of_one_half(1)),
            Fault(
                "cp-keys-not-summed",
                "gradients of keys are not summed over cp",
                CP,
                wrapping(Group, "start_scatter", keys_not_summed),
            ),
            Fault(
                "cp-prefix-of-row-left-out",
                "a row is seen without what is before a chunk",
                CP,
                wrapping(ContextParallel, "halves", prefix_of_a_row),
            ),
            Fault(
                "cp-prefix-of-document-left-out",
                "a document is seen without what is before a chunk",
                CP,
                wrapping(context, "half_mask", without_prefix),
                documents=True,
            ),
            Fault("cp-keys-read-early", "keys are read before they are there", CP, read_at_once("all_gather", "cp")),
            Fault(
                "cp-drops-what-first-drops", "each cp rank drops what the first does", CP, of_the_first("runs"), **ROPE
            ),
        )
    ),
)
