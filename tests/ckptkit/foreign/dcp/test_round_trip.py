"""Import from and export to torch.distributed.checkpoint: what it saved it loads again, sharded states included."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit.cli import main
from ckptkit.foreign.dcp import export as dcp_export
from ckptkit.loading.roots import read_root
from ckptkit.torch import DcpReader
from tests.ckptkit.mapping.test_mapper import STEP, make_source
from tests.ckptkit.support.forged import forge
from tests.ckptkit.support.torch_program import make, train
from tests.ckptkit.torch.trainers.test_dcp import assert_equal, emptied, state_of, values
from tests.trainer.support.ranks import run_ranks
from threefold.storage import open_storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def call(*arguments: object) -> int:
    """Run a verb of ckptkit; its exit code."""
    return main([str(each) for each in arguments])


def test_a_state_goes_through_a_run_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind of value, a tensor of several blocks, chunks and files; loaded by DCP from the run and the folder."""
    monkeypatch.setattr(dcp_export, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(dcp_export, "CHUNK_BYTES", 600_000)
    state = values() | {"large": torch.randn(700, 1000), "tall": torch.arange(300_000)}
    source, run, back = (tmp_path / name for name in ("source", "run", "back"))
    dcp.save(state, checkpoint_id=source)
    assert call("import", source, run, "--from", "dcp") == 0
    assert call("export", run, back, "--to", "dcp", "--max-shard-bytes", 1_500_000) == 0
    num_tensors = len(read_root(open_storage(run), 0).tensors)
    assert f", {num_tensors} tensors equal to what was saved" in capsys.readouterr().out
    assert len(list(back.glob("*.distcp"))) > 1
    for options in ({"storage_reader": DcpReader(run)}, {"checkpoint_id": back}):
        found = emptied(state)
        dcp.load(found, **options)
        assert_equal(found, state)
    before = {path.name: path.read_bytes() for path in back.iterdir()}
    assert call("export", run, back, "--to", "dcp", "--max-shard-bytes", 1_500_000) == 0
    assert "is there already" in capsys.readouterr().out
    (back / ".metadata").unlink()
    assert call("export", run, back, "--to", "dcp", "--max-shard-bytes", 1_500_000) == 2  # not what a kill leaves
    capsys.readouterr()
    assert before.keys() - {path.name for path in back.iterdir()} == {".metadata"}


def test_any_step_is_a_flat_state_and_ties_point_to_the_same_bytes(tmp_path: Path) -> None:
    storage = make_source(tmp_path / "run", tied=True)
    assert call("export", tmp_path / "run", tmp_path / "out", "--to", "dcp") == 0
    root = read_root(storage, STEP)
    tied = next(info for info in root.tensors.values() if info.placement.tied_to is not None)
    names = [tied.name, str(tied.placement.tied_to), "layers.1.mlp.up.weight"]
    state = {name: torch.zeros(root.tensors[name].shape, dtype=torch.float32) for name in names}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    assert torch.equal(state[names[0]], state[names[1]])
    assert all(each.abs().sum() > 0 for each in state.values())


def test_a_step_that_is_not_as_it_was_saved_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"w": torch.arange(10.0)}, checkpoint_id=tmp_path / "source")
    assert call("import", tmp_path / "source", tmp_path / "run", "--from", "dcp") == 0
    forge(open_storage(tmp_path / "run"), 0, with_sums=False)
    assert call("export", tmp_path / "run", tmp_path / "out", "--to", "dcp") == 1
    assert "is not equal to what was saved" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert call("export", tmp_path / "run", tmp_path / "out", "--to", "dcp", "--dtype", "bf16") == 2
    assert not (tmp_path / "out").exists()


def saved(rank: int, layout: str, folder: str) -> list[float]:
    """Save a program as DCP does, and go on."""
    model, optimizer, scheduler = make(layout)
    train(model, optimizer, scheduler, range(4))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), range(4, 7))


def loaded(rank: int, layout: str, folder: str) -> list[float]:
    """Load a folder as DCP does, and go on."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optimizer, scheduler = make(layout)
    train(model, optimizer, scheduler, range(1))
    state: dict[str, Any] = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), range(4, 7))


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "num_ranks", "other"), [("fsdp", 2, "tp"), ("fsdp_tp", 4, "fsdp")])
def test_sharded_states_and_optimizers_go_on_after_a_round_trip(
    tmp_path: Path, layout: str, num_ranks: int, other: str
) -> None:
    source, run, back = (tmp_path / name for name in ("source", "run", "back"))
    losses = run_ranks(num_ranks, saved, layout, str(source))[0]
    assert call("import", source, f"{run}/step-000000004", "--from", "dcp") == 0
    assert call("export", run, back, "--to", "dcp") == 0
    for each in run_ranks(2, loaded, other, str(back)):
        np.testing.assert_allclose(each, losses, rtol=0, atol=1e-10)
