"""RMSNorm and LayerNorm over the last dim (the fused op), which hand the gradients of their weights to the store."""

from dataclasses import dataclass

from torch import Tensor

from trainer.config import ModelConfig
from trainer.linear.weight import Weight, add_or_write
from trainer.model.op_choices import OpChoices
from trainer.ops.norm import add_norm
from trainer.store.unit import Border, Unit


class Norm:
    """RMSNorm, or LayerNorm if the model asks for it; one that its unit begins with goes over the border to it."""

    def __init__(
        self, model: ModelConfig, unit: Unit, name: str, choices: OpChoices, border: Border | None = None
    ) -> None:
        self.eps, self.choices, self.border = model.norm_eps, choices, border
        self.weight, self.bias = unit.weight(f"{name}.weight"), unit.weight_if_any(f"{name}.bias")

    def __call__(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of the residual stream x and a branch, if there is one, and that sum.

        The norm is that of the rounded sum: it has the same bits if the sum comes from another stage.
        """
        if self.border is not None:
            self.border.forward()
        handles = WeightHandles(self.weight, self.bias, self.weight.epoch, self.border)
        return add_norm(x, branch, *handles.read(), self.eps, handles, self.choices.forms.norm)


@dataclass(frozen=True, slots=True)
class WeightHandles:
    """Weight and bias of one norm, or the weights of two, as they were at an epoch, and the border before it."""

    weight: Weight
    bias: Weight | None
    epoch: int
    border: Border | None

    def read(self) -> tuple[Tensor, Tensor | None]:
        self.weight.check(self.epoch)
        return self.weight.values, None if self.bias is None else self.bias.values

    def take(self, gradients: tuple[Tensor, ...]) -> None:
        for weight, gradient in zip((self.weight, self.bias), gradients, strict=False):
            assert weight is not None, "a norm with a bias has two gradients"
            weight.add_gradient(add_or_write(gradient))
        if self.border is not None:
            self.border.backward()
