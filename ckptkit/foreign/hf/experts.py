"""Families with experts: config.json to model, and back. Pure.

Which layers have experts, config.json says by a step and a list of exceptions; a `[model]` table says it by a number of
dense layers at the beginning and a step. What only one of the two can say is refused, with its name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.foreign.checks import shown
from ckptkit.foreign.hf.config import ALL_SLIDE, QWEN, Config, LlamaLike, llama_config, mistral_config, whole_number
from ckptkit.foreign.hf.model_table import EXPERT_KEYS, ModelTable
from threefold.errors import UserError

MIXTRAL = LlamaLike({"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6}, ALL_SLIDE)
QWEN3_MOE = LlamaLike(QWEN | {"num_key_value_heads": 4}, ALL_SLIDE, {"qk_norm": True})
QWEN3_MOE_EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 768}  # where config.json has no such key


def mixtral(config: Config) -> ModelTable:
    """Return the model of a Mixtral, whose layers all have experts as wide as an MLP."""
    _refuse(config)
    experts, per_token = whole_number(config, "num_local_experts", 8), whole_number(config, "num_experts_per_tok", 2)
    return replace(MIXTRAL(config), num_experts=experts, experts_per_token=per_token)


def qwen3_moe(config: Config) -> ModelTable:
    """Return the model of a Qwen3 with experts in all layers or some."""
    _refuse(config)
    model, config = QWEN3_MOE(config), {**QWEN3_MOE_EXPERTS, **config}
    experts, first_dense, every = _num_experts(config), *_layers(config, model.num_layers)
    if not experts or first_dense + every > model.num_layers:
        return model
    return replace(
        model,
        num_experts=experts,
        experts_per_token=whole_number(config, "num_experts_per_tok"),
        expert_ffn_hidden_size=whole_number(config, "moe_intermediate_size"),
        first_dense_layers=first_dense,
        moe_every=every,
        router_norm_topk=bool(config.get("norm_topk_prob", False)),
    )


def _num_experts(config: Config) -> int:
    """Return the number of experts, under either of its names; 0 for a model without."""
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return 0 if config.get(name) == 0 else whole_number(config, name, 128)


def _layers(config: Config, num_layers: int) -> tuple[int, int]:
    """Return the number of dense layers at the beginning, and N where of the others N, 2 N, ... have experts.

    A step of 2 and dense layers 1 and 3, counted from 0, are 4 and 2: layers 6, 8, ... counted from 1 have experts.
    UserError for other patterns; nothing is made that grows with a number of layers that the folder may not hold.
    """
    every, dense = whole_number(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise UserError(f"mlp_only_layers must be a list of layers from 0 on, got {shown(dense)}")
    left_out = sorted({layer + 1 for layer in dense if (layer + 1) % every == 0 and layer < num_layers})
    if left_out != [every * number for number in range(1, len(left_out) + 1)]:
        raise UserError(
            f"mlp_only_layers {shown(dense)} with decoder_sparse_step {every}: model.first_dense_layers and "
            "model.moe_every name dense layers before the first with experts, and layers N, 2 N, ... with them"
        )
    return every * len(left_out), every


def beyond_names(config: Config) -> list[str]:
    """Return what a config.json says of routers and experts that has no place among the names of tensors."""
    groups, phrases = config.get("n_group"), []
    if isinstance(groups, int) and groups > 1:
        phrases.append(f"a router with groups (n_group {groups})")
    if config.get("shared_expert_intermediate_size"):
        phrases.append("a gate of the shared expert (shared_expert_gate)")
    return phrases


def _refuse(config: Config) -> None:
    if phrases := beyond_names(config):
        raise UserError(f"{' and '.join(phrases)}, which has no place among the names")


def beyond_folders(recorded: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a recorded `[model]` table says of experts that no folder holds."""
    has_bias = recorded.get("num_experts") and recorded.get("moe_balance") == "bias"
    return ("a bias of the router's choice (moe_balance bias)",) if has_bias else ()


def described(model: ModelTable) -> str:
    """Return the keys of a model with experts, for a message."""
    return ", ".join(f"{name} {getattr(model, name)}" for name in EXPERT_KEYS)


def mixtral_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    """Return the keys of a Mixtral."""
    experts = {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
    return mistral_config(model, max_positions) | experts


def qwen3_moe_config(model: ModelTable, max_positions: int) -> dict[str, Any]:
    """Return the keys of a Qwen3 with experts, whose layers slide all or none."""
    every = model.moe_every
    return llama_config(model, max_positions) | {
        "use_sliding_window": model.window > 0,
        "sliding_window": model.window or None,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": model.router_norm_topk,
        "decoder_sparse_step": every,
        "mlp_only_layers": [every * number - 1 for number in range(1, model.first_dense_layers // every + 1)],
    }
