"""The shape of the model."""

from dataclasses import dataclass
from typing import Literal

from threefold.options import option


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`[model]`: the shape of the GPT."""

    num_layers: int = option(4, "transformer layers", minimum=1)
    hidden_size: int = option(256, "width of the residual stream", minimum=1)
    num_heads: int = option(4, "attention heads; must divide hidden_size", minimum=1)
    num_kv_heads: int = option(0, "key/value heads (grouped-query attention); 0 means num_heads", minimum=0)
    ffn_hidden_size: int = option(0, "width inside the MLP; 0 means 4 * hidden_size", minimum=0)
    vocab_size: int = option(0, "tokens in the vocabulary; 0 takes the tokenizer's size from the stores", minimum=0)
    round_vocab_to: int = option(
        128, "each rank's rows of the vocabulary are rounded up to a multiple of this, with padding", minimum=1
    )
    norm: Literal["rmsnorm", "layernorm"] = option("rmsnorm", "normalisation before attention, MLP and head")
    norm_eps: float = option(1e-5, "added to the variance in a norm", above=0)
    position: Literal["rope", "learned", "none"] = option("rope", "how positions enter the model")
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0)
    activation: Literal["swiglu", "gelu"] = option("swiglu", "the MLP's nonlinearity")
    bias: bool = option(False, "biases in linear layers and norms")
    qk_norm: bool = option(False, "normalise queries and keys of each head")
    tie_embeddings: bool = option(False, "use the embedding table as the output head")
    dropout: float = option(0.0, "dropout probability after embedding, attention and MLP", minimum=0, below=1)
    init_std: float = option(0.02, "standard deviation of the initial weights", above=0)
