"""Universal checkpoints of DeepSpeed: masters and moments under a run's names, ZeRO-3's with their shapes."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit.cli import main
from ckptkit.loading.roots import read_root
from ckptkit.torch import DcpReader
from threefold.storage import open_storage

SHAPES = {"layers.0.weight": (4, 3), "layers.0.bias": (4,)}


def call(*arguments: object) -> int:
    """Run a verb of ckptkit; its exit code."""
    return main([str(each) for each in arguments])


def plant(folder: Path, *, is_flat: bool) -> dict[str, torch.Tensor]:
    """What ds_to_universal.py makes of ZeRO-1, or flat of ZeRO-3; the tensors that a run has of it."""
    expected = {}
    for name, shape in SHAPES.items():
        (folder / "zero" / name).mkdir(parents=True)
        for state, kind in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            tensor = torch.randn(shape)
            expected[f"optim.{kind}/{name}"] = tensor
            saved: Any = tensor.flatten() if is_flat else {"cat_dim": 0, "param": tensor}
            torch.save(saved, folder / "zero" / name / f"{state}.pt")
        torch.save(12, folder / "zero" / name / "step.pt")
    torch.save({"param_groups": [{"lr": 0.1}]}, folder / "zero" / "optimizer_state.pt")
    module = {"param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
              "args": argparse.Namespace(tp=2), "module": dict(expected), "names": {"a"}}  # fmt: skip
    torch.save(module, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return expected


@pytest.mark.parametrize("is_flat", [False, True])
def test_masters_and_moments_are_a_step(tmp_path: Path, is_flat: bool, capsys: pytest.CaptureFixture[str]) -> None:
    expected = plant(tmp_path / "saved", is_flat=is_flat)
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "ucp") == 0
    assert "zero/optimizer_state.pt" in capsys.readouterr().err
    root = read_root(open_storage(tmp_path / "run"), 0)
    assert {name: info.shape for name, info in root.tensors.items()} == {n: tuple(t.shape) for n, t in expected.items()}
    assert root.metadata["deepspeed"]["steps"] == dict.fromkeys(SHAPES, 12)
    assert call("diff", f"ucp:{tmp_path / 'saved'}", tmp_path / "run") == 0
    assert call("export", tmp_path / "run", tmp_path / "out", "--to", "dcp") == 0
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", None, "and no *_model_states.pt with their shapes"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", {"module": 1}, "has no shapes of parameters"),
        ("zero/layers.0.bias/fp32.pt", torch.ones(5), "has a tensor [5], the parameter is [4]"),
        ("zero/layers.0.bias/fp32.pt", {"param": "x"}, "zero/layers.0.bias/fp32.pt: not a tensor"),
        ("zero/layers.0.bias/fp32.pt", None, "lacks files of parameters:\n  zero/layers.0.bias/fp32.pt"),
        ("zero/layers.0.bias/exp_avg.pt", None, "lacks files of parameters:\n  zero/layers.0.bias/exp_avg.pt"),
        ("zero", None, "has no zero/NAME/fp32.pt"),
    ],
)
def test_what_is_not_sound_is_one_error_and_nothing_is_written(
    tmp_path: Path, file: str, content: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path / "saved", is_flat=True)
    path = tmp_path / "saved" / file
    if content is None:
        path.rename(tmp_path / "away")
    else:
        torch.save(content, path)
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "ucp") in (1, 2)
    error = capsys.readouterr().err
    assert text in error
    assert not (tmp_path / "run").exists()


def add_stateless(folder: Path, *names: str) -> dict[str, torch.Tensor]:
    """What ZeRO-1 and 2 have of buffers and frozen weights: a master, and nothing beside it."""
    tensors = {name: torch.arange(4) if name.endswith("tracked") else torch.randn(3, 2) for name in names}
    for name, tensor in tensors.items():
        (folder / "zero" / name).mkdir()
        torch.save({"cat_dim": 0, "param": tensor}, folder / "zero" / name / "fp32.pt")
    return tensors


@pytest.mark.parametrize("is_named", [False, True])
def test_buffers_and_frozen_weights_are_masters_alone_and_named(
    tmp_path: Path, is_named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether or not the module's state says which they are."""
    folder, run = tmp_path / "saved", tmp_path / "run"
    expected = plant(folder, is_flat=False)
    stateless = add_stateless(folder, "norm.tracked", "frozen.weight")
    module = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    if is_named:
        described = torch.load(module, weights_only=False)
        described |= {"buffer_names": ["norm.tracked"], "frozen_param_shapes": {"frozen.weight": torch.Size((3, 2))}}
        torch.save(described, module)
    else:
        module.unlink()
    assert call("import", folder, run, "--from", "ucp") == 0
    assert "has weights without optimizer state: frozen.weight, norm.tracked" in capsys.readouterr().err
    root = read_root(open_storage(run), 0)
    expected |= {f"optim.master/{name}": tensor for name, tensor in stateless.items()}
    assert {name: info.shape for name, info in root.tensors.items()} == {n: tuple(t.shape) for n, t in expected.items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=DcpReader(run))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_parameter_that_lost_all_its_moments_is_not_taken_for_a_frozen_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path / "saved", is_flat=False)
    for state in ("exp_avg", "exp_avg_sq", "step"):
        (tmp_path / "saved" / "zero" / "layers.0.bias" / f"{state}.pt").unlink()
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "ucp") == 1
    assert "zero/layers.0.bias: all but fp32.pt, and the optimizer has it" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "saved" / "zero" / "layers.0.bias")
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "ucp") == 1
    assert "zero/layers.0.bias: all, and the optimizer has it" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "moment", [torch.ones(5), torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.float64)]
)
def test_moments_of_another_shape_or_dtype_are_refused(
    tmp_path: Path, moment: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path / "saved", is_flat=False)
    torch.save({"param": moment}, tmp_path / "saved" / "zero" / "layers.0.bias" / "exp_avg.pt")
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "ucp") == 1
    error = capsys.readouterr().err
    assert f"zero/layers.0.bias/exp_avg.pt: {str(moment.dtype)[6:]} {list(moment.shape)}, fp32.pt beside it" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "num_ranks"), [(1, 2), (2, 2), (3, 1)])
def test_what_deepspeed_made_comes_over_whole(tmp_path: Path, stage: int, num_ranks: int) -> None:
    """With buffers and frozen weights, which have no state; of ZeRO-3 DeepSpeed keeps neither."""
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    program = ["-m", "tests.ckptkit.support.deepspeed_program", str(stage), str(tmp_path / "saved")]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *torchrun, *program], check=True, env=environment, timeout=280)
    folder = tmp_path / "saved" / "universal"
    assert call("import", folder, tmp_path / "run", "--from", "ucp") == 0
    expected = {}
    for path in (folder / "zero").glob("*/*.pt"):
        kind = {"fp32": "master"}.get(path.stem, path.stem)
        value = torch.load(path, weights_only=False)
        value = value["param"] if isinstance(value, dict) else value
        if isinstance(value, torch.Tensor):
            expected[f"optim.{kind}/{path.parent.name}"] = value
    root = read_root(open_storage(tmp_path / "run"), 0)
    assert root.tensors.keys() == expected.keys()
    assert root.tensors["optim.master/0.weight"].shape == (16, 8)
    loaded = {name: torch.zeros(root.tensors[name].shape) for name in expected}
    dcp.load(loaded, storage_reader=DcpReader(tmp_path / "run"))
    assert all(torch.equal(loaded[name].flatten(), each.flatten()) for name, each in expected.items())
    if stage < 3:
        weights = torch.load(tmp_path / "saved" / "weights.pt")
        assert {"3.scale", "4.weight", "4.bias"} < weights.keys()
        for name, each in weights.items():
            assert torch.equal(loaded[f"optim.master/{name}"].reshape(each.shape).to(each.dtype), each), name
