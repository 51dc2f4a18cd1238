"""Import from and export to megatron-core's torch_dist: what it saved it loads again, on other ranks too."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit.cli import main
from ckptkit.loading.roots import read_root
from tests.ckptkit.support import megatron_program
from tests.trainer.support.ranks import run_ranks
from threefold.storage import open_storage

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"), pytest.mark.filterwarnings("ignore:Detected an existing")
]  # fmt: skip
BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}


def call(*arguments: object) -> int:
    """Run a verb of ckptkit; its exit code."""
    return main([str(each) for each in arguments])


def write_folder(folder: Path, *, has_file: bool = True) -> Path:
    """What megatron-core writes, made by DCP; what is common in a file, as before 0.19, or in the save."""
    state = {"decoder.layers.weight": torch.arange(24.0).reshape(2, 3, 4), "rng/shard_0_1": {"seed": 1}}
    if not has_file:
        state["common_state/shard_0_1"] = {"iteration": 7}
    dcp.save(
        state, storage_writer=dcp.FileSystemWriter(folder), planner=dcp.DefaultSavePlanner(flatten_state_dict=False)
    )
    if has_file:
        torch.save({"iteration": 7}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(BACKENDS))
    return folder


@pytest.mark.parametrize("has_file", [True, False])
def test_a_folder_comes_back_with_its_files(tmp_path: Path, has_file: bool, capsys: pytest.CaptureFixture[str]) -> None:
    source, run, back = write_folder(tmp_path / "source", has_file=has_file), tmp_path / "run", tmp_path / "back"
    files = ("common.pt", "metadata.json") if has_file else ("metadata.json",)
    assert call("import", source, run, "--from", "torch_dist") == 0
    assert call("export", run, back, "--to", "torch_dist") == 0
    assert call("diff", f"dcp:{source}", f"dcp:{back}") == 0
    for name in files:
        assert (back / name).read_bytes() == (source / name).read_bytes()
    assert sorted(path.name for path in back.iterdir() if path.suffix != ".distcp") == sorted((".metadata", *files))
    assert read_root(open_storage(run), 0).tensors.keys() == {
        "decoder.layers.weight", "rng/shard_0_1", *(f"files/{name}" for name in files),
        *(() if has_file else ("common_state/shard_0_1",)),
    }  # fmt: skip
    capsys.readouterr()
    assert call("import", source, tmp_path / "other", "--from", "dcp") == 0
    assert f"holds what is not read: {', '.join(files)}" in capsys.readouterr().err
    assert call("export", tmp_path / "other", tmp_path / "no", "--to", "torch_dist") == 2
    assert "was not imported from torch_dist" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("metadata.json", None, "metadata.json is missing"),
        ("common.pt", None, "common.pt is missing"),
        ("metadata.json", "[]", "is not what megatron-core writes"),
        ("metadata.json", "{}", "says no backend, which is not read"),
        ("metadata.json", json.dumps(BACKENDS | {"sharded_backend": "zarr"}), "says sharded_backend 'zarr', which is"),
        ("rng/shard_0_1.pt", "x", "holds rng/shard_0_1.pt, which is not read"),
    ],
)
def test_what_is_not_understood_is_one_error_and_nothing_is_written(
    tmp_path: Path, name: str, content: str | None, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_folder(tmp_path / "source") / name
    if content is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    assert call("import", tmp_path / "source", tmp_path / "run", "--from", "torch_dist") in (1, 2)
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None,
    reason="needs megatron-core: pip install --no-deps --target DIR megatron-core; PYTHONPATH=DIR",
)
def test_megatron_core_loads_what_it_saved(tmp_path: Path) -> None:
    source, run, back = (tmp_path / name for name in ("source", "run", "back"))
    source.mkdir()
    run_ranks(2, megatron_program.save, str(source), 2)
    assert call("import", source, f"{run}/step-000000007", "--from", "torch_dist") == 0
    assert call("reshard", run, tmp_path / "cut", "--dp", 3) == 0
    assert call("export", tmp_path / "cut", back, "--to", "torch_dist") == 0
    names = sorted(f"{kind}.{part}" for kind in ("model", "optimizer.exp_avg") for part in ("row", "column", *range(4)))
    for size in (1, 2):
        for rank, found in enumerate(run_ranks(size, megatron_program.load, str(back), size)):
            assert found == [names, 7, {"lr": 0.1}, {"rank": rank} if size == 2 else None]
