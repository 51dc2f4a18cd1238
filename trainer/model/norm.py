"""RMSNorm and LayerNorm over the last dim (the fused op), which hand the gradients of their weights to the store."""

from torch import Tensor

from trainer.config import ModelConfig
from trainer.linear.weight import add_or_write
from trainer.model.op_choices import OpChoices
from trainer.ops.norm import add_norm
from trainer.store.store import ParameterStore


class Norm:
    """RMSNorm, or LayerNorm if the model asks for it."""

    def __init__(self, model: ModelConfig, store: ParameterStore, name: str, choices: OpChoices) -> None:
        self.eps, self.choices = model.norm_eps, choices
        self.weight, self.bias = store.weight(f"{name}.weight"), store.weight_if_any(f"{name}.bias")

    def __call__(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of the residual stream x and a branch, if there is one, and that sum.

        The norm is that of the rounded sum: it has the same bits if the sum comes from another stage.
        """
        weights = [weight for weight in (self.weight, self.bias) if weight is not None]
        epoch = self.weight.epoch

        def take_gradients(gradients: tuple[Tensor, ...]) -> None:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.check(epoch)
                weight.add_gradient(add_or_write(gradient))

        bias = None if self.bias is None else self.bias.values
        return add_norm(x, branch, self.weight.values, bias, self.eps, take_gradients, self.choices.forms.norm)
