"""Causal self-attention with grouped key-value heads: this rank computes its own heads."""

from typing import Any

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.linear.weight import Weight, add_or_write
from trainer.mesh.group import Group
from trainer.model.microbatch import MicroBatch
from trainer.model.norm import Norm
from trainer.model.op_choices import OpChoices
from trainer.ops.attention.seam import attention
from trainer.ops.rope import QkNorm, rope_backward, rope_forward
from trainer.parallel.tensor import column_linear, row_linear
from trainer.store.store import ParameterStore


class Attention:
    """q, k and v as one product, norm and rotation of heads, softmax attention, output."""

    def __init__(
        self, model: ModelConfig, store: ParameterStore, prefix: str, group: Group, choices: OpChoices
    ) -> None:
        self.group, self.choices = group, choices
        self.counts = model.num_heads // group.size, max(model.num_kv_heads // group.size, 1)
        # key-value heads that several ranks hold have other holders than q, and so are a matrix of their own
        parts = ["qkv"] if group.size <= model.num_kv_heads else ["q", "kv"]
        self.qkv = [
            (
                store.weight(*(f"{prefix}.{name}.weight" for name in part)),
                store.weight_if_any(*(f"{prefix}.{name}.bias" for name in part)),
            )
            for part in parts
        ]
        self.out = store.weight(f"{prefix}.out.weight")
        self.out_bias = store.weight_if_any(f"{prefix}.out.bias")
        names = [f"{prefix}.{name}" for name in ("q_norm", "k_norm")] if model.qk_norm else []
        self.norms = [Norm(model, store, name) for name in names]

    def __call__(self, x_TD: Tensor, batch: MicroBatch) -> Tensor:
        q_TNH, k_TKH, v_TKH = self._heads(column_linear(x_TD, self.qkv, self.group), batch)
        y_TNH = attention(q_TNH, k_TKH, v_TKH, batch.mask, self.choices.attention)
        return row_linear(y_TNH.flatten(1), self.out, self.out_bias, self.group)

    def _heads(self, qkv_TC: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, normalised and turned."""
        norms = self.norms
        if norms and norms[0].bias is not None:  # LayerNorm, which the fused op has not
            parts = self._split(qkv_TC)
            qkv_TC = torch.cat([norms[0](parts[0])[0], norms[1](parts[1])[0], parts[2]], 1).flatten(1)
            norms = []
        if batch.turns_TH is None and not norms:
            return self._split(qkv_TC)
        return _Heads.apply(qkv_TC, batch.turns_TH, self.counts, norms)

    def _split(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads = self.counts
        heads = qkv_TC.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
        return heads.split([num_heads, num_kv_heads, num_kv_heads], 1)


class _Heads(torch.autograd.Function):
    """RoPE, and RMSNorm of heads before it: in place without a norm, since nobody else reads the product."""

    @staticmethod
    def forward(
        ctx: Any, qkv_TC: Tensor, turns_TH: Tensor | None, counts: tuple[int, int], norms: list[Norm]
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_TC = qkv_TC.detach()
        ctx.weights = [norm.weight for norm in norms]
        ctx.epochs = [weight.epoch for weight in ctx.weights]
        ctx.eps = norms[0].eps if norms else 0.0
        ctx.save_for_backward(turns_TH, qkv_TC if norms else None)
        return rope_forward(qkv_TC, turns_TH, counts, _qk_norm(ctx.weights, ctx.eps), in_place=not norms)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None]:
        turns_TH, qkv_TC = ctx.saved_tensors
        dqkv_TC, dweights = rope_backward((dq, dk, dv), qkv_TC, turns_TH, _qk_norm(ctx.weights, ctx.eps))
        for weight, epoch, dweight in zip(ctx.weights, ctx.epochs, () if dweights is None else dweights, strict=True):
            weight.check(epoch)
            weight.add_gradient(add_or_write(dweight))
        return dqkv_TC, None, None, None


def _qk_norm(weights: list[Weight], eps: float) -> QkNorm | None:
    return QkNorm(weights[0].values, weights[1].values, eps) if weights else None
