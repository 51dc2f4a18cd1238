"""The transformer block, one page: norms, attention, MLP. Pre-norm, residual stream in the compute dtype.

Letters of shapes: B micro-batch, S positions, D hidden size, N query heads and K key-value heads of this rank, H head
size, F feed-forward size of this rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import ModelConfig
from trainer.mesh.group import Group
from trainer.ops.dropout import dropout
from trainer.ops.rmsnorm import rms_norm
from trainer.tensor_parallel import ColumnLinear, RowLinear, enter

SITE_ATTENTION, SITE_MLP = 0, 1  # the dropouts of a block; the embedding counts as a layer after the last


@dataclass(frozen=True, slots=True)
class Noise:
    """What fixes a micro-batch's dropout masks, whatever the layout: see `trainer.ops.dropout`."""

    p: float
    seed: int
    step: int
    first_sample: int

    def apply(self, x_BSD: Tensor, *, layer: int, site: int) -> Tensor:
        """Drop elements of a replicated activation."""
        return dropout(
            x_BSD, self.p, seed=self.seed, step=self.step, layer=layer, site=site, first_sample=self.first_sample
        )


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding of one micro-batch (Su et al., 2021), halves paired as in Llama.

    cos and sin are [B, 1, S, H].
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions_BS: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> "Rotation":
        """Angles are computed in float32, in float64 for a float64 run."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        exponents = torch.arange(0, head_size, 2, device=positions_BS.device, dtype=wide) / head_size
        angles_BSH = positions_BS.to(wide).unsqueeze(-1) * theta**-exponents
        angles_B1SH = torch.cat([angles_BSH, angles_BSH], -1).unsqueeze(1)
        return cls(angles_B1SH.cos().to(dtype), angles_B1SH.sin().to(dtype))

    def __call__(self, x_BNSH: Tensor) -> Tensor:
        first, second = x_BNSH.chunk(2, -1)
        return x_BNSH * self.cos + torch.cat([-second, first], -1) * self.sin


class Norm(nn.Module):
    """RMSNorm (the fused op) or LayerNorm over the last dim."""

    def __init__(self, model: ModelConfig, size: int) -> None:
        super().__init__()
        self.eps = model.norm_eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads; this rank computes its own heads."""

    def __init__(self, model: ModelConfig, group: Group) -> None:
        super().__init__()
        self.group = group
        self.head_size = model.hidden_size // model.num_heads
        kv_size = model.num_kv_heads * self.head_size
        self.q = ColumnLinear(model.hidden_size, model.hidden_size, bias=model.bias, group=group)
        self.k = ColumnLinear(model.hidden_size, kv_size, bias=model.bias, group=group)
        self.v = ColumnLinear(model.hidden_size, kv_size, bias=model.bias, group=group)
        self.out = RowLinear(model.hidden_size, model.hidden_size, bias=model.bias, group=group)
        self.q_norm = Norm(model, self.head_size) if model.qk_norm else None
        self.k_norm = Norm(model, self.head_size) if model.qk_norm else None

    def forward(self, x_BSD: Tensor, rotation: Rotation | None) -> Tensor:
        x_BSD = enter(x_BSD, self.group)
        q_BNSH, k_BKSH, v_BKSH = (self._heads(linear(x_BSD)) for linear in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q_BNSH, k_BKSH = self.q_norm(q_BNSH), self.k_norm(k_BKSH)
        if rotation is not None:
            q_BNSH, k_BKSH = rotation(q_BNSH), rotation(k_BKSH)
        is_grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
        y_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=is_grouped)
        return self.out(y_BNSH.transpose(1, 2).flatten(2))

    def _heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020) or GELU feed-forward."""

    def __init__(self, model: ModelConfig, group: Group) -> None:
        super().__init__()
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
        self.group = group
        self.gate = ColumnLinear(hidden, ffn, bias=model.bias, group=group) if model.activation == "swiglu" else None
        self.up = ColumnLinear(hidden, ffn, bias=model.bias, group=group)
        self.down = RowLinear(ffn, hidden, bias=model.bias, group=group)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = enter(x_BSD, self.group)
        if self.gate is None:
            h_BSF = F.gelu(self.up(x_BSD), approximate="tanh")
        else:
            h_BSF = F.silu(self.gate(x_BSD)) * self.up(x_BSD)
        return self.down(h_BSF)


class Block(nn.Module):
    """One layer of the residual stream; `number` is its global layer number."""

    def __init__(self, model: ModelConfig, number: int, group: Group) -> None:
        super().__init__()
        self.number = number
        self.norm1 = Norm(model, model.hidden_size)
        self.attn = Attention(model, group)
        self.norm2 = Norm(model, model.hidden_size)
        self.mlp = MLP(model, group)

    def forward(self, x_BSD: Tensor, rotation: Rotation | None, noise: Noise | None) -> Tensor:
        branch_BSD = self.attn(self.norm1(x_BSD), rotation)
        if noise is not None:
            branch_BSD = noise.apply(branch_BSD, layer=self.number, site=SITE_ATTENTION)
        x_BSD = x_BSD + branch_BSD
        branch_BSD = self.mlp(self.norm2(x_BSD))
        if noise is not None:
            branch_BSD = noise.apply(branch_BSD, layer=self.number, site=SITE_MLP)
        return x_BSD + branch_BSD
