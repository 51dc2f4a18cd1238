"""Families of Hugging Face models: what a config.json says of the model, and which tensor is which of the run's.

A run has the trainer's names, whole and unfused; `Row` says where each of its tensors is in a folder. Anything of a
config.json that changes logits and that `ModelTable` cannot hold is refused in one sentence. Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.foreign.model_table import ModelTable, Row, parameters
from ckptkit.foreign.shown import shown
from threefold.errors import UserError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json; `ignored` are ends of names of tensors that hold no parameters."""

    model_type: str
    architecture: str
    prefix: str
    model: Callable[[Config], ModelTable]
    config: Callable[[ModelTable, int], dict[str, Any]]
    names: Mapping[str, str]
    ignored: tuple[str, ...] = ()

    def rows(self, model: ModelTable, prefix: str) -> Iterator[Row]:
        """Yield the tensors of a model, those of GPT-2's fused ones in their order.

        All names in the folder but the head's begin with `prefix`.
        """
        firsts: dict[str, int] = {}
        for name, shape, placement in parameters(model):
            number, _, inner = name.removeprefix("layers.").partition(".")
            layer, inner = (number, inner) if name.startswith("layers.") else ("", name)
            module, _, kind = inner.rpartition(".")
            template = f"{prefix if module != 'head' else ''}{self.names[module]}.{kind}"
            if ".experts." in name:
                for expert in range(shape[0]):
                    yield Row(name, template.format(layer, expert), shape, placement, expert=expert)
                continue
            foreign = template.format(layer)
            if self.model_type != "gpt2":
                yield Row(name, foreign, shape, placement)
                continue
            is_linear = ".attn." in name or ".mlp." in name
            first = firsts.get(foreign, 0)
            firsts[foreign] = first + shape[0]
            yield Row(name, foreign, shape, placement, is_transposed=is_linear and len(shape) == 2, first=first)


# --- config.json to model


def _llama_like(config: Config) -> ModelTable:
    heads, hidden = _number(config, "num_attention_heads"), _number(config, "hidden_size")
    _refuse_unless(config, "hidden_act", "silu", "swish")
    _refuse_unless(config, "pretraining_tp", 1, None)
    has_windows = config.get("use_sliding_window", config.get("model_type") in ("mistral", "mixtral"))
    window = config.get("sliding_window") if has_windows else None
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if window is not None or kinds:
        raise UserError(f"sliding windows of attention ({window or min(kinds)}), which the model has not")
    attention_bias, mlp_bias = (bool(config.get(name, False)) for name in ("attention_bias", "mlp_bias"))
    if attention_bias != mlp_bias:
        raise UserError("biases in attention or in the MLP alone (attention_bias, mlp_bias), not in both or none")
    model = ModelTable(
        num_layers=_number(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_number(config, "num_key_value_heads", heads),
        head_size=_number(config, "head_dim", hidden // heads),
        ffn_hidden_size=_number(config, "intermediate_size"),
        vocab_size=_number(config, "vocab_size"),
        norm_eps=_real(config, "rms_norm_eps", 1e-6),
        bias=attention_bias,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
    return _with_rope(model, config)


def _with_rope(model: ModelTable, config: Config) -> ModelTable:
    """Return the model with its rotary frequencies, as either generation of config.json writes them."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = _real(rope, "rope_theta", _real(config, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise UserError(f"rotary positions on a share of each head (partial_rotary_factor {share})")
    model = replace(model, rope_theta=theta)
    if kind == "default":
        return model
    if kind == "linear":
        return replace(model, rope_scaling="linear", rope_factor=_real(rope, "factor"))
    if kind == "llama3":
        return replace(
            model,
            rope_scaling="llama3",
            rope_factor=_real(rope, "factor"),
            rope_low_factor=_real(rope, "low_freq_factor"),
            rope_high_factor=_real(rope, "high_freq_factor"),
            rope_original_length=_number(rope, "original_max_position_embeddings"),
        )
    raise UserError(f"rope_scaling of type {shown(kind)}, known are linear and llama3")


def _qwen2(config: Config) -> ModelTable:
    return replace(_llama_like({**config, "attention_bias": False, "mlp_bias": False}), qkv_bias=True)


def _qwen3(config: Config) -> ModelTable:
    return replace(_llama_like({"head_dim": 128, **config}), qk_norm=True)


def _mixtral(config: Config) -> ModelTable:
    experts, per_token = _number(config, "num_local_experts"), _number(config, "num_experts_per_tok")
    return replace(_llama_like(config), num_experts=experts, experts_per_token=per_token)


def _gpt2(config: Config) -> ModelTable:
    heads, hidden = _number(config, "n_head"), _number(config, "n_embd")
    _refuse_unless(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    _refuse_unless(config, "scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        _refuse_unless(config, name, False)
    return ModelTable(
        num_layers=_number(config, "n_layer"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        ffn_hidden_size=_number(config, "n_inner", 4 * hidden),
        vocab_size=_number(config, "vocab_size"),
        norm_eps=_real(config, "layer_norm_epsilon", 1e-5),
        norm="layernorm",
        position="learned",
        num_positions=_number(config, "n_positions"),
        activation="gelu",
        bias=True,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def _number(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
        raise UserError(f"{name} must be a whole number above 0, got {shown(value)}")
    return value


def _real(config: Config, name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise UserError(f"{name} must be a number above 0, got {shown(value)}")
    return float(value)


def _refuse_unless(config: Config, name: str, *allowed: object) -> None:
    if name in config and config[name] not in allowed:
        raise UserError(f"{name} {shown(config[name])}, which the model has not: known is {allowed[0]!r}")


# --- model to config.json, for a run that was not imported


def _llama_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default" if model.rope_scaling == "none" else model.rope_scaling}
    if model.rope_scaling != "none":
        rope["factor"] = model.rope_factor
    if model.rope_scaling == "llama3":
        rope |= {"low_freq_factor": model.rope_low_factor, "high_freq_factor": model.rope_high_factor,
                 "original_max_position_embeddings": model.rope_original_length}  # fmt: skip
    return {
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": max_positions,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling == "none" else rope,
        "tie_word_embeddings": model.tie_embeddings,
        "vocab_size": model.vocab_size,
    }


def _gpt2_config(model: ModelTable, _: int) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": model.ffn_hidden_size,
        "n_layer": model.num_layers,
        "n_positions": model.num_positions,
        "tie_word_embeddings": model.tie_embeddings,
        "vocab_size": model.vocab_size,
    }


def _biased(model: ModelTable, max_positions: int) -> dict[str, Any]:
    return _llama_config(model, max_positions) | {"attention_bias": model.bias, "mlp_bias": model.bias}


def _mixtral_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    experts = {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
    return _llama_config(model, max_positions) | experts


_LLAMA = {
    "embed": "embed_tokens",
    "norm": "norm",
    "head": "lm_head",
    "norm1": "layers.{}.input_layernorm",
    "norm2": "layers.{}.post_attention_layernorm",
    "attn.out": "layers.{}.self_attn.o_proj",
    **{f"attn.{name}": f"layers.{{}}.self_attn.{name}_proj" for name in "qkv"},
    **{f"attn.{name}": f"layers.{{}}.self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{f"mlp.{name}": f"layers.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_MIXTRAL = _LLAMA | {
    "mlp.router": "layers.{}.block_sparse_moe.gate",
    "mlp.experts.gate": "layers.{}.block_sparse_moe.experts.{}.w1",
    "mlp.experts.up": "layers.{}.block_sparse_moe.experts.{}.w3",
    "mlp.experts.down": "layers.{}.block_sparse_moe.experts.{}.w2",
}
_GPT2 = {
    "embed": "wte",
    "pos": "wpe",
    "norm": "ln_f",
    "head": "lm_head",
    "norm1": "h.{}.ln_1",
    "norm2": "h.{}.ln_2",
    **{f"attn.{name}": "h.{}.attn.c_attn" for name in "qkv"},
    "attn.out": "h.{}.attn.c_proj",
    "mlp.up": "h.{}.mlp.c_fc",
    "mlp.down": "h.{}.mlp.c_proj",
}
_BUFFERS = (".attn.bias", ".attn.masked_bias")
_INVERSE = (".rotary_emb.inv_freq",)
FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", "model.", _llama_like, _biased, _LLAMA, _INVERSE),
        Family("mistral", "MistralForCausalLM", "model.", _llama_like, _llama_config, _LLAMA, _INVERSE),
        Family("mixtral", "MixtralForCausalLM", "model.", _mixtral, _mixtral_config, _MIXTRAL, _INVERSE),
        Family("qwen2", "Qwen2ForCausalLM", "model.", _qwen2, _llama_config, _LLAMA, _INVERSE),
        Family("qwen3", "Qwen3ForCausalLM", "model.", _qwen3, _llama_config, _LLAMA, _INVERSE),
        Family("gpt2", "GPT2LMHeadModel", "transformer.", _gpt2, _gpt2_config, _GPT2, _BUFFERS),
    )
}


def family_of(config: Config) -> Family:
    """Return the family of a config.json; UserError for another architecture."""
    family = FAMILIES.get(str(config.get("model_type")))
    architectures = config.get("architectures") or ([family.architecture] if family else [])
    if family is None or architectures != [family.architecture]:
        many = isinstance(architectures, list)
        listed = f"[{', '.join(map(shown, architectures[:3]))}]" if many else shown(architectures)
        named = f"{shown(config.get('model_type'))} with architectures {listed}"
        raise UserError(f"model_type {named}; known are {', '.join(each.architecture for each in FAMILIES.values())}")
    return family


def family_for(model: ModelTable) -> Family:
    """Return the family that a run's model is of; UserError if no family has such a model."""
    for name in ("gpt2", "llama", "mixtral", "qwen2", "qwen3"):
        family = FAMILIES[name]
        try:
            if family.model({"model_type": name, **family.config(model, 1)}) == model:
                return family
        except UserError:
            continue
    parts = f"{model.norm}, {model.position}, {model.activation}, bias {model.bias}, qk_norm {model.qk_norm}"
    raise UserError(f"no known family of Hugging Face has such a model: {parts}")
