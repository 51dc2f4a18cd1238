"""config.json to model, and back: what a folder of each family says of its model, in the trainer's words. Pure.

What changes logits and has no place in a `[model]` table is a phrase in `beyond`: the trainer refuses such a model with
it, and everything else carries its tensors as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.foreign.checks import shown
from ckptkit.foreign.hf.model_table import ModelTable
from threefold.errors import UserError

Config = Mapping[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"  # of layer_types


def llama_like(config: Config) -> ModelTable:
    """Return the model of a family of Llama's kind: rotary positions, RMSNorm, a gated MLP."""
    heads, hidden = whole_number(config, "num_attention_heads"), whole_number(config, "hidden_size")
    attention_bias, mlp_bias = (bool(config.get(name, False)) for name in ("attention_bias", "mlp_bias"))
    activation = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    beyond = _unless(config, activation, "silu", "swish") + _unless(config, "pretraining_tp", 1, None)
    if attention_bias != mlp_bias:
        beyond += (f"biases in {'attention' if attention_bias else 'the MLP'} alone",)
    model = ModelTable(
        num_layers=whole_number(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=whole_number(config, "num_key_value_heads", heads),
        head_size=whole_number(config, "head_dim", hidden // heads),
        ffn_hidden_size=whole_number(config, "intermediate_size"),
        vocab_size=whole_number(config, "vocab_size"),
        norm_eps=_real(config, "rms_norm_eps", 1e-6),
        bias=attention_bias and mlp_bias,
        attention_bias=attention_bias and not mlp_bias,
        mlp_bias=mlp_bias and not attention_bias,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        beyond=beyond,
    )
    return _with_rope(_with_window(model, config), config)


def _with_window(model: ModelTable, config: Config) -> ModelTable:
    """Return the model with its sliding window, which sees as many tokens here: a query's own and those before it.

    Where full layers are not every N-th, the window bounds the rows: those that are no longer are attended to in full.
    """
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    others = {str(kind) for kind in config.get("layer_types") or ()} - {SLIDING, FULL}
    if others:
        model = _beyond(model, f"layers of {shown(min(others))}")
    if window is None:
        return model
    size, every = whole_number(config, "sliding_window"), full_every(config, model.num_layers)
    if every is None:
        return replace(model, attention_window=size)
    return model if every == 1 else replace(model, window=size, window_every=every)


def full_every(config: Config, num_layers: int) -> int | None:
    """Return N where all layers slide but N, 2 N, ..., 0 where all do, 1 where none does, and None for other patterns.

    Nothing is made that grows with a number of layers that the folder may not hold.
    """
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
            raise UserError(f"layer_types must be a list of {num_layers} kinds, got {shown(kinds)}")
        every = next((number for number, kind in enumerate(kinds, 1) if kind != SLIDING), 0)
        is_full = [every > 0 and number % every == 0 for number in range(1, len(kinds) + 1)]
        return every if is_full == [kind != SLIDING for kind in kinds] else None
    if config.get("sliding_window_pattern") is not None:
        every = whole_number(config, "sliding_window_pattern")
        return every if every <= num_layers else 0
    first_full = config.get("max_window_layers") or 0
    if 0 < first_full < num_layers:
        return None
    return 1 if first_full else 0


def _with_rope(model: ModelTable, config: Config) -> ModelTable:
    """Return the model with its rotary frequencies, as either generation of config.json writes them."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if isinstance(rope.get(FULL), Mapping):  # one for each kind of layer
        if rope.get(SLIDING, rope[FULL]) != rope[FULL]:
            model = _beyond(model, "layers that slide with rotary frequencies of their own")
        rope = dict(rope[FULL])
    theta = _real(rope, "rope_theta", _real(config, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    model = replace(model, rope_theta=theta)
    if share not in (1.0, None):
        model = _beyond(model, f"rotary positions on a share of each head (partial_rotary_factor {shown(share)})")
    match kind:
        case "default":
            return model
        case "linear":
            return replace(model, rope_scaling="linear", rope_factor=_real(rope, "factor"))
        case "llama3":
            return replace(
                model,
                rope_scaling="llama3",
                rope_factor=_real(rope, "factor"),
                rope_low_factor=_real(rope, "low_freq_factor"),
                rope_high_factor=_real(rope, "high_freq_factor"),
                rope_original_length=whole_number(rope, "original_max_position_embeddings"),
            )
        case _:
            return _beyond(model, f"rope_scaling of type {shown(kind)} (known are linear and llama3)")


@dataclass(frozen=True)
class LlamaLike:
    """A family of Llama's kind: what it has of `defaults` where config.json has no such key, and of `fixed` always.

    `fields` are those of the model that follow from the family, `beyond` what it does that the trainer does not.
    """

    defaults: Config = field(default_factory=dict)
    fixed: Config = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()

    def __call__(self, config: Config) -> ModelTable:
        """Return the model of a config.json."""
        model = llama_like({**self.defaults, **config, **self.fixed})
        return _beyond(replace(model, **self.fields), *self.beyond)


ALL_SLIDE = {"layer_types": None, "max_window_layers": None, "sliding_window_pattern": None}  # if any layer does
QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
QWEN_FIXED = {"sliding_window_pattern": None}
GEMMA = LlamaLike(
    {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    beyond=("norms by 1 + weight", "embeddings times the square root of hidden_size"),
)
LLAMA_LIKE = {  # by model_type
    "llama": LlamaLike(fixed={"sliding_window": None}),
    "mistral": LlamaLike({"sliding_window": 4096, "num_key_value_heads": 8}, ALL_SLIDE),
    "ministral": LlamaLike(
        {"sliding_window": 4096, "num_key_value_heads": 8}, {"max_window_layers": None, "sliding_window_pattern": None}
    ),
    "qwen2": LlamaLike(QWEN, {"attention_bias": False, "mlp_bias": False} | QWEN_FIXED, {"qkv_bias": True}),
    "qwen3": LlamaLike(QWEN | {"head_dim": 128}, QWEN_FIXED, {"qk_norm": True}),
    "phi3": LlamaLike({"rms_norm_eps": 1e-5}, ALL_SLIDE),
    "olmo2": LlamaLike(
        {"rms_norm_eps": 1e-5},
        fields={"norms": "after", "wide_qk_norm": True},
        beyond=("norms behind attention and MLP", "norms of queries and keys over all heads"),
    ),
    "gemma": GEMMA,
}


def gemma2(config: Config) -> ModelTable:
    """Return the model of a Gemma 2: norms on both sides, soft caps of logits, scaled queries, windows."""
    defaults = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _gemma_of_both_norms({"num_key_value_heads": 4, **defaults, **config, "sliding_window_pattern": 2})


def gemma3(config: Config) -> ModelTable:
    """Return the model of a Gemma 3's text part, which normalises heads and turns its sliding layers otherwise."""
    defaults = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "num_key_value_heads": 4, "sliding_window_pattern": 6}
    config = {**defaults, **config}
    model = replace(_gemma_of_both_norms(config), qk_norm=True)
    if not config.get("rope_parameters") and config["rope_local_base_freq"] != model.rope_theta:
        model = _beyond(model, "layers that slide with rotary frequencies of their own")
    return model


def _gemma_of_both_norms(config: Config) -> ModelTable:
    model = replace(GEMMA({"sliding_window": 4096, **config}), norms="both")
    if config.get("final_logit_softcapping"):
        model = replace(model, logit_softcap=_real(config, "final_logit_softcapping"))
    beyond = ["norms behind attention and MLP"]
    if config.get("attn_logit_softcapping"):
        beyond.append(f"a soft cap of attention's scores ({shown(config['attn_logit_softcapping'])})")
    scalar = _real(config, "query_pre_attn_scalar", 256)
    if scalar != model.head_size:
        beyond.append(f"queries divided by the square root of {scalar:g}, heads have {model.head_size} elements")
    return _beyond(model, *beyond)


def gpt2(config: Config) -> ModelTable:
    """Return the model of a GPT-2."""
    heads, hidden = whole_number(config, "n_head"), whole_number(config, "n_embd")
    if config.get("add_cross_attention"):
        raise UserError("attention to another model's states (add_cross_attention), which has no place among the names")
    beyond = _unless(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    beyond += _unless(config, "scale_attn_weights", True) + _unless(config, "scale_attn_by_inverse_layer_idx", False)
    return ModelTable(
        num_layers=whole_number(config, "n_layer"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        ffn_hidden_size=whole_number(config, "n_inner", 4 * hidden),
        vocab_size=whole_number(config, "vocab_size"),
        norm_eps=_real(config, "layer_norm_epsilon", 1e-5),
        norm="layernorm",
        position="learned",
        num_positions=whole_number(config, "n_positions"),
        activation="gelu",
        bias=True,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        beyond=beyond,
    )


def _beyond(model: ModelTable, *phrases: str) -> ModelTable:
    return replace(model, beyond=model.beyond + phrases)


def _unless(config: Config, name: str, *allowed: object) -> tuple[str, ...]:
    """Return what a key asks for if that is something else than the trainer does."""
    return () if name not in config or config[name] in allowed else (f"{name} {shown(config[name])}",)


def whole_number(config: Config, name: str, default: int | None = None) -> int:
    """Return a number of config.json above 0; UserError for another value, or if there is none and no default."""
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


def llama_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    """Return the keys that all families of Llama's kind have."""
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


def gpt2_config(model: ModelTable, _: int) -> dict[str, Any]:
    """Return the keys of a GPT-2."""
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


def biased_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    """Return the keys of a Llama, which may have biases."""
    return llama_config(model, max_positions) | {"attention_bias": model.bias, "mlp_bias": model.bias}


def mistral_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    """Return the keys of a Mistral, whose attention may slide in all layers."""
    return llama_config(model, max_positions) | {"sliding_window": model.window or None}


def ministral_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    """Return the keys of a Ministral: a Mistral of which some layers may see all."""
    return mistral_config(model, max_positions) | ({"layer_types": layer_types(model)} if model.window else {})


def qwen_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    """Return the keys of a Qwen2 or Qwen3, whose layers slide as the model says if there is a window."""
    keys = {"use_sliding_window": True, "sliding_window": model.window, "layer_types": layer_types(model)}
    return llama_config(model, max_positions) | (keys | {"max_window_layers": 0} if model.window else {})


def layer_types(model: ModelTable) -> list[str]:
    """Return the kinds of the layers of a model with a window."""
    every, numbers = model.window_every, range(1, model.num_layers + 1)
    return [FULL if every and number % every == 0 else SLIDING for number in numbers]
