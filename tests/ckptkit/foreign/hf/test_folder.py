"""Hugging Face folders: their tensors under the trainer's names and placements, and what is refused in one sentence."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.foreign.hf.folder import HfFolder
from ckptkit.foreign.hf.model_table import BEYOND_KEYS, CAP, EXPERT_KEYS, ModelTable
from ckptkit.model.layout import Coords, ParallelLayout
from ckptkit.model.tensor import Box
from tests.ckptkit.support.hf_folders import EXPERTS, HIDDEN, read, write_folder
from threefold.errors import CheckFailed, UserError


def test_boxes_of_plain_fused_and_turned_tensors(tmp_path: Path) -> None:
    tensors = {name: each.numpy() for name, each in write_folder(tmp_path / "gpt2", "gpt2").items()}
    fused = tensors["transformer.h.1.attn.c_attn.weight"]
    with HfFolder(f"hf:{tmp_path}/gpt2").open(0) as reader:
        for number, name in enumerate("qkv"):
            box = Box((8, 4), (16, 20))
            found = read(reader, f"layers.1.attn.{name}.weight", box)
            columns = slice(number * HIDDEN + 8, number * HIDDEN + 24)
            assert (found == fused[4:24, columns].T).all()
            bias = read(reader, f"layers.1.attn.{name}.bias", Box((3,), (9,)))
            first = number * HIDDEN + 3
            assert (bias == tensors["transformer.h.1.attn.c_attn.bias"][first : first + 9]).all()
        box = Box((5, 0), (7, HIDDEN))
        assert (read(reader, "embed.weight", box) == tensors["transformer.wte.weight"][5:12]).all()
        down = read(reader, "layers.0.mlp.down.weight", Box((0, 0), (HIDDEN, 4 * HIDDEN)))
        assert (down == tensors["transformer.h.0.mlp.c_proj.weight"].T).all()


TRAINED = ("gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3")


@pytest.mark.parametrize("model_type", TRAINED)
def test_names_shapes_and_placements_are_the_trainers(tmp_path: Path, model_type: str) -> None:
    from trainer.config.walk import config_from
    from trainer.model.table import parameter_table

    write_folder(tmp_path / "model", model_type)
    root = HfFolder(str(tmp_path / "model")).root(0)
    config = config_from(root.metadata["config"], source="the folder")
    found = {name: (info.shape, info.placement) for name, info in root.tensors.items() if "/" not in name}
    assert found == {name: (row.shape, row.placement) for name, row in parameter_table(config).items()}
    keys = ModelTable.__dataclass_fields__.keys() - {*BEYOND_KEYS, *EXPERT_KEYS, CAP}
    assert root.metadata["config"]["model"].keys() == keys


def test_experts_are_one_tensor_cut_by_ep_and_tp_as_the_trainer_has_them(tmp_path: Path) -> None:
    from trainer.config.walk import load_config
    from trainer.model.table import parameter_table

    tensors = write_folder(tmp_path / "model", "mixtral")
    with HfFolder(str(tmp_path / "model")).open(0) as reader:
        found = read(reader, "layers.1.mlp.experts.down.weight", Box((9, 4, 0), (2, 8, 48)))
        names = [f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight" for expert in (9, 10)]
        assert (found == np.stack([tensors[name][4:12].numpy() for name in names])).all()
        info = reader.root.tensors["layers.1.mlp.experts.down.weight"]
        assert info.shape == (EXPERTS, HIDDEN, 48)
        box = info.placement.local_box(info.name, info.shape, ParallelLayout(tp=2, ep=4, dp=4), Coords(tp=1, dp=3))
        assert box == Box((9, 0, 24), (3, HIDDEN, 24))
    (tmp_path / "run.toml").write_text(f"[checkpoint]\nload = 'hf:{tmp_path}/model'\n")
    config = load_config(str(tmp_path / "run.toml"))
    assert (config.model.num_experts, config.model.expert_ffn_hidden_size) == (EXPERTS, 48)
    stored = {name: info.shape for name, info in reader.root.tensors.items() if "/" not in name}
    assert stored == {name: row.shape for name, row in parameter_table(config).items()}
    assert info.placement == parameter_table(config)[info.name].placement


def test_experts_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = write_folder(tmp_path / "model", "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match=f"{name}: BF16, that of another expert has another dtype"):
        HfFolder(str(tmp_path / "model")).root(0)


def test_names_without_the_prefix_and_buffers_are_known(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = write_folder(tmp_path / "model", "gpt2")
    plain = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    plain |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(plain, tmp_path / "model" / "model.safetensors")
    folder = HfFolder(str(tmp_path / "model"))
    assert folder.root(0).metadata["hugging_face"]["prefix"] == ""
    with folder.open(0) as reader:
        assert (read(reader, "norm.bias", Box((0,), (HIDDEN,))) == plain["ln_f.bias"].numpy()).all()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}, "model_type 'qwen2_moe'"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ("llama", {"attention_bias": True}, r"attn.o_proj.bias: missing"),
    ("llama", {"hidden_size": "wide"}, "hidden_size must be a whole number above 0, got 'wide'"),
    (
        "llama",
        {"max_position_embeddings": "many"},
        "max_position_embeddings must be a whole number above 0, got 'many'",
    ),
    ("llama", {"max_position_embeddings": [64]}, "max_position_embeddings must be a whole number above 0"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, got nan"),
    ("gpt2", {"add_cross_attention": True}, "attention to another model's states"),
    ("gemma3_text", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
    ("llama", {"num_hidden_layers": 3}, r"does not hold the model(.|\n)*layers.2.input_layernorm.weight: missing"),
    ("llama", {"num_hidden_layers": 10**12}, r"1,000,000,000,000 layers, and \d+ tensors"),
    ("mistral", {"num_hidden_layers": 10**12}, r"1,000,000,000,000 layers, and \d+ tensors"),
    ("llama", {"intermediate_size": 64}, r"mlp.gate_proj.weight: \[48, 32\], wanted \[64, 32\]"),
    ("llama", {"num_hidden_layers": 1}, "layers.1.input_layernorm.weight: not a tensor of this model"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_what_the_model_cannot_hold_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "model"
    write_folder(folder, model_type)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=message) as caught:
        HfFolder(str(folder)).resolve()
    assert str(folder) in caught.value.message


BEYOND: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling of type 'yarn' (known are linear",
    ),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "type 'dynamic'"),
    ("phi3", {"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rope_scaling of type 'longrope'"),
    ("llama", {"partial_rotary_factor": 0.5}, "rotary positions on a share of each head (partial_rotary_factor 0.5)"),
    ("llama", {"attention_bias": True}, "biases in attention alone"),
    ("llama", {"mlp_bias": True}, "biases in the MLP alone"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("qwen3", {"layer_types": ["chunked_attention", "full_attention"]}, "layers of 'chunked_attention'"),
    ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ("olmo2", {}, "norms behind attention and MLP, norms of queries and keys over all heads"),
    ("gemma", {}, "hidden_activation 'gelu_pytorch_tanh', norms by 1 + weight, embeddings times"),
    (
        "gemma2",
        {},
        "a soft cap of attention's scores (50.0), queries divided by the square",
    ),
    (
        "gemma2",
        {"final_logit_softcapping": None, "query_pre_attn_scalar": 16},
        "a soft cap of attention's scores (50.0)",
    ),
    ("gemma3_text", {"rope_parameters": None, "rope_theta": 1e6}, "layers that slide with rotary frequencies of their"),
]


@pytest.mark.parametrize(("model_type", "changes", "part"), BEYOND)
def test_what_the_trainer_cannot_train_is_imported_and_refused_there(
    tmp_path: Path, model_type: str, changes: dict[str, Any], part: str
) -> None:
    from trainer.config.walk import load_config

    write_folder(tmp_path / "model", model_type, **changes)
    assert HfFolder(str(tmp_path / "model")).resolve() == 0
    (tmp_path / "run.toml").write_text(f"[checkpoint]\nload = 'hf:{tmp_path}/model'\n")
    with pytest.raises(UserError, match=re.escape(part)) as caught:
        load_config(str(tmp_path / "run.toml"))
    assert "the model has what the trainer cannot train yet: " in caught.value.message
    assert "ckptkit imports, reshards and exports this one" in str(caught.value.hint)


SLIDES = {"use_sliding_window": True, "sliding_window": 32, "num_hidden_layers": 2}
TWO, ALTERNATING = ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]
WINDOWS: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [  # window, window_every, attention_window
    ("mistral", {}, (4096, 0, 0)),
    ("mistral", {"sliding_window": 32, "layer_types": ALTERNATING}, (32, 0, 0)),  # which it does not read
    ("mistral", {"sliding_window": None}, (0, 0, 0)),
    ("ministral", {"sliding_window": 32}, (32, 0, 0)),
    ("ministral", {"sliding_window": 32, "layer_types": ALTERNATING}, (32, 2, 0)),
    ("phi3", {"sliding_window": 32}, (32, 0, 0)),
    ("phi3", {}, (0, 0, 0)),
    ("llama", {"sliding_window": 32}, (0, 0, 0)),
    ("qwen2", {"sliding_window": 32}, (0, 0, 0)),
    ("qwen2", SLIDES, (0, 0, 0)),  # from layer 28 on
    ("qwen2", SLIDES | {"max_window_layers": 0}, (32, 0, 0)),
    ("qwen2", SLIDES | {"max_window_layers": 1}, (0, 0, 32)),
    ("qwen2", SLIDES | {"max_window_layers": 1, "layer_types": TWO}, (32, 0, 0)),
    ("qwen3", SLIDES | {"layer_types": ["full_attention"] * 2}, (0, 0, 0)),
    ("qwen3", SLIDES | {"layer_types": ALTERNATING}, (32, 2, 0)),
    ("qwen3", SLIDES | {"layer_types": ALTERNATING[::-1]}, (0, 0, 32)),
    ("gemma2", {"sliding_window": 32}, (32, 2, 0)),
    ("gemma2", {"sliding_window": 32, "layer_types": TWO}, (32, 0, 0)),
    ("gemma3_text", {"sliding_window": 32}, (32, 0, 0)),  # the first of six that is full is layer 6
    ("gemma3_text", {"sliding_window": 32, "sliding_window_pattern": 2}, (32, 2, 0)),
]


@pytest.mark.parametrize(("model_type", "changes", "windows"), WINDOWS)
def test_a_window_is_known_and_which_layers_have_it(
    tmp_path: Path, model_type: str, changes: dict[str, Any], windows: tuple[int, int, int]
) -> None:
    from trainer.config.walk import load_config

    write_folder(tmp_path / "model", model_type, **changes)
    recorded = HfFolder(str(tmp_path / "model")).root(0).metadata["config"]
    names = ("window", "window_every", "attention_window")
    assert tuple(recorded["model"][name] for name in names) == windows
    assert recorded["train"]["seq_length"] == min(64, windows[2] or 64)
    if "beyond" in recorded["model"]:
        return
    (tmp_path / "33.toml").write_text(f"[checkpoint]\nload = 'hf:{tmp_path}/model'\n[train]\nseq_length = 33\n")
    if windows[2]:
        with pytest.raises(UserError, match=r"model.attention_window 32 is less than rows of 33 tokens"):
            load_config(str(tmp_path / "33.toml"))
    else:
        model = load_config(str(tmp_path / "33.toml")).model
        assert tuple(getattr(model, name) for name in names) == windows


def test_kinds_of_layers_that_are_not_so_many_are_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "qwen3", **SLIDES, layer_types=["full_attention"] * 3)
    with pytest.raises(UserError, match="layer_types must be a list of 2 kinds, got"):
        HfFolder(str(tmp_path / "model")).root(0)


def test_parts_of_fused_rows_are_read_where_they_are(tmp_path: Path) -> None:
    tensors = {name: each.numpy() for name, each in write_folder(tmp_path / "phi3", "phi3").items()}
    fused, gate_up = (tensors[f"model.layers.1.{name}_proj.weight"] for name in ("self_attn.qkv", "mlp.gate_up"))
    with HfFolder(str(tmp_path / "phi3")).open(0) as reader:
        for name, first, size in (("q", 0, HIDDEN), ("k", HIDDEN, 16), ("v", HIDDEN + 16, 16)):
            found = read(reader, f"layers.1.attn.{name}.weight", Box((3, 4), (size - 3, 20)))
            assert (found == fused[first + 3 : first + size, 4:24]).all(), name
        assert (read(reader, "layers.1.mlp.up.weight", Box((5, 0), (40, HIDDEN))) == gate_up[53:93]).all()


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_tied_tensor_that_is_there_is_equal_or_refused(tmp_path: Path, shift: float) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    tensors = write_folder(folder, "llama")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += shift
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    if not shift:
        assert "head.weight" in HfFolder(str(folder)).root(0).tensors
        return
    with pytest.raises(UserError, match=r"lm_head.weight is not model.embed_tokens.weight, to which config.json ties"):
        HfFolder(str(folder)).resolve()


def test_files_that_are_missing_or_disagree_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(CheckFailed, match=r"config.json is missing"):
        HfFolder(str(folder)).resolve()
    write_folder(folder, "llama", num_files=2)
    index, second = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    places, data = json.loads(index.read_text())["weight_map"], second.read_bytes()
    second.unlink()
    with pytest.raises(CheckFailed, match=r"model-00002-of-00002.safetensors is missing"):
        HfFolder(str(folder)).resolve()
    second.write_bytes(data[:-1])
    with pytest.raises(CheckFailed, match="its header says"):
        HfFolder(str(folder)).resolve()
    second.write_bytes(data)
    for wrong, message in (
        ({**places, "model.extra.weight": second.name}, "differ: model.extra.weight is in one of them only"),
        ({name: f"../{place}" for name, place in places.items()}, "no sound weight_map"),
        (3, "no sound weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(CheckFailed, match=message):
            HfFolder(str(folder)).resolve()
    index.unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckFailed, match=r"but pytorch_model.bin, which is not read"):
        HfFolder(str(folder)).resolve()
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckFailed, match="is not JSON"):
        HfFolder(str(folder)).resolve()
