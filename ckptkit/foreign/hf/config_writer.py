"""Model to config.json: what a folder says of a run's model that was not imported. Pure."""

from typing import Any

from ckptkit.foreign.hf.model_table import ModelTable


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
    """Return the keys of a Mistral, whose attention may slide."""
    return llama_config(model, max_positions) | {"sliding_window": model.attention_window or None}


def mixtral_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    """Return the keys of a Mixtral."""
    experts = {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
    return mistral_config(model, max_positions) | experts


def qwen_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    """Return the keys of a Qwen2 or Qwen3, all of whose layers slide if there is a window."""
    config, window = llama_config(model, max_positions), model.attention_window
    return config | ({"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {})
