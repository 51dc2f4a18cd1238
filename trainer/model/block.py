"""The transformer block: norms, attention and MLP around the residual stream.

Letters of shapes in this folder: S tokens of a micro-batch, T those of them that this rank has between cut linears
(all, unless sequence parallel cuts them), D hidden size, N query heads and K key-value heads of this rank, H head size,
C = (N + 2 K) H, F feed-forward size of this rank, V vocabulary rows of this rank.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.model.attention import Attention
from trainer.model.microbatch import MicroBatch
from trainer.model.norm import Norm
from trainer.model.op_choices import OpChoices
from trainer.ops.activation import ACTIVATIONS, SWIGLU
from trainer.parallel.tensor import TensorParallel
from trainer.store.store import ParameterStore
from trainer.store.unit import Border, Unit

SITE_ATTENTION, SITE_MLP = 0, 1  # the dropouts of a block; the embedding counts as a layer after the last


class MLP:
    """gate and up as one product, the nonlinearity, down: SwiGLU (Shazeer, 2020), or without a gate GELU.

    Kept for the backward: x and the packed gate|up, [S, 2 F], of which the backward makes down's input again.
    """

    def __init__(self, model: ModelConfig, unit: Unit, prefix: str, tensor: TensorParallel, choices: OpChoices) -> None:
        self.tensor, self.activation, self.choices = tensor, ACTIVATIONS[model.activation], choices
        names = ("gate", "up") if self.activation is SWIGLU else ("up",)
        self.up = unit.weight(*(f"{prefix}.{name}.weight" for name in names))
        self.up_bias = unit.weight_if_any(*(f"{prefix}.{name}.bias" for name in names))
        self.down = unit.weight(f"{prefix}.down.weight")
        self.down_bias = unit.weight_if_any(f"{prefix}.down.bias")

    def __call__(self, x_TD: Tensor) -> Tensor:
        activation = self.activation.in_form(self.choices.forms.activation)
        packed_SC = self.tensor.column_linear(x_TD, [(self.up, self.up_bias)])
        return self.tensor.row_linear(packed_SC, self.down, self.down_bias, activation)


class Block:
    """One pre-norm layer behind the unit `before`: two units; `number` is its place in the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        store: ParameterStore,
        number: int,
        tensor: TensorParallel,
        choices: OpChoices,
        before: Unit | None,
    ) -> None:
        prefix, self.number = f"layers.{number}", number
        first, self.unit = store.unit(f"{prefix}.attn"), store.unit(f"{prefix}.mlp")
        self.norm1 = Norm(model, first, f"{prefix}.norm1", choices, Border(before, first))
        self.attention = Attention(model, first, f"{prefix}.attn", tensor, choices, choices.windows[number])
        self.norm2 = Norm(model, self.unit, f"{prefix}.norm2", choices, Border(first, self.unit))
        self.mlp = MLP(model, self.unit, f"{prefix}.mlp", tensor, choices)

    def __call__(self, x_TD: Tensor, branch_TD: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the branch that is yet to be added to it, as it takes them.

        Whoever comes next adds the two: a norm in its own pass, or else the end of the stage.
        """
        return self.after_norm(*self.norm1(x_TD, branch_TD), batch)

    def after_norm(self, h_TD: Tensor, x_TD: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the same from the stream x and its norm h."""
        branch_TD = batch.drop(self.attention(h_TD, batch), layer=self.number, site=SITE_ATTENTION)
        h_TD, x_TD = self.norm2(x_TD, branch_TD)
        return x_TD, batch.drop(self.mlp(h_TD), layer=self.number, site=SITE_MLP)


def recompute(block: Block, x_TD: Tensor, branch_TD: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return block(x, branch, batch), of which the backward makes all but the sum of x and branch again.

    Nothing random is kept: dropout masks are a function of a token's place. Source: Chen et al., 2016.
    """
    return _Recompute.apply(x_TD, branch_TD, block, batch)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, branch_TD: Tensor | None, block: Block, batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        h_TD, x_TD = block.norm1(x_TD, branch_TD)
        ctx.save_for_backward(x_TD)
        ctx.block, ctx.batch = block, batch
        return block.after_norm(h_TD, x_TD, batch)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_TD,) = ctx.saved_tensors
        x_TD = x_TD.detach().requires_grad_()
        with torch.enable_grad():
            outputs = ctx.block(x_TD, None, ctx.batch)
        torch.autograd.backward(outputs, gradients)
        return x_TD.grad, x_TD.grad if ctx.needs_input_grad[1] else None, None, None
