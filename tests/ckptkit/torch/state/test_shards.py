"""Plain tensors that say which slices of a global tensor they hold, as torch's CheckpointableTensor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from ckptkit.torch import Run
from tests.ckptkit.support.thread_exchange import ThreadExchange
from threefold.errors import StorageError, UserError

Slices = Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # global offset, local offset, shape
WHOLE = torch.arange(40.0).reshape(8, 5)
PADDED: Slices = (((6, 0), (1, 0), (2, 5)), ((0, 0), (3, 0), (1, 5)))  # of memory of five rows


def shard(memory: torch.Tensor, shape: tuple[int, ...], slices: Slices) -> Any:
    made: Any = memory
    made.global_shape = shape
    made.global_offsets, made.local_offsets, made.local_sizes = (tuple(each[n] for each in slices) for n in range(3))
    return made


def half(rank: int, source: torch.Tensor) -> Any:
    """Return the four rows of a rank, behind a row that is padding."""
    memory = torch.full((5, *source.shape[1:]), -1.0, dtype=source.dtype)
    memory[1:] = source[4 * rank : 4 * rank + 4]
    zero = (0,) * (source.ndim - 1)
    return shard(memory, tuple(source.shape), (((4 * rank, *zero), (1, *zero), (4, *source.shape[1:])),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_two_ranks_save_their_slices_and_any_program_loads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    source = WHOLE.to(dtype)

    def saved(exchange: Any) -> None:
        with Run(tmp_path, exchange=exchange) as run:
            run.save(1, {"weight": half(exchange.rank, source)})

    ThreadExchange(2).run(saved)
    whole, padded = torch.zeros(8, 5, dtype=dtype), shard(torch.full((5, 5), -1.0, dtype=dtype), (8, 5), PADDED)
    with Run(tmp_path) as run:
        run.load({"weight": whole})
        run.load({"weight": padded})
    assert torch.equal(whole, source)
    assert torch.equal(padded[1:4], source[[6, 7, 0]])
    assert bool((padded[[0, 4]] == -1).all())

    def loaded(exchange: Any) -> bool:
        mine, expected = half(exchange.rank, torch.zeros_like(source)), half(exchange.rank, source)
        with Run(tmp_path, exchange=exchange) as run:
            run.load({"weight": mine})
        return torch.equal(mine, expected)

    assert ThreadExchange(2).run(loaded) == [True, True]


class Cut(nn.Module):
    """A module whose weight is a rank's half of a global one."""

    def __init__(self, rank: int, source: torch.Tensor) -> None:
        super().__init__()
        held = half(rank, source)
        self.weight = nn.Parameter(held)
        for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
            setattr(self.weight, name, getattr(held, name))


def trained(model: Any, steps: Sequence[int]) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in steps:
        model.weight.grad = model.weight.detach() * step
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("overlap", [False, True])
def test_the_states_of_an_optimizer_are_the_slices_of_their_parameter(tmp_path: Path, overlap: bool) -> None:
    def saved(exchange: Any) -> dict[str, torch.Tensor]:
        model = Cut(exchange.rank, WHOLE)
        optimizer = trained(model, [1, 2])
        with Run(tmp_path, exchange=exchange) as run:
            run.save(1, {"model": model, "optimizer": optimizer}, overlap=overlap)
        return {"weight": model.weight.detach()[1:], "exp_avg": optimizer.state[model.weight]["exp_avg"][1:]}

    expected = ThreadExchange(2).run(saved)

    def whole() -> tuple[Any, torch.optim.AdamW]:
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(8, 5))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = whole()
    with Run(tmp_path) as run:
        run.load({"model": model, "optimizer": optimizer})
    for name, found in (("weight", model.weight), ("exp_avg", optimizer.state[model.weight]["exp_avg"])):
        assert torch.equal(found, torch.cat([each[name] for each in expected])), name

    def loaded(exchange: Any) -> bool:
        model = Cut(exchange.rank, torch.zeros(8, 5))
        optimizer = trained(model, [] if exchange.rank else [7])
        with Run(tmp_path, exchange=exchange) as run:
            run.load({"model": model, "optimizer": optimizer})
        return torch.equal(optimizer.state[model.weight]["exp_avg"][1:], expected[exchange.rank]["exp_avg"])

    assert ThreadExchange(2).run(loaded) == [True, True]


def test_two_names_for_slices_of_one_memory_are_no_tie(tmp_path: Path) -> None:
    def parts(memory: torch.Tensor) -> dict[str, Any]:
        first, second = memory.detach(), memory.detach()
        return {
            "gate": shard(first, (4, 5), (((0, 0), (0, 0), (4, 5)),)),
            "up": shard(second, (4, 5), (((0, 0), (4, 0), (4, 5)),)),
        }

    fused = torch.zeros(8, 5)
    with Run(tmp_path) as run:
        run.save(1, parts(WHOLE.clone()))
        run.wait()
        run.load(parts(fused))
        gate = torch.zeros(4, 5)
        run.load({"gate": gate})
    assert torch.equal(fused, WHOLE)
    assert torch.equal(gate, WHOLE[:4])


@pytest.mark.parametrize(
    ("slices", "fault"),
    [
        ((((7, 0), (0, 0), (2, 5)),), r"slice 0 of shape \[2, 5\] at \[7, 0\] is outside its global_shape \[8, 5\]"),
        ((((0, 0), (4, 0), (2, 5)),), r"slice 0 of shape \[2, 5\] at \[4, 0\] is outside its memory \[5, 5\]"),
        ((((0,), (0, 0), (2, 5)),), r"slice 0 of shape \[2, 5\] at \[0\] is outside its global_shape"),
        ((((-1, 0), (0, 0), (2, 5)),), "is outside its global_shape"),
    ],
)  # fmt: skip
def test_slices_that_cannot_be_are_refused(tmp_path: Path, slices: Slices, fault: str) -> None:
    with Run(tmp_path) as run, pytest.raises(UserError, match=fault):
        run.save(1, {"weight": shard(torch.zeros(5, 5), (8, 5), slices)})


def test_fields_of_several_lengths_are_refused(tmp_path: Path) -> None:
    piece = shard(torch.zeros(5, 5), (8, 5), PADDED)
    piece.local_sizes = piece.local_sizes[:1]
    with Run(tmp_path) as run:
        with pytest.raises(UserError, match="2 global_offsets, 2 local_offsets, 1 local_sizes"):
            run.save(1, {"weight": piece})
        piece.local_sizes = None
        with pytest.raises(UserError, match="not tuples of ints"):
            run.save(1, {"weight": piece})


def test_slices_that_leave_a_hole_are_no_step(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1, {"weight": shard(torch.zeros(5, 5), (8, 5), PADDED)})
        with pytest.raises(StorageError, match="weight"):
            run.wait()
        assert run.newest() is None


def test_a_state_of_another_shape_than_its_shard_is_refused(tmp_path: Path) -> None:
    model = Cut(0, WHOLE)
    optimizer = trained(model, [1])
    optimizer.state[model.weight]["row"] = torch.zeros(5, 1)
    with Run(tmp_path) as run, pytest.raises(UserError, match=r"optimizer/state/weight/row has shape \[5, 1\]"):
        run.save(1, {"model": model, "optimizer": optimizer})


@pytest.mark.skipif(not hasattr(checkpoint, "CheckpointableTensor"), reason="needs torch 2.14 or newer")
def test_torch_takes_the_same_tensors_for_the_same_slices(tmp_path: Path) -> None:
    """What torch.distributed.checkpoint reads of one rank's slices is what Run reads of them."""
    kind: Any = checkpoint.CheckpointableTensor  # type: ignore[attr-defined]
    first, second = (((0, 0), (1, 0), (4, 5)),), (((4, 0), (1, 0), (4, 5)),)
    both = shard(WHOLE.clone(), (8, 5), (((4, 0), (0, 0), (4, 5)), ((0, 0), (4, 0), (4, 5))))
    assert isinstance(both, kind)
    with Run(tmp_path / "run") as run:
        run.save(1, {"weight": both})
        run.wait()
        checkpoint.save({"weight": both}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
        for slices in (first, second, PADDED):
            ours, theirs = (shard(torch.full((5, 5), -1.0), (8, 5), slices) for _ in range(2))
            run.load({"weight": ours})
            checkpoint.load({"weight": theirs}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
            assert torch.equal(ours, theirs)
