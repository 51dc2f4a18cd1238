"""The shape of the model."""

from dataclasses import dataclass
from typing import Literal

from threefold.needs import GIVEN
from threefold.options import option

ROPE, LLAMA3 = {"position": "rope"}, {"rope_scaling": "llama3"}
EXPERTS = {"num_experts": GIVEN}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`[model]`: the shape of the GPT."""

    num_layers: int = option(4, "transformer layers", minimum=1)
    hidden_size: int = option(256, "width of the residual stream", minimum=1)
    num_heads: int = option(4, "attention heads; must divide hidden_size unless head_size is set", minimum=1)
    num_kv_heads: int = option(0, "key/value heads (grouped-query attention); 0 means num_heads", minimum=0)
    head_size: int = option(0, "width of a head; 0 means hidden_size / num_heads", minimum=0)
    ffn_hidden_size: int = option(0, "width inside the MLP; 0 means 4 * hidden_size", minimum=0)
    vocab_size: int = option(0, "tokens in the vocabulary; 0 takes the tokenizer's size from the stores", minimum=0)
    round_vocab_to: int = option(
        128, "each rank's rows of the vocabulary are rounded up to a multiple of this, with padding", minimum=1
    )
    norm: Literal["rmsnorm", "layernorm"] = option("rmsnorm", "normalisation before attention, MLP and head")
    norm_eps: float = option(1e-5, "added to the variance in a norm", above=0)
    position: Literal["rope", "learned", "alibi", "none"] = option(
        "rope", "how positions enter the model; with alibi scores fall with the distance, by a slope of each head"
    )
    num_positions: int = option(0, "rows of learned positions; 0 means train.seq_length", minimum=0)
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0, needs=ROPE)
    rope_scaling: Literal["none", "linear", "llama3"] = option(
        "none", "rotary frequencies for longer texts: all divided by rope_factor, or as in Llama 3.1", needs=ROPE
    )
    rope_factor: float = option(
        1.0, "what rope_scaling divides frequencies by", above=0, needs={"rope_scaling": ("linear", "llama3")}
    )
    rope_low_factor: float = option(
        1.0, "llama3 divides frequencies of fewer turns than this in full", above=0, needs=LLAMA3
    )
    rope_high_factor: float = option(
        4.0, "llama3 leaves frequencies of more turns than this as they are", above=0, needs=LLAMA3
    )
    rope_original_length: int = option(
        8192, "tokens that llama3 counts the turns of a frequency in", minimum=1, needs=LLAMA3
    )
    window: int = option(
        0, "how many tokens a query sees, itself and those before it in its document; 0 means all", minimum=0
    )
    window_every: int = option(
        0, "every so many layers, one sees all tokens: layers N, 2N, ...; 0 means none does", minimum=0,
        needs={"window": GIVEN},
    )  # fmt: skip
    attention_window: int = option(
        0,
        "window of a loaded model on layers that window_every cannot name: rows may be no longer; 0 means none",
        minimum=0,
        keeps_bits=True,
    )
    activation: Literal["swiglu", "gelu"] = option("swiglu", "the MLP's nonlinearity")
    num_experts: int = option(
        0,
        "MLPs in place of a layer's one: a router picks experts_per_token of them for each token; 0 means one MLP",
        minimum=0,
        flags=["--num-experts"],
        needs={"activation": "swiglu", "bias": False},
    )
    experts_per_token: int = option(2, "experts that a token goes to", minimum=1, needs=EXPERTS)
    expert_ffn_hidden_size: int = option(0, "width inside an expert; 0 means ffn_hidden_size", minimum=0, needs=EXPERTS)
    num_shared_experts: int = option(
        0, "experts that each token goes to beside, as one MLP of their width together", minimum=0, needs=EXPERTS
    )
    first_dense_layers: int = option(0, "first layers that have one MLP all the same", minimum=0, needs=EXPERTS)
    moe_every: int = option(1, "layers N, 2N, ... have experts, the others one MLP", minimum=1, needs=EXPERTS)
    router_score: Literal["softmax", "sigmoid"] = option(
        "softmax", "score of an expert for a token: its share among all experts, or one by itself", needs=EXPERTS
    )
    router_norm_topk: bool = option(
        True, "divide the scores of a token's experts by their sum to weigh what these return", needs=EXPERTS
    )
    router_scale: float = option(1.0, "factor of these weights", above=0, needs=EXPERTS)
    moe_balance: Literal["none", "bias", "aux", "seq_aux"] = option(
        "none",
        "how tokens are spread over experts: bias adds a number to each score, which moves after each step; aux and "
        "seq_aux add a loss, of each micro-batch or of each row",
        needs=EXPERTS,
    )
    moe_bias_rate: float = option(
        1e-3, "how far the number of each expert moves in a step", above=0, needs={"moe_balance": "bias"}
    )
    moe_aux_coeff: float = option(
        1e-2, "factor of the loss that spreads tokens", above=0, needs={"moe_balance": ("aux", "seq_aux")}
    )
    moe_z_loss: float = option(
        0.0,
        "times the squared log of the denominator of a router's softmax, added to a token's loss in training",
        minimum=0,
        needs=EXPERTS,
    )
    bias: bool = option(False, "biases in linear layers and norms")
    qkv_bias: bool = option(False, "biases of queries, keys and values alone", needs={"bias": False})
    qk_norm: bool = option(False, "normalise queries and keys of each head")
    logit_softcap: float = option(
        0.0, "logits x become cap * tanh(x / cap), so that none is beyond the cap; 0 leaves them as they are", minimum=0
    )
    tie_embeddings: bool = option(False, "use the embedding table as the output head")
    dropout: float = option(0.0, "dropout probability after embedding, attention and MLP", minimum=0, below=1)
    attention_dropout: float = option(
        0.0,
        "dropout probability of attention's weights, which the backend reference alone drops",
        minimum=0,
        below=1,
    )
    init_std: float = option(0.02, "standard deviation of the initial weights", above=0)
