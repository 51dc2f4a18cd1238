"""Make tiny models and their logits with `transformers`: once for each family, never by a test.

    python tests/golden/make_hugging_face.py tests/golden/hugging-face    # a folder that is not there yet
    python tests/golden/make_hugging_face.py --exact tests/golden/hugging-face    # of the folders that are there

Each folder is what save_pretrained wrote, with random weights; logits.json has tokens, the logits after each row, and
the versions that computed them in float32. Of models with experts exact.json has the logits in float64, of the same
tokens, and those of the same weights but for routers whose scores are equal in pairs.
"""

import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
import transformers
from tied_scores import tie_scores
from transformers import AutoModelForCausalLM

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
GPT2 = {"vocab_size": 31, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("llama", SHAPE | {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", SHAPE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
                                       "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", SHAPE | {"sliding_window": None}),
    "qwen2": ("qwen2", SHAPE | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SHAPE | {"head_dim": 8}),
    "gpt2": ("gpt2", GPT2),
    "mixtral": ("mixtral", SHAPE | EXPERTS),
    "qwen3-moe": ("qwen3_moe", SHAPE | EXPERTS | {"num_hidden_layers": 3, "mlp_only_layers": [0], "head_dim": 8,
                                                  "moe_intermediate_size": 12, "norm_topk_prob": False}),
}  # fmt: skip


def main(folder: Path) -> None:
    """Write a folder for each model."""
    torch.manual_seed(0)
    for name, (model_type, settings) in MODELS.items():
        model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **settings))
        with torch.no_grad():
            for values in model.parameters():
                values.normal_(0, 0.3)
        model.save_pretrained(folder / name)
        tokens = torch.randint(31, (3, 24))
        with torch.no_grad():
            logits = model.eval()(tokens).logits[:, -1]
        made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
        text = json.dumps({"made_with": made_with, "tokens": tokens.tolist(), "logits": logits.tolist()})
        (folder / name / "logits.json").write_text(text + "\n")


class Wide:
    """torch, whose float32 is float64."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextmanager
def in_float64(model_type: str):
    """Let the modules of a family, which compute norms, angles and scores in float32, do so in float64."""
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    with mock.patch.object(module, "torch", Wide()), mock.patch.object(torch.Tensor, "float", lambda self: self):
        yield


def write_exact(folder: Path) -> None:
    """Write exact.json into the folder of each model with experts."""
    for name, (model_type, settings) in MODELS.items():
        if "num_local_experts" not in settings:
            continue
        tokens = torch.tensor(json.loads((folder / name / "logits.json").read_text())["tokens"])
        exact = {"made_with": {"transformers": transformers.__version__, "torch": torch.__version__}}
        for what in ("logits", "tied"):
            with tempfile.TemporaryDirectory() as scratch, in_float64(model_type), torch.no_grad():
                copy = shutil.copytree(folder / name, Path(scratch) / name)
                if what == "tied":
                    tie_scores(copy / "model.safetensors")
                kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
                model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float64, **kinds).eval()
                exact[what] = model(tokens).logits[:, -1].tolist()
        (folder / name / "exact.json").write_text(json.dumps(exact) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--exact":
        write_exact(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
