"""The MLP of a block: each token goes through all of it."""

from torch import Tensor

from trainer.config import ModelConfig
from trainer.model.microbatch import MicroBatch
from trainer.model.op_choices import OpChoices
from trainer.ops.activation import ACTIVATIONS, SWIGLU
from trainer.parallel.tensor import TensorParallel
from trainer.store.unit import Unit


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

    @property
    def is_crowded(self) -> bool:
        """Return whether what is kept for the backward would not fit: it is as planned."""
        return False

    def widen(self, x_TD: Tensor, batch: MicroBatch) -> tuple[Tensor]:
        """Return the packed gate|up, or up, of tokens that are all treated alike."""
        return (self.tensor.column_linear(x_TD, [(self.up, self.up_bias)]),)

    def narrow(self, packed_SC: Tensor) -> Tensor:
        """Return the output for them."""
        activation = self.activation.in_form(self.choices.forms.activation)
        return self.tensor.row_linear(packed_SC, self.down, self.down_bias, activation)
