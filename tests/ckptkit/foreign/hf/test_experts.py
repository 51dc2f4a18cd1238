"""Models with experts of Hugging Face: which layers have them, how they are stored, and what is refused by its name."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.cli import main
from ckptkit.foreign.hf.export import export_folder
from ckptkit.foreign.hf.folder import HfFolder
from ckptkit.foreign.hf.model_table import EXPERT_KEYS
from ckptkit.model.tensor import Box
from tests.ckptkit.support.hf_folders import EXPERT_FFN, EXPERTS, HIDDEN, has_experts, read, stacked, write_folder
from threefold.errors import UserError
from threefold.storage import open_storage

KINDS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}


def export(folder: Path, target: Path, like: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Export a folder's model as a run of the trainer that recorded other keys, None for none; the new config.json."""
    with HfFolder(str(folder)).open(0) as reader:
        root = reader.root
        config = root.metadata["config"]
        model = {key: value for key, value in (config["model"] | changes).items() if value is not None}
        tensors = {name: info for name, info in root.tensors.items() if not name.startswith("files/")}
        reader.root = replace(root, tensors=tensors, metadata={"config": config | {"model": model}})
        export_folder(reader, open_storage(target), like=None if like is None else open_storage(like))
    return json.loads((target / "config.json").read_text())


def model_of(folder: Path) -> dict[str, Any]:
    """The `[model]` table that a folder is loaded with."""
    return HfFolder(str(folder)).root(0).metadata["config"]["model"]


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("model_type", KINDS)
def test_the_experts_of_a_layer_are_one_tensor_in_the_order_of_their_numbers(
    tmp_path: Path, model_type: str, is_stacked: bool
) -> None:
    tensors = write_folder(tmp_path / "model", model_type)
    block, *names = KINDS[model_type]
    if is_stacked:  # as save_pretrained(..., save_original_format=False) of transformers 5 has them
        save_file(stacked(tensors), tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with HfFolder(str(tmp_path / "model")).open(0) as reader:
        for own, foreign in zip(("gate", "up", "down"), names, strict=True):
            expected = torch.stack(
                [tensors[f"model.layers.1.{block}.experts.{number}.{foreign}.weight"] for number in range(EXPERTS)]
            )
            info = reader.root.tensors[f"layers.1.mlp.experts.{own}.weight"]
            assert info.shape == expected.shape
            assert [cut.axis for cut in info.placement.cuts] == ["ep", "tp"]
            offset, shape = (3, 2, 1), (7, info.shape[1] - 5, info.shape[2] - 4)
            found = read(reader, info.name, Box(offset, shape))
            assert (found == expected[3:10, 2 : 2 + shape[1], 1 : 1 + shape[2]].numpy()).all(), own
        router = read(reader, "layers.1.mlp.router.weight", Box((0, 0), (EXPERTS, HIDDEN)))
        assert (router == tensors[f"model.layers.1.{block}.gate.weight"].numpy()).all()


@pytest.mark.parametrize("model_type", KINDS)
def test_a_stacked_folder_is_the_same_checkpoint_and_comes_back_expert_by_expert(
    tmp_path: Path, model_type: str
) -> None:
    tensors = write_folder(tmp_path / "plain", model_type)
    write_folder(tmp_path / "stacked", model_type)
    save_file(stacked(tensors), tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
    assert main(["diff", f"hf:{tmp_path}/plain", f"hf:{tmp_path}/stacked"]) == 0
    assert main(["import", str(tmp_path / "stacked"), str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


PATTERNS: list[tuple[dict[str, Any], tuple[int, int] | None]] = [  # of 6 layers: first_dense_layers, moe_every
    ({}, (0, 1)),
    ({"decoder_sparse_step": 2}, (0, 2)),
    ({"decoder_sparse_step": 6}, (0, 6)),
    ({"decoder_sparse_step": 7}, None),
    ({"mlp_only_layers": [1, 0, 1]}, (2, 1)),
    ({"mlp_only_layers": [0, 1, 2, 3, 4]}, (5, 1)),
    ({"mlp_only_layers": [0, 1, 2, 3, 4, 5, 99]}, None),
    ({"mlp_only_layers": [1, 2], "decoder_sparse_step": 2}, (2, 2)),
    ({"mlp_only_layers": [0, 2, 4], "decoder_sparse_step": 2}, (0, 2)),
    ({"mlp_only_layers": None, "num_experts": 0}, None),
]


@pytest.mark.parametrize(("changes", "pattern"), PATTERNS)
def test_which_layers_have_experts_passes_both_ways(
    tmp_path: Path, changes: dict[str, Any], pattern: tuple[int, int] | None
) -> None:
    changes = {"num_hidden_layers": 6, "mlp_only_layers": [], **changes}
    dense = changes["mlp_only_layers"] or []
    tensors = write_folder(tmp_path / "model", "qwen3_moe", **{**changes, "mlp_only_layers": dense})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
    model = model_of(tmp_path / "model")
    assert (pattern is None) == (not any(has_experts(config, layer) for layer in range(6)))
    if pattern is None:
        assert not model.keys() & {*EXPERT_KEYS}
        return
    assert (model["first_dense_layers"], model["moe_every"]) == pattern
    assert (model["num_experts"], model["experts_per_token"]) == (EXPERTS, 3)
    assert model["expert_ffn_hidden_size"] == EXPERT_FFN
    made = export(tmp_path / "model", tmp_path / "back")
    layers = range(6)
    assert [has_experts(made, layer) for layer in layers] == [has_experts(config, layer) for layer in layers]
    assert made["architectures"] == ["Qwen3MoeForCausalLM"]
    assert made["norm_topk_prob"]
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mlp_only_layers": [1]}, "mlp_only_layers [1] with decoder_sparse_step 1: model.first_dense_layers and"),
    (
        {"num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2},
        "mlp_only_layers [3] with decoder_sparse_step 2",
    ),
    ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of layers from 0 on, got [-1]"),
    ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers from 0 on, got 3"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number above 0, got 0"),
    ({"num_experts": True}, "num_experts must be a whole number above 0, got True"),
    ({"num_experts": 10**9}, "2 layers of 1,000,000,000 experts, and 93 tensors"),
    ({"n_group": 8}, "a router with groups (n_group 8), which has no place among the names"),
    ({"shared_expert_intermediate_size": 20}, "a gate of the shared expert (shared_expert_gate), which has no place"),
    (
        {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "n_group": 8},
        "model_type 'deepseek_v3' with architectures ['DeepseekV3ForCausalLM'], which has a router with groups (",
    ),
    (
        {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 20},
        "model_type 'qwen2_moe' with architectures ['Qwen2MoeForCausalLM'], which has a gate of the shared expert",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_router_that_has_no_place_here_is_refused_by_its_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_folder(tmp_path / "model", "qwen3_moe")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=re.escape(message)):
        HfFolder(str(tmp_path / "model")).resolve()


def test_a_router_under_other_names_is_reported_tensor_by_tensor(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path / "model", "qwen3_moe")
    renamed = {name.replace("mlp.gate.weight", "mlp.router.classifier.weight"): each for name, each in tensors.items()}
    save_file(renamed, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError) as caught:
        HfFolder(str(tmp_path / "model")).resolve()
    for layer in range(2):
        assert f"model.layers.{layer}.mlp.gate.weight: missing, wanted [12, 32]" in caught.value.message
        assert f"layers.{layer}.mlp.router.classifier.weight: not a tensor of this model" in caught.value.message


OLD_MIXTRAL = dict.fromkeys(EXPERT_KEYS[2:])  # release 0.1 recorded the first two keys of experts alone


def test_a_mixtral_that_an_older_release_imported_is_exported(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_folder(model, "mixtral")
    assert export(model, tmp_path / "like", like=model, **OLD_MIXTRAL)
    made = export(model, tmp_path / "made", **OLD_MIXTRAL)
    assert (made["num_local_experts"], made["num_experts_per_tok"], made["intermediate_size"]) == (EXPERTS, 2, 48)
    for name in ("like", "made"):
        assert main(["diff", f"hf:{tmp_path / name}", f"hf:{model}", "--only", "*.weight"]) == 0


NOT_A_FOLDER: list[tuple[dict[str, Any], str]] = [
    ({"router_score": "sigmoid"}, "router_score sigmoid"),
    ({"router_scale": 2.5}, "router_scale 2.5"),
    ({"num_shared_experts": 1}, "num_shared_experts 1"),
    ({"moe_balance": "bias"}, "a bias of the router's choice (moe_balance bias)"),
]


@pytest.mark.parametrize(("changes", "part"), NOT_A_FOLDER)
def test_a_run_whose_router_no_family_has_is_not_exported(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    write_folder(tmp_path / "model", "qwen3_moe")
    with pytest.raises(UserError, match=f"no known family of Hugging Face has such a model: .*{re.escape(part)}"):
        export(tmp_path / "model", tmp_path / "made", **changes)
    with pytest.raises(UserError, match="is of another model than"):
        export(tmp_path / "model", tmp_path / "made", like=tmp_path / "model", **changes)
    assert not (tmp_path / "made").exists()


def test_the_width_of_an_mlp_means_nothing_where_all_layers_have_experts(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "mixtral")
    made = export(tmp_path / "model", tmp_path / "made", ffn_hidden_size=128, expert_ffn_hidden_size=48)
    assert (made["architectures"], made["intermediate_size"]) == (["MixtralForCausalLM"], 48)
    made = export(tmp_path / "model", tmp_path / "like", like=tmp_path / "model", expert_ffn_hidden_size=48)
    assert made["intermediate_size"] == 48
