"""The feed-forward network: SwiGLU (Shazeer, 2020) or GELU."""

import torch.nn.functional as F
from torch import Tensor

from trainer.config import ModelConfig
from trainer.linear.linear import linear, split_linear
from trainer.mesh.group import Group
from trainer.parallel.collectives import copy_to
from trainer.parallel.tensor import row_linear
from trainer.store.store import ParameterStore


class MLP:
    """gate and up, the nonlinearity, down; without a gate for GELU."""

    def __init__(self, model: ModelConfig, store: ParameterStore, prefix: str, group: Group) -> None:
        self.group, self.has_gate = group, model.activation == "swiglu"
        names = ("gate", "up") if self.has_gate else ("up",)
        self.up = store.weight(*(f"{prefix}.{name}.weight" for name in names))
        self.up_bias = store.weight_if_any(*(f"{prefix}.{name}.bias" for name in names))
        self.down = store.weight(f"{prefix}.down.weight")
        self.down_bias = store.weight_if_any(f"{prefix}.down.bias")

    def __call__(self, x_TD: Tensor) -> Tensor:
        x_TD = copy_to(x_TD, self.group)
        if self.has_gate:
            gate_TF, up_TF = split_linear(x_TD, self.up, self.up_bias, 2)
            h_TF = F.silu(gate_TF) * up_TF
        else:
            h_TF = F.gelu(linear(x_TD, self.up, self.up_bias), approximate="tanh")
        return row_linear(h_TF, self.down, self.down_bias, self.group)
