"""Faults of a parallel trainer, by name: each patches one function, and parity must fail while it is planted.

A fault that depends on the layout is planted in the one process too, which stays right or is wrong otherwise. One that
does not is compared with plain torch. A patch names a module's or a class's attribute: when code moves, its import here
moves too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from trainer import engine
from trainer.config.optim import GroupConfig
from trainer.engine import Engine
from trainer.linear import overlapped
from trainer.linear.linear import linear
from trainer.linear.overlapped import TokenCut
from trainer.linear.weight import Weight
from trainer.mesh.group import Group, Work
from trainer.model import chunk, head, table
from trainer.model.chunk import Chunk
from trainer.model.embedding import lookup
from trainer.model.head import Head
from trainer.model.microbatch import MicroBatch
from trainer.ops.activation import Activation
from trainer.ops.cross_entropy import VocabularyPart
from trainer.parallel import tensor
from trainer.parallel.collectives import copy_to
from trainer.parallel.tensor import TensorParallel
from trainer.pipeline.executor import Executor
from trainer.store import plan, store
from trainer.store.bucket import Bucket
from trainer.store.optimizers import Updates
from trainer.store.store import ParameterStore
from trainer.verdict import Verdict

GROUPS = (GroupConfig("*.norm?.weight", 0.5, 0.3), GroupConfig("embed.*", 2.0), GroupConfig("*.down.*", 1.0, 3.0))
Patch = pytest.MonkeyPatch
TP, PP, DP = ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2)


@dataclass(frozen=True)
class Fault:
    """What is wrong, where it shows, and how to plant it; without a layout, plain torch shows it.

    With ep > 1 the sums of a store that holds experts show it, and with `shows` that comparison. `trips` is what an
    assertion of the trainer says that sees it before parity does; it is not there under `python -O`.
    """

    name: str
    layout: ParallelLayout | None
    plant: Callable[[Patch], None]
    zero_stage: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    cuts_tokens: bool = False
    schedule: str = "1f1b"
    dp_shard: int = 0
    num_parts: int = 1  # in which cut tokens are transferred
    micro_batch_size: int = 1
    documents: bool = False  # attention stays in them
    trips: str = ""
    groups: tuple[GroupConfig, ...] = ()
    cp_method: str = "ulysses"
    moe_dispatch: str = "allgather"
    moe_overlap_parts: int = 1
    shows: Callable[[], object] | None = None


def skipping(kind: str, group: str) -> Callable[[Patch], None]:
    """Leave one kind of collective out on the groups of a name."""

    def plant(patch: Patch) -> None:
        real = Group._call

        def call(self: Group, called: str, *args: Any, **options: Any) -> Any:
            is_left_out = (called.removesuffix("_coalesced"), self.name) == (kind, group)
            return None if is_left_out else real(self, called, *args, **options)

        patch.setattr(Group, "_call", call)

    return plant


def wrapping(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """Replace a function by change(the function, *its arguments)."""

    def plant(patch: Patch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **options: change(real, *args, **options))

    return plant


def no_partial_rows(real: Any, config: Any) -> Any:
    return {name: replace(row, is_partial=False) for name, row in real(config).items()}


def own_first_sample(real: Any, self: Engine, step: int, batch: Any, **options: Any) -> Any:
    found = real(self, step, batch, **options)
    size = self.config.train.micro_batch_size
    length = self.config.train.seq_length
    firsts = range(batch.first_sample * length, 10**9, size * length)
    return [replace(each, runs=(range(first, first + size * length),)) for each, first in zip(found, firsts)]


def shifted_positions(real: Any, self: Engine, step: int, batch: Any, **options: Any) -> Any:
    seq, index = self.config.train.seq_length, self.mesh.dp.index
    return [replace(each, positions_S=(each.positions_S + index) % seq) for each in real(self, step, batch, **options)]


def every_row_decays(real: Any, config: Any) -> Any:
    return {name: replace(row, decay=1.0) for name, row in real(config).items()}


def neighbours_factors(real: Any, rows: Any, groups: Any) -> Any:
    found = real(rows, groups)
    names = list(found)
    shifted = {name: found[after] for name, after in zip(names, names[1:] + names[:1], strict=True)}
    return {name: replace(found[name], rate=row.rate, decay=row.decay) for name, row in shifted.items()}


def norms_count_twice(real: Any, self: ParameterStore) -> torch.Tensor:
    is_whole = torch.tensor([not row.placement.cuts for row in self.table.values()])
    return real(self) * (1 + is_whole * (self.mesh.layout.tp > 1))


def layers_from_zero(real: Any, self: Chunk, *args: Any) -> None:
    real(self, *args)
    for number, block in enumerate(self.blocks):
        block.number = number


def averaged(real: Any, self: Any) -> None:
    real(self)
    self.gradients.div_(self.group.size)


def padding_takes_part(
    real: Any, logits_TV: torch.Tensor, labels_S: torch.Tensor, part: VocabularyPart, *others: Any, **options: Any
) -> Any:
    return real(logits_TV, labels_S, replace(part, num_true_rows=logits_TV.shape[-1]), *others, **options)


def next_first_row(real: Any, self: Head, *args: Any) -> None:
    real(self, *args)
    self.first_row += self.group.index


def swapped(real: Any, name: str, *sizes: int) -> Any:
    swap = {0: 1, 1: 0} if sizes[-1] else {}  # on all ranks but the first
    actions = real(name, *sizes)
    return [action._replace(microbatch=swap.get(action.microbatch, action.microbatch)) for action in actions]


def one_buffer(real: Any, self: Executor[Any], link_of: Any, new_buffer: Any, *rest: Any, **options: Any) -> None:
    buffer = cache(new_buffer)
    real(self, link_of, lambda: buffer().data, *rest, **options)  # whose version counter is its own


def stages_2_and_4_swapped(real: Any, *arguments: Any) -> list[range]:
    ranges = real(*arguments)
    return [ranges[{2: 4, 4: 2}.get(stage, stage)] for stage in range(len(ranges))]


def bias_before_the_sum(
    real: Any, self: TensorParallel, x: torch.Tensor, weight: Weight, bias: Weight, make_x: Any = None
) -> torch.Tensor:
    return self.leave(linear(x, weight, bias, make_x=make_x))


def own_norm(real: Any, self: Group, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    own = tensor.clone()
    found = real(self, tensor, *args)
    if self.name == "world" and self.size > 1:
        found[1:] = own[1:]
    return found


def counted_on_each(real: Any, self: Engine, batch: Any) -> Any:
    at = self.mesh.coords
    self.mesh.coords = replace(at, tp=0)
    try:
        return real(self, batch)
    finally:
        self.mesh.coords = at


def weights_of_the_first(real: Any, name: str, row: Any, shape: Any, layout: Any, coords: Any, *rest: Any) -> Any:
    return real(name, row, shape, layout, replace(coords, tp=0), *rest)


def overwriting(real: Any, self: Weight, compute: Callable[[torch.Tensor, bool], object], **ends: bool) -> None:
    real(self, lambda out, first: compute(out, True), **ends)


def not_zeroed(real: Any, self: Weight) -> None:
    self._num_ended = 0


def neighbours_interval(real: Any, total: int, size: int, index: int, itemsize: int) -> Any:
    return real(total, size, (index + 1) % size, itemsize)


def own_means(real: Any, self: Engine, name: str, batches: Any, reduce_loss: Any) -> torch.Tensor:
    def reduce(losses: torch.Tensor, batch: Any) -> torch.Tensor:
        return (losses * batch.loss_mask_S).sum() / batch.loss_mask_S.sum().clamp(min=1) / len(batches)

    return real(self, name, batches, reduce)


def row_0_for_others(
    real: Any, tokens: torch.Tensor, weight: Weight, cut: TensorParallel, start: torch.Tensor
) -> torch.Tensor:
    num_rows = weight.shape[0]
    local = tokens - cut.group.index * num_rows
    is_here = (local >= 0) & (local < num_rows)
    return cut.leave(lookup(local.masked_fill(~is_here, 0), weight, start))


def not_summed(real: Any, self: Group, whole: torch.Tensor, share: torch.Tensor | None = None) -> Work:
    own = self.share(whole).clone()
    return Work(self, "reduce_scatter", own if share is None else share.copy_(own), None)


def read_at_once(kind: str, name: str) -> Callable[[Patch], None]:
    """Do not wait for one kind of call on the groups of a name."""

    def wait(real: Any, self: Work) -> torch.Tensor:
        return self.tensor.clone() if self.kind == kind and self.group.name == name else real(self)

    return wrapping(Work, "wait", wait)


def in_one_buffer(name: str) -> Callable[[Patch], None]:
    """Let all that a group passes to a method go through the same memory."""
    buffers: dict[Any, torch.Tensor] = {}

    def call(real: Any, self: Group, tensor: torch.Tensor, *args: Any, **options: Any) -> Work:
        own = buffers.setdefault((self.name, self.ranks, self.index), torch.empty(4096, dtype=tensor.dtype))
        return real(self, own[: tensor.numel()].view_as(tensor).copy_(tensor), *args, **options)

    return wrapping(Group, name, call)


def own_maximum(real: Any, self: Group, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return tensor if op == "max" else real(self, tensor, op)


def narrow_angles(real: Any, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Any:
    return real(positions, frequencies, torch.float32).to(dtype)


def gradient_for_product(real: Any, self: Activation, dy: torch.Tensor, x: torch.Tensor) -> Any:
    own = dy.clone()
    return real(self, dy, x)[0], own


FAULTS = [
    Fault("QK-norm gradients are not summed over tp", TP, wrapping(engine, "parameter_table", no_partial_rows)),
    Fault("gradients of cut inputs are not summed over tp", TP, wrapping(tensor, "copy_to", lambda real, x, group: x)),
    Fault("gradients of row linears are summed over tp", TP,
          wrapping(tensor, "reduce_from", lambda real, x, group: copy_to(real(x, group), group))),
    Fault("a row bias is added on each tp rank before the sum", TP,
          wrapping(TensorParallel, "row_linear", bias_before_the_sum)),
    Fault("the squared norm counts norms on every tp rank", TP,
          wrapping(ParameterStore, "finish_reduce", norms_count_twice)),
    Fault("every tp rank draws the weights of the first", TP, wrapping(store, "initial_values", weights_of_the_first)),
    Fault("padding rows of the vocabulary take part in the softmax", TP,
          wrapping(head, "vocab_cross_entropy", padding_takes_part)),
    Fault("the first row of a vocabulary part is off by one", TP, wrapping(Head, "__init__", next_first_row)),
    Fault("tokens of other ranks look up row 0", TP, wrapping(chunk, "embed_tokens", row_0_for_others)),
    Fault("the softmax subtracts each rank's own maximum", TP, wrapping(Group, "all_reduce", own_maximum)),
    Fault("evaluation counts on each tp rank", TP, wrapping(Engine, "eval_batch", counted_on_each)),
    Fault("a row bias is added on each tp rank before the sum of cut tokens", TP,
          wrapping(TensorParallel, "row_linear", bias_before_the_sum), cuts_tokens=True),
    Fault("one tp rank contributes the gradients of norms, of its own tokens", TP,
          wrapping(engine, "parameter_table", no_partial_rows), model={"qk_norm": False}, cuts_tokens=True),
    Fault("nothing of cut tokens is summed over tp", TP, wrapping(Group, "start_scatter", not_summed),
          cuts_tokens=True),
    Fault("dropout begins with the first token on each tp rank", TP,
          wrapping(tensor, "share_of", lambda real, runs, index, size: real(runs, 0, size)), cuts_tokens=True,
          model={"position": "rope"}),
    Fault("a dropped token's place is off by one on the second tp rank", TP,
          wrapping(tensor, "share_of", lambda real, runs, index, size:
                   tuple(range(run.start + index, run.stop + index) for run in real(runs, index, size))),
          cuts_tokens=True, model={"position": "rope"}),
    Fault("each part of the tokens is put where the first is", TP,
          wrapping(TokenCut, "rows", lambda real, self, index, part, num_rows:
                   real(self, index, slice(0, part.stop - part.start), num_rows)), cuts_tokens=True, num_parts=3),
    Fault("the last part of the tokens is not transferred", TP,
          wrapping(overlapped, "parts_of", lambda real, *sizes: real(*sizes)[:-1]), cuts_tokens=True, num_parts=3),
    Fault("parts that are being summed share a buffer", TP, in_one_buffer("start_scatter"), cuts_tokens=True,
          num_parts=2),
    Fault("parts of the tokens are read before they are there", TP, read_at_once("all_gather", "tp"), cuts_tokens=True,
          num_parts=2),
    Fault("parts of a sum are read before they are there", TP, read_at_once("reduce_scatter", "tp"), cuts_tokens=True,
          num_parts=2),
    Fault("each tp rank has the positions of the first tokens", TP,
          wrapping(MicroBatch, "own", lambda real, self, x: x[: len(real(self, x))]), cuts_tokens=True),
    Fault("tied gradients are not summed over the ends", PP, skipping("reduce_scatter", "cp.dp.ends")),
    Fault("the tied head does not get the new values", PP, skipping("all_gather", "cp.dp.ends")),
    Fault("dropout numbers layers within a stage", PP, wrapping(Chunk, "__init__", layers_from_zero)),
    Fault("the last stage takes two micro-batches in another order", PP, wrapping(engine, "rank_actions", swapped)),
    Fault("activations are read before they are received", PP, read_at_once("receive", "activations")),
    Fault("gradients are read before they are received", PP, read_at_once("receive", "gradients")),
    Fault("tensors that are being sent share a buffer", PP, in_one_buffer("send")),
    Fault("the next gradient is received where a W reads", ParallelLayout(pp=3),
          wrapping(Executor, "__init__", one_buffer), model={"num_layers": 3}, schedule="zb-h1"),
    Fault("two stages of a rank change places", ParallelLayout(pp=2, virtual=3),
          wrapping(chunk, "stage_ranges", stages_2_and_4_swapped), model={"num_layers": 6}),
    Fault("the last rank takes two micro-batches of both its stages in another order",
          ParallelLayout(pp=2, virtual=2), wrapping(engine, "rank_actions", swapped), model={"num_layers": 4}),
    Fault("gradients are averaged over dp", DP, wrapping(Bucket, "finish_reduce", averaged)),
    Fault("gradients are not summed over dp, zero_stage 0", DP,
          wrapping(Bucket, "start_reduce", lambda real, self: None), zero_stage=0),
    Fault("gradients are read before their sum is there", DP, read_at_once("reduce_scatter", "dp")),
    Fault("parameters are read before they are gathered", DP, wrapping(Bucket, "arrive", lambda real, self: None)),
    Fault("gradients are not summed over dp, zero_stage 1", DP, skipping("reduce_scatter", "dp")),
    Fault("new parameters are not gathered over dp", DP, skipping("all_gather", "dp")),
    Fault("a rank updates its neighbour's interval", DP, wrapping(plan, "shard_interval", neighbours_interval)),
    Fault("tokens are counted on this rank alone", DP, skipping("all_reduce", "dp")),
    Fault("the loss is the mean of the micro-batches' means", DP, wrapping(Engine, "_run", own_means)),
    Fault("each micro-batch's gradients replace those before", DP, wrapping(Weight, "add_gradient", overwriting)),
    Fault("dropout numbers samples within a rank", DP, wrapping(Engine, "_microbatches", own_first_sample)),
    Fault("positions are shifted by the dp rank", DP, wrapping(Engine, "_microbatches", shifted_positions)),
    Fault("gradients are clipped by the rank's own norm", DP, wrapping(Group, "all_reduce", own_norm)),
    Fault("AdamW counts a step too many", None,
          wrapping(Updates, "update", lambda real, *args, **named: real(*args[:-1], args[-1] + 1, **named))),
    Fault("gradients are not clipped", None,
          wrapping(Verdict, "judge", lambda real, *args: torch.ones_like(real(*args)))),
    Fault("norms and biases decay", None, wrapping(engine, "parameter_table", every_row_decays)),
    Fault("a group's factors are applied to the neighbour", None, wrapping(table, "with_groups", neighbours_factors),
          groups=GROUPS),
    Fault("a group's weight decay is left out", None,
          wrapping(table, "with_groups", lambda real, rows, groups: real(
              rows, [replace(group, decay_factor=None) for group in groups])), groups=GROUPS),
    Fault("gradients are not zeroed between steps", None, wrapping(Weight, "begin_sum", not_zeroed)),
    Fault("down's gradient is made of its input's gradient", None,
          wrapping(Activation, "backward", gradient_for_product)),
    Fault("rotary angles are of float32", None, wrapping(chunk, "turns_at", narrow_angles),
          model={"position": "rope"}),
]  # fmt: skip
