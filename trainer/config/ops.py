"""The form that each fused op takes."""

from dataclasses import dataclass
from typing import Literal

from threefold.options import option

AttentionName = Literal[
    "auto", "sdpa-cpu", "sdpa-flash", "flash-2", "flash-3", "flash-4", "sdpa-cudnn", "sdpa-efficient", "reference"
]


@dataclass(frozen=True, slots=True)
class OpsConfig:
    """`[ops]`: csrc is this project's kernel, torch its reference, compile the reference through torch.compile."""

    attention: AttentionName = option(
        "auto", "backend of attention; auto takes the one that a resumed run recorded, else on GPUs the fastest"
    )
    norm: Literal["csrc", "compile", "torch", "apex"] = option("csrc", "RMSNorm and LayerNorm with the residual's add")
    rope: Literal["csrc", "compile", "torch"] = option("csrc", "rotary positions, with RMSNorm of heads before them")
    activation: Literal["csrc", "compile", "torch"] = option("csrc", "SwiGLU and GELU")
    cross_entropy: Literal["csrc", "compile", "torch"] = option("csrc", "the loss of a token and its gradient")
    adamw: Literal["csrc", "torch", "apex"] = option("csrc", "the update; torch is its fused AdamW, apex FusedAdam's")
