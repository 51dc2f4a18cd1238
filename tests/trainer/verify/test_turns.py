"""Ranks in drawn orders: a seed replays, what is read early shows, and a hang says where each rank is."""

from functools import partial
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh
from trainer.verify.drawn_order import DrawnOrder
from trainer.verify.threads import ThreadGroup, Threads, names_of, run_turns
from trainer.verify.turns import Deadlock, Died, FirstCome, Order, Turns

CPU = torch.device("cpu")
LAYOUT = ParallelLayout(pp=2, dp=2)


def turns_of(order: Order, function: Any, num_ranks: int = 4) -> tuple[Turns, list[Any]]:
    turns, meetings = Turns(names_of(num_ranks), order), dict[Any, ThreadGroup]()
    networks = [Threads(turns, meetings, rank, num_ranks) for rank in range(num_ranks)]
    return turns, run_turns(turns, [partial(function, network) for network in networks])


def mesh_of(network: Threads) -> ProcessMesh:
    carried: Network = network
    return ProcessMesh(LAYOUT, network.rank, CPU, timeout_s=60, network=carried)


def passing(network: Threads) -> list[float]:
    """Sums over dp and messages to the next stage, several times."""
    mesh, values = mesh_of(network), list[float]()
    for number in range(4):
        network.note("F", mesh.coords.pp, number)
        total = mesh.dp.all_reduce(torch.tensor([float(mesh.rank + number)]))
        if mesh.coords.pp == 0:
            mesh.activations.following.send(total, to=1).wait()
        else:
            total = mesh.activations.previous.receive(torch.zeros(1), source=0).wait()
        values.append(total.item())
    return values


def test_all_orders_have_one_result_and_a_seed_has_one_order() -> None:
    _, expected = turns_of(FirstCome(), passing)
    traces = []
    for seed in [*range(12), *range(12)]:
        order = DrawnOrder(str(seed))
        turns, results = turns_of(order, passing)
        assert results == expected
        traces.append((order.trace, order.num_choices, turns.clock))
    assert traces[:12] == traces[12:]
    assert len(set(traces)) > 8


def changed_early(network: Threads) -> float:
    """A sender that changes what it sends, before it waits for it; all meet between."""
    mesh = mesh_of(network)
    if mesh.coords.pp == 0:
        mesh.world.all_reduce(torch.zeros(1))
        tensor = torch.ones(1)
        sent = mesh.activations.following.send(tensor, to=1)
        tensor.fill_(7.0)
        sent.wait()
        return 1.0
    received = mesh.activations.previous.receive(torch.zeros(1), source=0)
    mesh.world.all_reduce(torch.zeros(1))
    return received.wait().item()


def test_what_is_changed_early_shows_in_some_order() -> None:
    """Who receives is there first in line, so that the message is gone at once."""
    assert turns_of(FirstCome(), changed_early)[1] == [1.0] * 4
    results = {result for seed in range(20) for result in turns_of(DrawnOrder(str(seed)), changed_early)[1]}
    assert results == {1.0, 7.0}


def left_out(network: Threads) -> None:
    mesh = mesh_of(network)
    for number in range(3):
        network.note("B", mesh.coords.pp, number)
        if (network.rank, number) != (1, 2):
            mesh.dp.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("seed", range(5))
def test_a_call_that_one_rank_leaves_out_is_named_with_its_place(seed: int) -> None:
    with pytest.raises(Deadlock) as caught:
        turns_of(DrawnOrder(str(seed)), left_out)
    assert "rank 0 (B, stage 0, micro-batch 2) waits for all_reduce 2 of dp (0, 1), which places [0] joined" in str(
        caught.value
    )


@pytest.mark.parametrize("call", [1, 3, 5])
def test_a_rank_that_ends_is_named_and_so_are_those_that_wait(call: int) -> None:
    for seed in range(5):
        with pytest.raises(Deadlock) as caught:
            turns_of(DrawnOrder(str(seed), (3, call)), passing)
        text = str(caught.value)
        assert f"ended at its call {call}, " in text.split("; ")[0]
        assert text.startswith("no rank can go on: rank 3 (F, stage 1, micro-batch ")
        assert " waits for " in text


def test_an_end_that_nobody_waits_for_is_an_error_too() -> None:
    def last_wait(network: Threads) -> None:
        mesh = mesh_of(network)
        mesh.world.all_reduce(torch.zeros(1))

    with pytest.raises(Died, match="rank 2 ended at its call 2, a wait for all_reduce 0 of world"):
        turns_of(DrawnOrder("0", (2, 2)), last_wait)
