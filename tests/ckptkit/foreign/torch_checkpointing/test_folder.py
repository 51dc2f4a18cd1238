"""Folders of torch_checkpointing: cut tensors become whole, values keep their types, what is not sound is refused."""

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptkit.cli import main
from ckptkit.torch import Run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
PLACED = {"rows": [Replicate(), Shard(0)], "columns": [Shard(1), Shard(0)], "whole": [Replicate(), Replicate()]}


def call(*arguments: object) -> int:
    """Run a verb of ckptkit; its exit code."""
    return main([str(each) for each in arguments])


def tensors() -> dict[str, torch.Tensor]:
    """Tensors that do not divide evenly by two; complex numbers are stored as bytes."""
    rows = torch.arange(30.0).reshape(5, 6).to(torch.complex64)
    return {"rows": rows, "columns": torch.arange(35).reshape(5, 7), "whole": torch.arange(3.0, dtype=torch.bfloat16)}


def cut_of(tensor: torch.Tensor, placements: list[Any], mesh: DeviceMesh) -> dict[str, Any]:
    """What metadata.pkl says of a tensor."""
    spec = {
        "device_type": "cpu",
        "mesh_shape": tuple(mesh.mesh.shape),
        "mesh_data": (0, 1, 2, 3),
        "mesh_dim_names": None,
    }
    kinds = [{"type": "Shard", "dim": p.dim} if isinstance(p, Shard) else {"type": "Replicate"} for p in placements]
    data = {"global_shape": list(tensor.shape), "dtype": str(tensor.dtype), "stride": list(tensor.stride()),
            "mesh_spec": spec, "placements": kinds}  # fmt: skip
    return {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": (0, 1, 2, 3)}


def plant(folder: Path) -> dict[str, Any]:
    """A save of four ranks: a model of DTensors, a step that all have alike, a loader of each rank's own."""
    folder.mkdir()
    described: dict[str, Any] = {}
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        mesh = init_device_mesh("cpu", (2, 2))
        model = {
            name: distribute_tensor(tensor, mesh, PLACED[name], src_data_rank=None)
            for name, tensor in tensors().items()
        }
        described = {f'["{name}"]': [cut_of(each, PLACED[name], mesh)] for name, each in tensors().items()}
        torch.save({**model, "version": 3}, folder / f"model_{rank}.pt")
        torch.save(7, folder / f"step_{rank}.pt")
        torch.save({"seed": rank, "order": torch.arange(rank + 1), "note": b"\xff"}, folder / f"loader_{rank}.pt")
        dist.destroy_process_group()
    item = {"nested_path_to_metadata": described, "rank_to_layout_info": dict.fromkeys(range(4))}
    metadata = {"metadata": {"model": item}, "world_size": 4, "version": "2.0"}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return metadata


def test_what_ranks_saved_in_parts_is_a_state_of_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path / "saved")
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "torch_checkpointing") == 0
    assert call("diff", f"torch_checkpointing:{tmp_path / 'saved'}", tmp_path / "run") == 0
    assert call("verify", tmp_path / "run") == 0
    state: dict[str, Any] = {"model": {name: torch.zeros_like(each) for name, each in tensors().items()}, "step": 0}
    with Run(tmp_path / "run") as run:
        report = run.load(state, strict=False)
        assert state["step"] == 7
        for name, expected in tensors().items():
            assert torch.equal(state["model"][name], expected), name
        with pytest.raises(ValueError, match="each of the 4 ranks that saved it had its own"):
            run.load({"loader": {"seed": 0}})
    assert "model/version" in report.unexpected
    capsys.readouterr()


def test_an_optimizer_by_places_goes_into_one_by_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    (tmp_path / "saved").mkdir()
    torch.save(model.state_dict(), tmp_path / "saved" / "model_0.pt")
    torch.save(optimizer.state_dict(), tmp_path / "saved" / "optimizer_0.pt")
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "torch_checkpointing") == 0
    other = torch.nn.Linear(3, 2)
    fresh = torch.optim.AdamW(other.parameters())
    with Run(tmp_path / "run") as run:
        run.load({"model": other, "optimizer": fresh})
    assert torch.equal(model.weight, other.weight)
    assert fresh.param_groups[0]["lr"] == 0.5
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


class Unknown:
    """A class that no such file has."""


def break_version(folder: Path, metadata: dict[str, Any]) -> None:
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata | {"version": "9"}))


def drop_metadata(folder: Path, _: dict[str, Any]) -> None:
    (folder / "metadata.pkl").unlink()


def drop_rank(folder: Path, _: dict[str, Any]) -> None:
    (folder / "model_3.pt").unlink()


def cut_short(folder: Path, _: dict[str, Any]) -> None:
    path = folder / "model_1.pt"
    path.write_bytes(path.read_bytes()[:-300])


def name_a_class(folder: Path, _: dict[str, Any]) -> None:
    torch.save({"x": Unknown()}, folder / "extra_0.pt")


def hold_a_dtype(folder: Path, _: dict[str, Any]) -> None:
    torch.save({"x": [torch.float32]}, folder / "extra_0.pt")


def describe_another_shape(folder: Path, metadata: dict[str, Any]) -> None:
    group = metadata["metadata"]["model"]["nested_path_to_metadata"]['["rows"]'][0]
    group["sharding_metadata"]["data"]["global_shape"] = [9, 6]
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))


def run_code(folder: Path, _: dict[str, Any]) -> None:
    (folder / "metadata.pkl").write_bytes(b"cposix\nsystem\n(X\x04\x00\x00\x00true tR.")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (break_version, "is of version '9'"),
        (drop_metadata, "is cut over ranks, and nothing says how"),
        (drop_rank, "model_3.pt is missing"),
        (cut_short, "model_1.pt is not a file as torch.save writes it"),
        (name_a_class, "Unknown', which no such file has"),
        (hold_a_dtype, "x/0 is of type torch.float32, which no checkpoint holds"),
        (describe_another_shape, "metadata.pkl says complex64 [5, 6]"),
        (run_code, "names 'posix.system', which no such file has; nothing of it was run"),
    ],
)
def test_what_is_not_sound_is_one_error_and_nothing_is_written(
    tmp_path: Path, change: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tmp_path / "saved", plant(tmp_path / "saved"))
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "torch_checkpointing") in (1, 2)
    error = capsys.readouterr().err
    assert text in error
    assert error.count("error:") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch_checkpointing") is None, reason="needs torch_checkpointing: pip install it")
def test_a_save_of_torch_checkpointing_comes_back(tmp_path: Path) -> None:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    config.items = {"model": ItemSpec(resharder=DefaultResharder())}
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = {"a": DTensor.from_local(torch.randn(4, 3), mesh, [Shard(0)]), "b": torch.ones(2, dtype=torch.bfloat16)}
        manager = CheckpointManager(config)
        manager.save(str(tmp_path / "saved"), {"model": state, "step": 7})
        manager.close()
    finally:
        dist.destroy_process_group()
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "torch_checkpointing") == 0
    found: dict[str, Any] = {"model": {"a": torch.zeros(4, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}, "step": 0}
    with Run(tmp_path / "run") as run:
        run.load(found)
    assert torch.equal(found["model"]["a"], state["a"].to_local())
    assert torch.equal(found["model"]["b"], state["b"])
    assert found["step"] == 7


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_a_cut_tensor_without_elements_is_not_lost(tmp_path: Path, shape: tuple[int, int]) -> None:
    """No rank holds an element of it, but the state has it."""
    (tmp_path / "saved").mkdir()
    tensor = torch.zeros(shape)
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        mesh = init_device_mesh("cpu", (2, 2))
        value = {"empty": distribute_tensor(tensor, mesh, PLACED["rows"], src_data_rank=None)}
        torch.save(value, tmp_path / "saved" / f"model_{rank}.pt")
        described = {'["empty"]': [cut_of(tensor, PLACED["rows"], mesh)]}
        dist.destroy_process_group()
    item = {"nested_path_to_metadata": described, "rank_to_layout_info": dict.fromkeys(range(4))}
    metadata = {"metadata": {"model": item}, "world_size": 4, "version": "2.0"}
    (tmp_path / "saved" / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "torch_checkpointing") == 0
    state = {"model": {"empty": torch.ones(shape)}}
    with Run(tmp_path / "run") as run:
        run.load(state)
        assert run.root(0).tensors["model/empty"].shape == shape


def test_ranks_that_lack_what_others_have_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path / "saved")
    (tmp_path / "saved" / "loader_2.pt").unlink()
    assert call("import", tmp_path / "saved", tmp_path / "run", "--from", "torch_checkpointing") == 0
    assert "has loader of 3 of 4 ranks, none of rank 2" in capsys.readouterr().err
    (tmp_path / "saved" / "model_2.pt").unlink()
    assert call("import", tmp_path / "saved", tmp_path / "other", "--from", "torch_checkpointing") == 1
    assert "model_2.pt is missing" in capsys.readouterr().err
