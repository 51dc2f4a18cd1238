"""Tiny Hugging Face folders with random values, their names written out apart from the code that reads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ckptkit.foreign.folder import FolderSource
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.tensor import Box

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, EXPERTS, EXPERT_FFN = 61, 32, 48, 4, 2, 12, 20
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
BOTH_NORMS = ("gemma2", "gemma3_text")
BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
NORMS = {"olmo2": BEHIND, **dict.fromkeys(BOTH_NORMS, ("input_layernorm", "pre_feedforward_layernorm", *BEHIND))}
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(VOCAB)}, "unk_token": "w0"},
        "added_tokens": [],
    }
)


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json of a model of two layers."""
    config: dict[str, Any] = {"model_type": model_type, "architectures": [MODEL_TYPES[model_type]]}
    if model_type == "gpt2":
        config |= {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": 2, "n_positions": 40, "n_inner": None,
                   "vocab_size": VOCAB, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}  # fmt: skip
    else:
        config |= {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
                   "num_hidden_layers": 2, "intermediate_size": FFN, "vocab_size": VOCAB, "hidden_act": "silu",
                   "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
                   "tie_word_embeddings": model_type == "qwen2" or model_type.startswith("gemma"),
                   "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    if model_type in ("qwen3", "qwen3_moe") or model_type.startswith("gemma"):
        config["head_dim"] = 16
    if model_type.startswith("gemma"):
        config["hidden_activation"] = config.pop("hidden_act").replace("silu", "gelu_pytorch_tanh")
    if model_type == "mixtral":
        config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    if model_type == "qwen3_moe":
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": EXPERT_FFN}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config | changes


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a Qwen3 with experts has them, as its code in transformers says it."""
    is_sparse = layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0
    return config["num_experts"] > 0 and is_sparse


def shapes_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a folder."""
    shapes: dict[str, list[int]] = {}
    vocab = config["vocab_size"]
    if config["model_type"] == "gpt2":
        shapes = {"transformer.wte.weight": [vocab, HIDDEN], "transformer.wpe.weight": [40, HIDDEN]}
        for layer in range(2):
            at = f"transformer.h.{layer}"
            shapes |= {f"{at}.{norm}.{kind}": [HIDDEN] for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
            linears = {"attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN),
                       "mlp.c_fc": (HIDDEN, 4 * HIDDEN), "mlp.c_proj": (4 * HIDDEN, HIDDEN)}  # fmt: skip
            shapes |= {f"{at}.{name}.weight": list(shape) for name, shape in linears.items()}
            shapes |= {f"{at}.{name}.bias": [shape[1]] for name, shape in linears.items()}
        return shapes | {"transformer.ln_f.weight": [HIDDEN], "transformer.ln_f.bias": [HIDDEN]}
    head = config.get("head_dim") or HIDDEN // HEADS
    q, kv = HEADS * head, KV_HEADS * head
    shapes["model.embed_tokens.weight"] = [vocab, HIDDEN]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norms = [*NORMS.get(config["model_type"], ("input_layernorm", "post_attention_layernorm"))]
        shapes |= {f"{at}.{norm}.weight": [HIDDEN] for norm in norms}
        linears = {"self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
                   "self_attn.o_proj": (HIDDEN, q)}  # fmt: skip
        if config["model_type"] == "mixtral":
            linears["block_sparse_moe.gate"] = EXPERTS, HIDDEN
            for number in range(EXPERTS):
                expert = f"block_sparse_moe.experts.{number}"
                linears |= {f"{expert}.w1": (FFN, HIDDEN), f"{expert}.w2": (HIDDEN, FFN), f"{expert}.w3": (FFN, HIDDEN)}
        elif config["model_type"] == "qwen3_moe" and has_experts(config, layer):
            linears["mlp.gate"] = EXPERTS, HIDDEN
            for number in range(EXPERTS):
                linears |= {f"mlp.experts.{number}.{name}_proj": (EXPERT_FFN, HIDDEN) for name in ("gate", "up")}
                linears[f"mlp.experts.{number}.down_proj"] = HIDDEN, EXPERT_FFN
        else:
            linears |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
        if config["model_type"] == "phi3":
            linears = {"self_attn.qkv_proj": (q + 2 * kv, HIDDEN), "self_attn.o_proj": (HIDDEN, q),
                       "mlp.gate_up_proj": (2 * FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}  # fmt: skip
        shapes |= {f"{at}.{name}.weight": list(shape) for name, shape in linears.items()}
        biased = [
            name for name in linears if config.get(f"{name.split('.')[0].replace('self_attn', 'attention')}_bias")
        ]
        if config["model_type"] == "qwen2":
            biased = [f"self_attn.{name}_proj" for name in "qkv"]
        shapes |= {f"{at}.{name}.bias": [linears[name][0]] for name in biased}
        if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
            shapes |= {f"{at}.self_attn.{name}_norm.weight": [head] for name in "qk"}
        if config["model_type"] == "olmo2":
            shapes |= {f"{at}.self_attn.{name}_norm.weight": [size] for name, size in (("q", q), ("k", kv))}
    shapes["model.norm.weight"] = [HIDDEN]
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": [vocab, HIDDEN]}


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model with experts as transformers 5 has them in memory: two a layer for all experts."""
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    others = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in others.items()}
    first = {name.rpartition(".experts.")[0] for name in tensors if ".experts.0." in name}

    def of_all(block: str, *names: str) -> Tensor:
        keys = [f"{block}.experts.{number}.{name}.weight" for number in range(EXPERTS) for name in names]
        return torch.stack([tensors[key] for key in keys if key in tensors])

    for block in first:
        at = block.replace(".block_sparse_moe", ".mlp")
        both = [of_all(block, "gate_proj", "w1"), of_all(block, "up_proj", "w3")]
        others[f"{at}.experts.gate_up_proj"] = torch.cat(both, 1)
        others[f"{at}.experts.down_proj"] = of_all(block, "down_proj", "w2")
    return others


def write_folder(
    folder: Path, model_type: str, *, dtype: torch.dtype = torch.float32, num_files: int = 1, **changes: Any
) -> dict[str, Tensor]:
    """Write a folder, in several files if asked to, and return its tensors."""
    config = config_of(model_type, **changes)
    random = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=random).mul(0.2).add(1.0 if name.endswith("norm.weight") else 0.0).to(dtype)
        for name, shape in shapes_of(config).items()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer.json").write_text(TOKENIZER)
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return tensors
    places = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        names = list(tensors)[number::num_files]
        save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tensors


def read(reader: FolderSource, name: str, box: Box) -> np.ndarray:
    """A box of a tensor of fp32."""
    info, data = reader.root.tensors[name], np.empty(box.shape, np.float32)
    reader.read(ChunkTable.of([(info, box, 0, box.numel)]), [data.ctypes.data])
    return data
