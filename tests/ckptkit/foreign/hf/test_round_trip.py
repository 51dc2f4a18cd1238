"""Import and export: a Hugging Face folder through a run and back has the same tensors and files, or is not there."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit.check.verify import verify_checkpoint
from ckptkit.cli import main
from ckptkit.foreign.folder import import_folder
from ckptkit.foreign.hf.export import ROUNDED_AT_ONCE
from ckptkit.foreign.hf.folder import HfFolder
from ckptkit.loading.reader import CheckpointReader
from tests.ckptkit.support.hf_folders import write_folder
from threefold.errors import UserError
from threefold.storage import open_storage


def call(*arguments: object) -> int:
    """Run a verb of ckptkit; its exit code."""
    return main([str(each) for each in arguments])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, each in expected.items():
        assert tensors[name].dtype == each.dtype, name
        assert torch.equal(tensors[name], each), name


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_files": 3, "dtype": torch.bfloat16}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"dtype": torch.float16}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gpt2", {"num_files": 2}),
    ("mixtral", {"num_files": 2}),
    ("phi3", {"num_files": 2}),
    ("gemma3_text", {}),
    ("olmo2", {}),
    ("gemma", {"dtype": torch.bfloat16}),
    ("gemma2", {}),
    ("mistral", {"sliding_window": 16}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("qwen3_moe", {"num_files": 2, "num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    ("qwen3_moe", {"dtype": torch.bfloat16}),
]
SLOW_KINDS = {1, 2, 3, 4, *range(9, 15), 16}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model_type", "kind"),
    [pytest.param(*kind, marks=[pytest.mark.slow] * (number in SLOW_KINDS)) for number, kind in enumerate(KINDS)],
    ids=lambda each: str(each)[:30],
)
def test_a_folder_comes_back_with_its_tensors_and_files(tmp_path: Path, model_type: str, kind: dict[str, Any]) -> None:
    source, run, back = (tmp_path / name for name in ("source", "run", "back"))
    expected = write_folder(source, model_type, **kind)
    assert call("import", source, run, "--from", "hf") == 0
    with CheckpointReader(open_storage(run), 0) as reader:
        assert not verify_checkpoint(reader).faults
    assert call("reshard", run, tmp_path / "cut", "--tp", 2, "--pp", 2, "--dp", 2) == 0
    assert call("export", tmp_path / "cut", back, "--to", "hf", "--max-shard-bytes", 10_000) == 0
    assert_equal(tensors_of(back), expected)
    assert len(list(back.glob("model-*.safetensors"))) > 2
    places = json.loads((back / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: load_file(back / file)[name].shape for name, file in places.items()}.keys() == expected.keys()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    assert call("import", back, tmp_path / "again") == 0
    assert call("diff", run, tmp_path / "again") == 0


@pytest.mark.parametrize(("model_type", "dtype"), [("llama", "bf16"), ("gpt2", "fp16")])
def test_values_are_rounded_to_a_dtype(
    tmp_path: Path, model_type: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = write_folder(tmp_path / "source", model_type, vocab_size=40_000)  # rounded in several turns
    assert max(tensor.numel() for tensor in expected.values()) > ROUNDED_AT_ONCE
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert call("import", tmp_path / "source", tmp_path / "run") == 0
    words = ("export", tmp_path / "run", tmp_path / "out", "--dtype", dtype)
    assert call(*words) == 0
    assert_equal(tensors_of(tmp_path / "out"), {name: each.to(narrow) for name, each in expected.items()})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("torch_dtype", config.get("dtype")) == str(narrow).removeprefix("torch.")
    assert call(*words) == 0
    assert call("export", tmp_path / "run", tmp_path / "out") == 2
    assert "holds files already" in capsys.readouterr().err


def test_what_a_dtype_cannot_hold_is_an_error_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    tensors = write_folder(source, "llama")
    tensors["model.norm.weight"][3] = 7e4
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert call("import", source, tmp_path / "run") == 0
    assert call("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp16") == 2
    assert "norm.weight holds a value beyond F16" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_same_call_again_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, run, back = (tmp_path / name for name in ("source", "run", "back"))
    write_folder(source, "llama")
    for arguments, target in ((("import", source, run), run), (("export", run, back), back)):
        assert call(*arguments, "--dry-run", "--json") == 0
        assert json.loads(capsys.readouterr().out)["dry_run"]
        assert not target.exists()
        assert call(*arguments, "--json") == 0
        done, before = json.loads(capsys.readouterr().out), files_of(target)
        assert done["bytes_written"] > 0
        assert call(*arguments) == 0
        assert "is there already" in capsys.readouterr().out
        assert files_of(target) == before
    (source / "config.json").write_text((source / "config.json").read_text() + " ")
    assert call("import", source, run) == 2
    assert "already holds step 0" in capsys.readouterr().err
    (back / "notes.txt").write_text("mine")
    assert call("export", run, back) == 2
    assert "holds other files, such as notes.txt" in capsys.readouterr().err


def test_bad_input_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    write_folder(source, "llama", architectures=["MambaForCausalLM"])
    assert call("import", source, run) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert "MambaForCausalLM" in error
    assert hint.endswith(f"ckptkit import {source} RUN --family generic")
    assert not run.exists()
    data = next(iter(write_folder(tmp_path / "good", "llama").values()))
    assert data.numel()
    assert call("import", tmp_path / "good", run) == 0
    [part] = run.rglob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-9] + b"\xff" * 9)
    assert call("export", run, tmp_path / "out") == 1
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_seen_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    write_folder(source, "llama")
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))
        assert call("import", source, run) == 3
        assert "its disk has 40,960 left" in capsys.readouterr().err
        assert not run.exists()
    assert call("import", source, run) == 0
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))
    assert call("export", run, tmp_path / "out") == 3
    assert not (tmp_path / "out").exists()


class Killed(BaseException):
    """What no program handles."""


def killing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the process die, in place of the n-th name that a file gets: what it left stays, hidden files too."""
    from threefold.storage import new_file

    calls = iter(range(1, 1000))
    publish = new_file.NewFile.publish

    def dying(self: new_file.NewFile, **options: bool) -> None:
        if next(calls) == number:
            monkeypatch.setattr(new_file.NewFile, "close", new_file.NewFile._close_descriptor)  # its lock goes too
            monkeypatch.setattr(os, "unlink", lambda *_, **__: None)
            raise Killed
        publish(self, **options)

    monkeypatch.setattr(new_file.NewFile, "publish", dying)


@pytest.mark.ci
@pytest.mark.slow
def test_killed_anywhere_the_same_call_ends_with_the_same_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_folder(source, "gpt2", num_files=2)
    calls = {
        "import": lambda name: call("import", source, tmp_path / name),
        "export": lambda name: call("export", tmp_path / "import", tmp_path / name, "--max-shard-bytes", 50_000),
    }
    for verb, run in calls.items():
        assert run(verb) == 0
        expected = files_of(tmp_path / verb)
        for number in range(1, 20):
            name = f"{verb}-{number}"
            with pytest.MonkeyPatch.context() as patched:
                killing(patched, number)
                try:
                    assert run(name) == 0
                    break
                except Killed:
                    pass
            assert files_of(tmp_path / name) != expected
            assert run(name) == 0
            assert files_of(tmp_path / name) == expected
        assert number > 3


def test_an_import_is_one_attempt_however_often_it_is_tried(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "qwen3")
    folder = HfFolder(str(tmp_path / "source"))
    for run in ("a", "b"):
        import_folder(folder, open_storage(tmp_path / run), step=100)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert (tmp_path / "a" / "step-000000100" / folder.attempt).is_dir()


def test_a_second_import_beside_the_first_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "gpt2", num_files=2)
    folder, storage = HfFolder(str(tmp_path / "source")), open_storage(tmp_path / "run")
    refused: list[str] = []

    def rival(done: int, total: int) -> None:
        with pytest.raises(UserError, match="another process writes the same into") as caught:
            import_folder(HfFolder(str(tmp_path / "source")), open_storage(tmp_path / "run"))
        refused.append(str(caught.value.hint))

    assert not import_folder(folder, storage, progress=rival).was_there
    assert refused[0] == "wait until it ends, then run this again"
    assert import_folder(folder, storage).was_there
    with CheckpointReader(storage, 0) as reader:
        assert verify_checkpoint(reader).ok
