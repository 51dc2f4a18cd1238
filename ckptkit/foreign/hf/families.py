"""Families of Hugging Face models: which tensor of a folder is which of the run's.

A run has the trainer's names, whole and unfused; `Row` says where each of its tensors is in a folder. Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.foreign.checks import shown
from ckptkit.foreign.hf import config, experts
from ckptkit.foreign.hf.config import LLAMA_LIKE, Config
from ckptkit.foreign.hf.model_table import ModelTable, Row, parameters
from ckptkit.model.tensor import Placement
from threefold.errors import UserError


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json; `ignored` are ends of names of tensors that hold no parameters.

    `config` makes the config.json of a run's model, where a run of the trainer may be of the family. If `is_turned` the
    folder has linear layers with their dims in the other order.
    """

    model_type: str
    architecture: str
    prefix: str
    model: Callable[[Config], ModelTable]
    names: Mapping[str, str]
    config: Callable[[ModelTable, int], dict[str, Any]] | None = None
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    is_turned: bool = False

    def rows(self, model: ModelTable, prefix: str, *, is_stacked: bool = False) -> Iterator[Row]:
        """Yield the tensors of a model, those that the folder fuses in their order there.

        All names in the folder but the head's begin with `prefix`. If `is_stacked` the experts of a layer are two
        tensors there.
        """
        firsts: dict[str, int] = {}  # q of 32 rows, k of 16: k is at 32, v at 48
        names = {**self.names, **_STACKED} if is_stacked else self.names
        for name, shape, placement in parameters(model):
            number, _, inner = name.removeprefix("layers.").partition(".")
            layer, inner = (number, inner) if name.startswith("layers.") else ("", name)
            module, _, kind = inner.rpartition(".")
            template = f"{prefix if module != 'head' else ''}{names[module]}.{kind}"
            if ".experts." in name:
                template = template.removesuffix(f".{kind}") if is_stacked else template
                yield from _expert_rows(name, template, layer, shape, placement, is_stacked=is_stacked)
                continue
            foreign = template.format(layer)
            first = firsts.get(foreign, 0)
            firsts[foreign] = first + shape[0]
            turned = self.is_turned and len(shape) == 2 and (".attn." in name or ".mlp." in name)
            yield Row(name, foreign, shape, placement, is_transposed=turned, first=first)


def _expert_rows(
    name: str, template: str, layer: str, shape: tuple[int, ...], placement: Placement, *, is_stacked: bool
) -> Iterator[Row]:
    """Yield where a layer's experts are: each in a tensor of its own, or stacked, gate and up of one after another."""
    if is_stacked and ".down." in name:
        yield Row(name, template.format(layer), shape, placement)
        return
    for expert in range(shape[0]):
        if is_stacked:
            first = 2 * expert + (".up." in name)
            yield Row(name, template.format(layer), shape, placement, first=first, expert=expert, num_stacked=2)
        else:
            yield Row(name, template.format(layer, expert), shape, placement, expert=expert)


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
_QWEN3_MOE = _LLAMA | {
    "mlp.router": "layers.{}.mlp.gate",
    **{f"mlp.experts.{name}": f"layers.{{}}.mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
}
_STACKED = {  # as transformers 5 has experts in memory, and saves them if asked to
    "mlp.router": "layers.{}.mlp.gate",
    **{f"mlp.experts.{name}": "layers.{}.mlp.experts.gate_up_proj" for name in ("gate", "up")},
    "mlp.experts.down": "layers.{}.mlp.experts.down_proj",
}
_PHI3 = _LLAMA | {
    **{f"attn.{name}": "layers.{}.self_attn.qkv_proj" for name in "qkv"},
    **{f"mlp.{name}": "layers.{}.mlp.gate_up_proj" for name in ("gate", "up")},
}
_BOTH_NORMS = _LLAMA | {
    "post_norm1": "layers.{}.post_attention_layernorm",
    "norm2": "layers.{}.pre_feedforward_layernorm",
    "post_norm2": "layers.{}.post_feedforward_layernorm",
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
FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", "model.", LLAMA_LIKE["llama"], _LLAMA, config.biased_config),
        Family("mistral", "MistralForCausalLM", "model.", LLAMA_LIKE["mistral"], _LLAMA, config.mistral_config),
        Family("ministral", "MinistralForCausalLM", "model.", LLAMA_LIKE["ministral"], _LLAMA, config.ministral_config),
        Family("mixtral", "MixtralForCausalLM", "model.", experts.mixtral, _MIXTRAL, experts.mixtral_config),
        Family("qwen2", "Qwen2ForCausalLM", "model.", LLAMA_LIKE["qwen2"], _LLAMA, config.qwen_config),
        Family("qwen3", "Qwen3ForCausalLM", "model.", LLAMA_LIKE["qwen3"], _LLAMA, config.qwen_config),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", "model.", experts.qwen3_moe, _QWEN3_MOE, experts.qwen3_moe_config),
        Family("phi3", "Phi3ForCausalLM", "model.", LLAMA_LIKE["phi3"], _PHI3),
        Family("olmo2", "Olmo2ForCausalLM", "model.", LLAMA_LIKE["olmo2"], _BOTH_NORMS),
        Family("gemma", "GemmaForCausalLM", "model.", LLAMA_LIKE["gemma"], _LLAMA),
        Family("gemma2", "Gemma2ForCausalLM", "model.", config.gemma2, _BOTH_NORMS),
        Family("gemma3_text", "Gemma3ForCausalLM", "model.", config.gemma3, _BOTH_NORMS),
        Family(
            "gpt2", "GPT2LMHeadModel", "transformer.", config.gpt2, _GPT2, config.gpt2_config, _BUFFERS, is_turned=True
        ),
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
        beyond = "".join(f", which has {phrase}" for phrase in experts.beyond_names(config))
        raise UserError(
            f"model_type {named}{beyond}; known are {', '.join(each.architecture for each in FAMILIES.values())}"
        )
    return family


def family_for(model: ModelTable) -> Family:
    """Return the family that a run's model in its simplest spelling is of; UserError if no family has such a model."""
    for name in ("gpt2", "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe"):
        family = FAMILIES[name]
        try:
            if family.config and family.model({"model_type": name, **family.config(model, 1)}).simplest() == model:
                return family
        except UserError:
            continue
    parts = f"{model.norm}, {model.position}, {model.activation}, bias {model.bias}, qk_norm {model.qk_norm}"
    if model.logit_softcap:
        parts += f", logit_softcap {model.logit_softcap:g}"
    if model.window or model.attention_window:
        parts += f", window {model.window}, window_every {model.window_every}"
        parts += f", attention_window {model.attention_window}"
    if model.num_experts:
        parts += f", {experts.described(model)}"
    parts += "".join(f", {phrase}" for phrase in model.beyond)
    hint = "--like FOLDER, with the config.json of the model"
    raise UserError(f"no known family of Hugging Face has such a model: {parts}", hint=hint)
