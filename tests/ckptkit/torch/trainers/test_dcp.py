"""torch.distributed.checkpoint through DcpWriter and DcpReader: what it saves it loads, on any ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckptkit import Run, verify_checkpoint
from ckptkit.cli import main
from ckptkit.torch import DcpReader, DcpWriter
from tests.ckptkit.support.forged import forge
from tests.ckptkit.support.torch_program import make, train
from tests.trainer.support.ranks import run_ranks
from threefold.storage import open_storage

STEP = "step-000000004"


def values() -> dict[str, Any]:
    """A nested state of every kind of value that DCP takes."""
    return {
        "model": {"w": torch.arange(35.0).reshape(5, 7), "half": torch.arange(4, dtype=torch.bfloat16)},
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "complex": torch.tensor([[1 + 2j, 3j]]),
        "small": torch.tensor(7, dtype=torch.uint16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "groups": [{"lr": 0.1, "names": ("a", "b")}, {"lr": torch.tensor(0.2)}],
        "text": "text",
    }


def emptied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    return [emptied(each) for each in state] if isinstance(state, list) else "nothing"


def assert_equal(loaded: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert loaded.dtype == expected.dtype
        assert torch.equal(loaded, expected)
    elif isinstance(expected, dict):
        assert loaded.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(loaded[key], value)
    elif isinstance(expected, list):
        for one, other in zip(loaded, expected, strict=True):
            assert_equal(one, other)
    else:
        assert loaded == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_state_comes_back_and_the_verbs_know_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    dcp.save(values(), storage_writer=DcpWriter(f"{run}/{STEP}"))
    for url in (f"{run}/{STEP}", str(run)):
        state = emptied(values())
        dcp.load(state, storage_reader=DcpReader(url))
        assert_equal(state, values())
    for verb in ("ls", "verify", "inspect", "hash"):
        assert main([verb, str(run)]) == 0
    with Run(str(run)).open(4) as reader:
        assert verify_checkpoint(reader).num_certified == len(reader.root.tensors)
    capsys.readouterr()
    assert main(["inspect", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metadata"]["dcp"]["bytes"] == [
        "groups.0.lr", "groups.0.names", "text"
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_reads_a_step_into_other_dtypes_in_part_and_as_a_whole(tmp_path: Path) -> None:
    dcp.save(values(), storage_writer=DcpWriter(), checkpoint_id=tmp_path / STEP)
    state = {"model": {"half": torch.zeros(4, dtype=torch.float64)}}
    dcp.load(state, storage_reader=DcpReader(), checkpoint_id=tmp_path)
    assert_equal(state["model"]["half"], torch.arange(4, dtype=torch.float64))
    flat: dict[str, Any] = {}
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(flat, DcpReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert_equal(flat, values())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_what_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class OtherPlanner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = [object()]
            return plans, metadata

    url = f"{tmp_path}/run/{STEP}"
    for state, options, text in (
        ({"a" * 300: torch.ones(2)}, {}, "is not a text of 1 to 255 bytes"),
        ({"sparse": torch.ones(2).to_sparse()}, {}, "layout torch.sparse_coo"),
        ({"w": torch.ones(2)}, {"planner": OtherPlanner()}, "planner's data is not a path"),
    ):
        with pytest.raises(CheckpointException, match=text):
            dcp.save(state, storage_writer=DcpWriter(url), **options)
        assert not list((tmp_path / "run").rglob("*.safetensors"))
    for writer, text in ((DcpWriter(), "has no URL"), (DcpWriter(tmp_path), "is a run, and a save is one step")):
        with pytest.raises(CheckpointException, match=text):
            dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    dcp.save({"w": torch.ones(2)}, storage_writer=DcpWriter(url))
    with pytest.raises(CheckpointException, match=r"step 4 of .* is committed already"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=DcpWriter(url))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.ones(2)}, storage_reader=DcpReader(f"{tmp_path}/run/step-000000005"))
    assert "step 5" in str(caught.value) + capsys.readouterr().err, "before torch 2.13 DCP has no reason in its error"


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_load_is_compared_with_the_certificate_by_default(tmp_path: Path) -> None:
    state = {"a": torch.arange(12.0).reshape(3, 4), "lr": 0.5}
    dcp.save(state, storage_writer=DcpWriter(tmp_path / "run" / "step-000000001"))
    for certify, expected in ((False, 0), (True, 2)):
        reader = DcpReader(tmp_path / "run", certify=certify)
        dcp.load({"a": torch.zeros(3, 4), "lr": 0.0}, storage_reader=reader)
        assert reader.num_certified == expected
    forge(open_storage(tmp_path / "run"), 1, with_sums=False, tensor="a")
    dcp.load({"a": torch.zeros(3, 4)}, storage_reader=DcpReader(tmp_path / "run", certify=False))
    with pytest.raises(CheckpointException, match="is not equal to what was saved, by the certificate"):
        dcp.load({"a": torch.zeros(3, 4)}, storage_reader=DcpReader(tmp_path / "run"))


def test_a_step_that_dcp_did_not_save_is_a_flat_state(tmp_path: Path) -> None:
    from ckptkit.torch import Run as TorchRun

    with TorchRun(str(tmp_path)) as run:
        run.save(4, {"model": torch.nn.Linear(2, 2)})
    state = {"model/weight": torch.zeros(2, 2)}
    dcp.load(state, storage_reader=DcpReader(tmp_path))
    assert state["model/weight"].abs().sum() > 0


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    parameters, states = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": states}


def resumed(layout: str, url: str) -> list[float]:
    """Load into a program under a layout, and go on."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optimizer, scheduler = make(layout)
    train(model, optimizer, scheduler, range(1))  # other values, and optimizer states
    state = state_of(model, optimizer)
    dcp.load(state, storage_reader=DcpReader(url))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), range(4, 7))


def saved(rank: int, layout: str, url: str) -> list[float]:
    """Save twice, the second time beside the program and with plans that are cached; fail and try again between."""
    model, optimizer, scheduler = make(layout)
    train(model, optimizer, scheduler, range(2))
    planner = DefaultSavePlanner(enable_plan_caching=True)
    usual = DcpWriter.write_data

    def failing(*arguments: Any) -> Any:
        if rank == 1:
            raise OSError("no space")
        return usual(*arguments)

    DcpWriter.write_data = failing  # type: ignore[method-assign]
    with pytest.raises(CheckpointException, match="no space"):
        dcp.save(state_of(model, optimizer), storage_writer=DcpWriter(f"{url}/step-000000002"), planner=planner)
    DcpWriter.write_data = usual  # type: ignore[method-assign]
    dcp.save(state_of(model, optimizer), storage_writer=DcpWriter(f"{url}/step-000000002"), planner=planner)
    train(model, optimizer, scheduler, range(2, 4))
    writer = DcpWriter(f"{url}/{STEP}")
    dcp.async_save(state_of(model, optimizer), storage_writer=writer, planner=planner).result()
    again = resumed(layout, url)
    ahead = train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), range(4, 7))
    return [*again, *ahead]


def loaded(rank: int, layout: str, url: str) -> list[float]:
    return resumed(layout, url)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(("layout", "others"), [("fsdp", ("tp", "ddp")), ("tp", ("fsdp",)), ("fsdp_tp", ("fsdp",))])
def test_ranks_save_and_any_others_go_on(tmp_path: Path, layout: str, others: tuple[str, ...]) -> None:
    num_ranks = 4 if layout == "fsdp_tp" else 2
    losses = run_ranks(num_ranks, saved, layout, str(tmp_path))
    for each in losses:
        assert each[:3] == each[3:]
    for other in others:
        for each in run_ranks(2, loaded, other, str(tmp_path)):
            torch.testing.assert_close(each, losses[0][:3], rtol=0, atol=1e-10)
    torch.testing.assert_close(resumed("one", str(tmp_path)), losses[0][:3], rtol=0, atol=1e-10)
    for step in (2, 4):
        with Run(str(tmp_path)).open(step) as reader:
            assert verify_checkpoint(reader).ok


class ShardPlanner(DefaultSavePlanner):
    """Plans as torch 2.14 does for a plain tensor that is some shards of a global one, each a slice of it."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        [whole] = plan.items
        assert whole.tensor_data is not None
        shards = [
            replace(
                whole,
                index=MetadataIndex("w", torch.Size((0, 3 * number)), number),
                type=WriteItemType.SHARD,
                tensor_data=replace(
                    whole.tensor_data,
                    chunk=ChunkStorageMetadata(torch.Size((0, 3 * number)), torch.Size((4, 3))),
                    size=torch.Size((4, 6)),
                ),
            )
            for number in range(2)
        ]
        return replace(plan, items=shards)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        at = 5 * (write_item.index.index or 0)  # 2 columns of padding are between the two
        return self.state_dict["w"][:, at : at + 3]


def test_shards_that_are_slices_of_one_tensor_are_written_as_one(tmp_path: Path) -> None:
    local = torch.arange(32.0).reshape(4, 8)
    writer = DcpWriter(tmp_path / STEP)
    dcp.save({"w": local}, storage_writer=writer, planner=ShardPlanner(flatten_state_dict=False), no_dist=True)
    found = {"w": torch.empty(4, 6)}
    dcp.load(found, storage_reader=DcpReader(tmp_path / STEP), no_dist=True)
    assert found["w"].equal(torch.cat([local[:, :3], local[:, 5:]], 1))
