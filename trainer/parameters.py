"""The parameter table: name, global shape, placement and initial values of every parameter, without building a model.

A checkpoint's table and each rank's own stage both come from it. Names are the checkpoint's; nothing is fused.
"""

import math
from dataclasses import dataclass, replace

import torch

from ckptkit import Coords, Cut, ParallelLayout, Placement
from trainer.config import Config, ModelConfig
from trainer.ops.philox import normal_


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter in global terms.

    `std` is None for ones, 0 for zeros, else the standard deviation of its normals. `is_partial` says that its gradient
    on a tensor-parallel rank covers only that rank's heads.
    """

    shape: tuple[int, ...]
    placement: Placement
    std: float | None
    is_partial: bool = False

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) > 1


def parameter_table(config: Config) -> dict[str, Parameter]:
    """Return every parameter of the model in order of depth.

    A tied head has a row with `tied_to` and no values of its own.
    """
    model = config.model
    hidden, vocab = model.hidden_size, model.vocab_size
    table = {"embed.weight": Parameter((vocab, hidden), Placement("first", (Cut(0),), round_to=1), model.init_std)}
    if model.position == "learned":
        table["pos.weight"] = Parameter((config.train.seq_length, hidden), Placement("first"), model.init_std)
    for layer in range(model.num_layers):
        table |= {f"layers.{layer}.{name}": row for name, row in _layer_rows(model, layer).items()}
    table |= _norm_rows(model, "norm", hidden, Placement("last"))
    tied_to = "embed.weight" if model.tie_embeddings else None
    table["head.weight"] = Parameter(
        (vocab, hidden), Placement("last", (Cut(0),), round_to=1, tied_to=tied_to), model.init_std
    )
    return table


def _layer_rows(model: ModelConfig, layer: int) -> dict[str, Parameter]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    head = hidden // model.num_heads
    kv = model.num_kv_heads * head
    whole, column, row = Placement(layer), Placement(layer, (Cut(0),)), Placement(layer, (Cut(1),))
    kv_heads = Placement(layer, (Cut(0, max_parts=model.num_kv_heads),))
    std = model.init_std
    std_out = std / math.sqrt(2 * model.num_layers)  # of what adds to the residual stream (GPT-2)
    attention = {"attn.q": (hidden, column), "attn.k": (kv, kv_heads), "attn.v": (kv, kv_heads)}
    mlp = {"mlp.gate": (ffn, hidden)} if model.activation == "swiglu" else {}
    mlp["mlp.up"] = (ffn, hidden)
    rows = _norm_rows(model, "norm1", hidden, whole)
    for name, (size, cut) in attention.items():
        rows |= _linear_rows(model, name, (size, hidden), cut, cut, std)
    if model.qk_norm:
        for name in ("attn.q_norm", "attn.k_norm"):
            norm = _norm_rows(model, name, head, whole)
            rows |= {key: replace(row, is_partial=True) for key, row in norm.items()}
    rows |= _linear_rows(model, "attn.out", (hidden, hidden), row, whole, std_out)
    rows |= _norm_rows(model, "norm2", hidden, whole)
    for name, shape in mlp.items():
        rows |= _linear_rows(model, name, shape, column, column, std)
    return rows | _linear_rows(model, "mlp.down", (hidden, ffn), row, whole, std_out)


def _linear_rows(
    model: ModelConfig, name: str, shape: tuple[int, int], weight: Placement, bias: Placement, std: float
) -> dict[str, Parameter]:
    rows = {f"{name}.weight": Parameter(shape, weight, std)}
    if model.bias:
        rows[f"{name}.bias"] = Parameter(shape[:1], bias, 0.0)
    return rows


def _norm_rows(model: ModelConfig, name: str, size: int, placement: Placement) -> dict[str, Parameter]:
    rows = {f"{name}.weight": Parameter((size,), placement, None)}
    if model.norm == "layernorm":
        rows[f"{name}.bias"] = Parameter((size,), placement, 0.0)
    return rows


def initialise(
    tensor: torch.Tensor, name: str, row: Parameter, layout: ParallelLayout, coords: Coords, seed: int
) -> None:
    """Fill a rank's live tensor with its own box of the initial values; vocabulary padding is zero."""
    if row.std is None:
        tensor.fill_(1.0)
        return
    tensor.zero_()
    if row.std:
        box = row.placement.local_box(name, row.shape, layout, coords)
        values = torch.empty(box.shape, dtype=tensor.dtype)
        normal_(values, seed, name, row.shape, box.offset, row.std)
        tensor[tuple(slice(0, size) for size in box.shape)].copy_(values)
