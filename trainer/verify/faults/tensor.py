"""Faults of matrices that ranks of tp cut: sums that are left out or made twice, and tokens that are cut too."""

from dataclasses import replace
from typing import Any

import torch

from ckptkit import ParallelLayout
from trainer import engine
from trainer.engine import Engine
from trainer.linear import overlapped
from trainer.linear.linear import linear
from trainer.linear.overlapped import TokenCut
from trainer.linear.weight import Weight
from trainer.mesh.group import Group
from trainer.model import chunk, head
from trainer.model.embedding import lookup
from trainer.model.head import Head
from trainer.model.microbatch import MicroBatch
from trainer.ops.cross_entropy import VocabularyPart
from trainer.parallel import tensor
from trainer.parallel.collectives import copy_to
from trainer.parallel.tensor import TensorParallel
from trainer.store import store
from trainer.store.store import ParameterStore
from trainer.verify.faults.fault import TP, Fault
from trainer.verify.faults.planting import in_one_buffer, not_summed, read_at_once, wrapping


def no_partial_rows(real: Any, config: Any) -> Any:
    return {name: replace(row, is_partial=False) for name, row in real(config).items()}


def norms_count_twice(real: Any, self: ParameterStore) -> torch.Tensor:
    is_whole = torch.tensor([not row.placement.cuts for row in self.table.values()])
    return real(self) * (1 + is_whole * (self.mesh.layout.tp > 1))


def padding_takes_part(
    real: Any, logits_TV: torch.Tensor, labels_S: torch.Tensor, part: VocabularyPart, *others: Any, **options: Any
) -> Any:
    return real(logits_TV, labels_S, replace(part, num_true_rows=logits_TV.shape[-1]), *others, **options)


def next_first_row(real: Any, self: Head, *args: Any) -> None:
    real(self, *args)
    self.first_row += self.group.index


def bias_before_the_sum(
    real: Any, self: TensorParallel, x: torch.Tensor, weight: Weight, bias: Weight, make_x: Any = None
) -> torch.Tensor:
    return self.leave(linear(x, weight, bias, make_x=make_x))


def counted_on_each(real: Any, self: Engine, batch: Any) -> Any:
    at = self.mesh.coords
    self.mesh.coords = replace(at, tp=0)
    try:
        return real(self, batch)
    finally:
        self.mesh.coords = at


def weights_of_the_first(real: Any, name: str, row: Any, shape: Any, layout: Any, coords: Any, *rest: Any) -> Any:
    return real(name, row, shape, layout, replace(coords, tp=0), *rest)


def row_0_for_others(
    real: Any, tokens: torch.Tensor, weight: Weight, cut: TensorParallel, start: torch.Tensor
) -> torch.Tensor:
    num_rows = weight.shape[0]
    local = tokens - cut.group.index * num_rows
    is_here = (local >= 0) & (local < num_rows)
    return cut.leave(lookup(local.masked_fill(~is_here, 0), weight, start))


def own_maximum(real: Any, self: Group, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return tensor if op == "max" else real(self, tensor, op)


def counted_on_tp(real: Any, self: Group, kind: str, tensor: torch.Tensor, *args: Any) -> Any:
    is_count = self.name == "dp" and kind == "all_reduce" and self.size > 1
    return real(self, kind, tensor * 2 if is_count else tensor, *args)


def heads_of_the_first(real: Any, self: MicroBatch, window: int | None, layer: int, heads: range) -> Any:
    """Return the masks of the first rank's heads."""
    return real(self, window, layer, range(len(heads)))


TENSOR_FAULTS = (
    Fault(
        "qk-norm-not-summed",
        "QK-norm gradients are not summed over tp",
        TP,
        wrapping(engine, "parameter_table", no_partial_rows),
        peer="NVIDIA/Megatron-LM#7452",
    ),
    Fault(
        "inputs-not-summed",
        "gradients of cut inputs are not summed over tp",
        TP,
        wrapping(tensor, "copy_to", lambda real, x, group: x),
    ),
    Fault(
        "weights-dropped-by-rank",
        "attention's dropout numbers heads within a tp rank",
        TP,
        wrapping(MicroBatch, "masks", heads_of_the_first),
        model={"attention_dropout": 0.2},
    ),
    Fault(
        "slopes-by-rank",
        "each tp rank has ALiBi's slopes of the first heads",
        TP,
        wrapping(MicroBatch, "masks", heads_of_the_first),
        model={"position": "alibi"},
    ),
    Fault(
        "row-linears-summed",
        "gradients of row linears are summed over tp",
        TP,
        wrapping(tensor, "reduce_from", lambda real, x, group: copy_to(real(x, group), group)),
    ),
    Fault(
        "row-bias-repeated",
        "a row bias is added on each tp rank before the sum",
        TP,
        wrapping(TensorParallel, "row_linear", bias_before_the_sum),
    ),
    Fault(
        "norm-counted-per-rank",
        "the squared norm counts norms on every tp rank",
        TP,
        wrapping(ParameterStore, "finish_reduce", norms_count_twice),
        peer="NVIDIA/Megatron-LM#5916",
    ),
    Fault(
        "weights-of-first-rank",
        "every tp rank draws the weights of the first",
        TP,
        wrapping(store, "initial_values", weights_of_the_first),
    ),
    Fault(
        "vocabulary-padding",
        "padding rows of the vocabulary take part in the softmax",
        TP,
        wrapping(head, "vocab_cross_entropy", padding_takes_part),
    ),
    Fault(
        "vocabulary-first-row",
        "the first row of a vocabulary part is off by one",
        TP,
        wrapping(Head, "__init__", next_first_row),
    ),
    Fault(
        "tokens-look-up-row-0",
        "tokens of other ranks look up row 0",
        TP,
        wrapping(chunk, "embed_tokens", row_0_for_others),
    ),
    Fault(
        "own-softmax-maximum",
        "the softmax subtracts each rank's own maximum",
        TP,
        wrapping(Group, "all_reduce", own_maximum),
    ),
    Fault(
        "evaluation-counts-tp", "evaluation counts on each tp rank", TP, wrapping(Engine, "eval_batch", counted_on_each)
    ),
    Fault(
        "scale-by-wrong-group",
        "tokens are counted over dp and tp, and the loss is scaled by that",
        ParallelLayout(tp=2, dp=2),
        wrapping(Group, "start", counted_on_tp),
        peer="NVIDIA/Megatron-LM#7165",
    ),
)

CUT_TOKEN_FAULTS = (
    Fault(
        "row-bias-repeated-cut",
        "a row bias is added on each tp rank before the sum of cut tokens",
        TP,
        wrapping(TensorParallel, "row_linear", bias_before_the_sum),
        cuts_tokens=True,
    ),
    Fault(
        "norms-of-own-tokens",
        "one tp rank contributes the gradients of norms, of its own tokens",
        TP,
        wrapping(engine, "parameter_table", no_partial_rows),
        model={"qk_norm": False},
        cuts_tokens=True,
    ),
    Fault(
        "cut-tokens-not-summed",
        "nothing of cut tokens is summed over tp",
        TP,
        wrapping(Group, "start_scatter", not_summed),
        cuts_tokens=True,
    ),
    Fault(
        "dropout-by-tp-rank",
        "dropout begins with the first token on each tp rank",
        TP,
        wrapping(tensor, "share_of", lambda real, runs, index, size: real(runs, 0, size)),
        cuts_tokens=True,
        model={"position": "rope"},
    ),
    Fault(
        "dropout-place-off-by-one",
        "a dropped token's place is off by one on the second tp rank",
        TP,
        wrapping(
            tensor,
            "share_of",
            lambda real, runs, index, size: tuple(
                range(run.start + index, run.stop + index) for run in real(runs, index, size)
            ),
        ),
        cuts_tokens=True,
        model={"position": "rope"},
    ),
    Fault(
        "parts-put-first",
        "each part of the tokens is put where the first is",
        TP,
        wrapping(
            TokenCut,
            "rows",
            lambda real, self, index, part, num_rows: real(self, index, slice(0, part.stop - part.start), num_rows),
        ),
        cuts_tokens=True,
        num_parts=3,
    ),
    Fault(
        "last-part-left-out",
        "the last part of the tokens is not transferred",
        TP,
        wrapping(overlapped, "parts_of", lambda real, *sizes: real(*sizes)[:-1]),
        cuts_tokens=True,
        num_parts=3,
    ),
    Fault(
        "parts-share-a-buffer",
        "parts that are being summed share a buffer",
        TP,
        in_one_buffer("start_scatter"),
        cuts_tokens=True,
        num_parts=2,
    ),
    Fault(
        "parts-read-early",
        "parts of the tokens are read before they are there",
        TP,
        read_at_once("all_gather", "tp"),
        cuts_tokens=True,
        num_parts=2,
    ),
    Fault(
        "part-sums-read-early",
        "parts of a sum are read before they are there",
        TP,
        read_at_once("reduce_scatter", "tp"),
        cuts_tokens=True,
        num_parts=2,
    ),
    Fault(
        "positions-of-first-tokens",
        "each tp rank has the positions of the first tokens",
        TP,
        wrapping(MicroBatch, "own", lambda real, self, x: x[: len(real(self, x))]),
        cuts_tokens=True,
    ),
)
