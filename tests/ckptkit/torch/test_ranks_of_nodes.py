"""Ranks of two nodes: DDP, FSDP2 and HSDP through each node's own disk, and a node that dies in a save."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from ckptkit import CheckpointerOptions, Tier
from ckptkit import Run as AnyRun
from ckptkit.torch import Run
from tests.ckptkit.support.torch_program import make, train
from tests.trainer.support.ranks import run_ranks


def on_node(rank: int, sizes: tuple[int, ...]) -> str:
    """Set what torchrun sets, and return the node's name."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    node = max(number for number, start in enumerate(starts) if start <= rank)
    os.environ |= {"LOCAL_RANK": str(rank - starts[node]), "THREEFOLD_NODE": f"n{node}"}
    return f"n{node}"


def go_on(
    rank: int, folder: str, sizes: tuple[int, ...], layout: str, until: int, killed: int = 0
) -> tuple[int, list[float]]:  # fmt: skip
    """Train from the newest step on, and save steps 2 and 4; the losses. Ranks from 2 on die in the save of one."""
    name = on_node(rank, sizes)
    model, optimizer, scheduler = make(layout)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": True, "step": 0}
    replica = Tier(f"{folder}/mounted/{{peer}}/replica/{{node}}")
    losses = []
    with Run(f"{folder}/machine-{name}/{{node}}", CheckpointerOptions(tiers=(replica,), deadline_s=60)) as run:
        if run.newest() is not None:
            run.load(state)
        first = state["step"]
        for step in range(first + 1, until + 1):
            losses += train(model, optimizer, scheduler, range(step - 1, step))
            state["step"] = step
            if step in (2, 4):
                run.save(step, state)
                if step == killed and rank >= 2:
                    os.kill(run._checkpointer.writer_pid, signal.SIGKILL)  # type: ignore[union-attr]
                    os.kill(os.getpid(), signal.SIGKILL)
                run.wait()
    return first, losses


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.ci), "hsdp"])
def test_two_nodes_go_on_bit_for_bit_without_one_of_their_disks(tmp_path: Path, layout: str) -> None:
    folder, sizes = str(tmp_path), (2, 2)
    _, losses = run_ranks(4, go_on, folder, sizes, layout, 6, timeout_s=200)[0]
    shutil.rmtree(tmp_path / "machine-n1")
    assert run_ranks(4, go_on, folder, sizes, layout, 6, timeout_s=200) == [(4, losses[4:])] * 4
    if layout == "fsdp":
        assert {first for first, _ in run_ranks(3, go_on, folder, (1, 2), "ddp", 5, timeout_s=200)} == {4}


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_dies_in_a_save_takes_no_step_with_it(tmp_path: Path) -> None:
    folder, sizes = str(tmp_path), (2, 2)
    with pytest.raises(AssertionError):
        run_ranks(4, go_on, folder, sizes, "ddp", 6, 4, timeout_s=200)
    assert AnyRun(tmp_path / "machine-n1" / "n1").steps() == [2]
    assert {first for first, _ in run_ranks(4, go_on, folder, sizes, "ddp", 4, timeout_s=200)} == {2}
    for name in ("n0", "n1"):
        assert AnyRun(tmp_path / f"machine-{name}" / name).steps() == [2, 4]
