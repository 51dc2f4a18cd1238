"""Folders of safetensors files by their own names: any model, back with the same bytes of each tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit.cli import main
from ckptkit.foreign.hf.folder import SafetensorsFolder
from tests.ckptkit.support.hf_folders import write_folder
from threefold.errors import CheckFailed, UserError

MIXED: dict[str, Tensor] = {
    "blocks.0.mixer.A_log": torch.arange(6.0).reshape(2, 3),
    "backbone.embeddings": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "qweight": torch.arange(10, dtype=torch.int32),
    "scales": torch.tensor([1.5, -2.0], dtype=torch.float8_e4m3fn),
    "mask": torch.tensor([True, False]),
    "scale": torch.tensor(0.5, dtype=torch.float64),
    "none": torch.empty(0, 4),
}


def call(*arguments: object) -> int:
    return main([str(each) for each in arguments])


def same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(
        tensors[name].dtype == each.dtype
        and tensors[name].shape == each.shape
        and tensors[name].reshape(-1).view(torch.uint8).equal(each.reshape(-1).view(torch.uint8))
        for name, each in expected.items()
    )


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


def write_mixed(folder: Path, file: str = "model.safetensors") -> dict[str, Tensor]:
    folder.mkdir(parents=True)
    save_file(MIXED, folder / file, {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "mamba", "torch_dtype": "float32"}')
    (folder / "modeling.py").write_text("x = 1\n")
    return MIXED


@pytest.mark.parametrize(
    "words", [("--family", "generic"), ("--from", "safetensors"), ("--from", "hf", "--family", "generic")]
)
def test_any_model_comes_back_with_its_names_bytes_and_files(tmp_path: Path, words: tuple[str, ...]) -> None:
    expected = write_mixed(tmp_path / "model")
    assert call("import", tmp_path / "model", tmp_path / "run", *words) == 0
    assert call("verify", tmp_path / "run") == 0
    assert call("reshard", tmp_path / "run", tmp_path / "cut", "--dp", 2) == 0
    assert call("diff", f"safetensors:{tmp_path}/model", tmp_path / "cut") == 0
    assert call("export", tmp_path / "cut", tmp_path / "back") == 0
    assert same(tensors_of(tmp_path / "back"), expected)
    for name in ("config.json", "modeling.py"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    assert {path.name for path in (tmp_path / "back").iterdir()} == {
        path.name for path in (tmp_path / "model").iterdir()
    }


@pytest.mark.parametrize("has_index", [True, False])
def test_shards_keep_the_beginning_of_their_names(tmp_path: Path, has_index: bool) -> None:
    folder, places = tmp_path / "unet", {}
    folder.mkdir()
    for number in range(2):
        file = f"diffusion_model-0000{number + 1}-of-00002.safetensors"
        part = dict(list(MIXED.items())[number::2])
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    if has_index:
        index = {"metadata": {}, "weight_map": places}
        (folder / "diffusion_model.safetensors.index.json").write_text(json.dumps(index))
    assert call("import", folder, tmp_path / "run", "--family", "generic") == 0
    assert call("export", tmp_path / "run", tmp_path / "back", "--max-shard-bytes", 30) == 0
    assert same(tensors_of(tmp_path / "back"), MIXED)
    written = json.loads((tmp_path / "back" / "diffusion_model.safetensors.index.json").read_text())["weight_map"]
    assert written.keys() == MIXED.keys()
    assert all((tmp_path / "back" / file).is_file() for file in written.values())
    assert call("export", tmp_path / "run", tmp_path / "one") == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["diffusion_model.safetensors"]


def test_one_file_is_taken_alone(tmp_path: Path) -> None:
    expected = write_mixed(tmp_path / "model", "lora weights.safetensors")
    save_file({"other": torch.ones(3)}, tmp_path / "model" / "other.safetensors")
    file = tmp_path / "model" / "lora weights.safetensors"
    assert call("import", file, tmp_path / "run", "--family", "generic") == 0
    assert call("export", tmp_path / "run", tmp_path / "back") == 0
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["lora weights.safetensors"]
    assert same(load_file(tmp_path / "back" / "lora weights.safetensors"), expected)
    with pytest.raises(UserError, match="holds safetensors files of several models: lora weights") as caught:
        SafetensorsFolder(str(tmp_path / "model")).resolve()
    assert caught.value.hint == "name one of the files in place of the folder"


def test_a_known_family_may_be_taken_by_its_own_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = write_folder(tmp_path / "model", "gpt2", num_files=2)
    assert call("import", f"hf:{tmp_path}/model", tmp_path / "run", "--family", "generic") == 0
    assert call("export", tmp_path / "run", tmp_path / "back", "--dtype", "bf16") == 0
    assert same(tensors_of(tmp_path / "back"), {name: each.bfloat16() for name, each in expected.items()})
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert call("import", tmp_path / "model", tmp_path / "other", "--from", "dcp", "--family", "generic") == 2
    assert "--family generic is of Hugging Face's folders, not of --from dcp" in capsys.readouterr().err


def test_rounding_leaves_other_numbers_as_they_are(tmp_path: Path) -> None:
    expected = write_mixed(tmp_path / "model")
    assert call("import", tmp_path / "model", tmp_path / "run", "--family", "generic") == 0
    assert call("export", tmp_path / "run", tmp_path / "back", "--dtype", "fp16") == 0
    floats = (torch.float32, torch.bfloat16, torch.float64)
    rounded = {name: each.half() if each.dtype in floats else each for name, each in expected.items()}
    assert same(tensors_of(tmp_path / "back"), rounded)


def test_what_is_not_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mixed(tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"x")
    assert call("import", tmp_path / "model", tmp_path / "run", "--family", "generic") == 0
    assert f"warning: {tmp_path}/model holds what is not read: pytorch_model.bin" in capsys.readouterr().err


def damaged(folder: Path, kind: str) -> None:
    if kind == "empty":
        folder.mkdir()
        return
    write_mixed(folder)
    file = folder / "model.safetensors"
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif kind == "zero":
        file.write_bytes(b"")
    elif kind == "twice":
        file.rename(folder / "model-00001-of-00002.safetensors")
        save_file({"mask": torch.ones(2)}, folder / "model-00002-of-00002.safetensors")
    elif kind == "lacking":
        file.rename(folder / "model-00002-of-00003.safetensors")
    elif kind == "two of four":
        file.rename(folder / "model-00002-of-00004.safetensors")
        save_file({"other": torch.ones(2)}, folder / "model-00004-of-00004.safetensors")
    elif kind == "files":
        save_file({"files/config.json": torch.ones(2)}, file)


CASES: list[tuple[str, Any, str]] = [
    ("empty", CheckFailed, r"has no file \*.safetensors"),
    ("cut", CheckFailed, "its header says"),
    ("zero", CheckFailed, r"was cut short \(0 bytes\)"),
    ("twice", CheckFailed, "mask is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors"),
    (
        "lacking",
        CheckFailed,
        "holds 1 of the 3 files of a model, without model-00001-of-00003.safetensors, model-00003-of",
    ),
    (
        "two of four",
        CheckFailed,
        "2 of the 4 files of a model, without model-00001-of-00004.safetensors, model-00003-of",
    ),
    ("files", UserError, "tensors whose names begin as those of files do"),
]


@pytest.mark.parametrize(("kind", "error", "message"), CASES, ids=[case[0] for case in CASES])
def test_damage_is_refused(tmp_path: Path, kind: str, error: type[Exception], message: str) -> None:
    damaged(tmp_path / "model", kind)
    with pytest.raises(error, match=message):
        SafetensorsFolder(str(tmp_path / "model")).resolve()


def test_the_trainer_names_what_such_a_step_lacks(tmp_path: Path) -> None:
    from trainer.config.walk import load_config

    write_mixed(tmp_path / "model")
    (tmp_path / "run.toml").write_text(f"[checkpoint]\nload = 'safetensors:{tmp_path}/model'\n")
    with pytest.raises(UserError, match="is a folder of another program, not a run"):
        load_config(str(tmp_path / "run.toml"))
