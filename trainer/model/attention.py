"""Causal self-attention with grouped key-value heads: this rank computes its own heads."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.model.microbatch import MicroBatch
from trainer.model.norm import Norm, WeightHandles
from trainer.model.op_choices import OpChoices
from trainer.ops.attention.seam import Backend, Mask
from trainer.ops.rope import rope_of_handles
from trainer.parallel.context import ContextParallel
from trainer.parallel.tensor import TensorParallel
from trainer.store.unit import Unit


class Attend(Protocol):
    """How heads of this rank's tokens see all tokens: context parallel, or what is kept of earlier ones."""

    def attend(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        masks: Sequence[Mask],
        length: int,
        backend: Backend,
        results: list[Tensor] | None,
    ) -> Tensor:
        """Return the result of the heads, [T, N, H]."""


class Attention:
    """q, k and v as one product, norm and rotation of heads, softmax attention, output; `number` is the layer's."""

    def __init__(
        self,
        model: ModelConfig,
        unit: Unit,
        number: int,
        tensor: TensorParallel,
        context: ContextParallel,
        choices: OpChoices,
    ) -> None:
        prefix, self.number, self.window = f"layers.{number}.attn", number, choices.windows[number]
        self.context: Attend = context
        self.tensor, self.choices, self.head_size = tensor, choices, model.head_size
        group = tensor.group
        self.eps = model.norm_eps
        self.counts = model.num_heads // group.size, max(model.num_kv_heads // group.size, 1)
        # key-value heads that several ranks hold have other holders than q, and so are a matrix of their own
        parts = ["qkv"] if group.size <= model.num_kv_heads else ["q", "kv"]
        self.qkv = [
            (
                unit.weight(*(f"{prefix}.{name}.weight" for name in part)),
                unit.weight_if_any(*(f"{prefix}.{name}.bias" for name in part)),
            )
            for part in parts
        ]
        self.out = unit.weight(f"{prefix}.out.weight")
        self.out_bias = unit.weight_if_any(f"{prefix}.out.bias")
        names = [f"{prefix}.{name}" for name in ("q_norm", "k_norm")] if model.qk_norm else []
        self.norms = [Norm(model, unit, name, choices) for name in names]

    def attend(self, x_TD: Tensor, batch: MicroBatch, results: list[Tensor] | None = None) -> Tensor:
        """Return the result of this rank's heads, [S, N H]; `results` as for `trainer.ops.attention.seam.attention`."""
        heads = self._heads(self.tensor.column_linear(x_TD, self.qkv), batch)
        first = self.tensor.group.index * self.counts[0]
        masks = batch.masks(self.window, self.number, range(first, first + self.counts[0]))
        backend = self.choices.attention[masks[0].kind]
        y_SNH = self.context.attend(*heads, masks, batch.seq_length, backend, results)
        return y_SNH.flatten(1)

    def project(self, y_SC: Tensor) -> Tensor:
        """Return the output for them."""
        return self.tensor.row_linear(y_SC, self.out, self.out_bias)

    def _heads(self, qkv_SC: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        norms = self.norms
        if norms and norms[0].bias is not None:  # LayerNorm, which the fused op has not
            parts = self._split(qkv_SC)
            qkv_SC = torch.cat([norms[0](parts[0])[0], norms[1](parts[1])[0], parts[2]], 1).flatten(1)
            norms = []
        if batch.turns_SH is None and not norms:
            return self._split(qkv_SC)
        handles = WeightHandles(norms[0].weight, norms[1].weight, norms[0].weight.epoch, None) if norms else None
        return rope_of_handles(qkv_SC, batch.turns_SH, self.counts, handles, self.eps, self.choices.forms.rope)

    def _split(self, qkv_SC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads = self.counts
        heads = qkv_SC.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
        return heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
