"""Which node a rank is on: what torchrun says, what the program says, and what does not fit together."""

import pytest

from ckptkit import Alone, Node, nodes_here
from ckptkit.tiers.node_places import _fitting
from tests.ckptkit.support.thread_exchange import ThreadExchange
from threefold.errors import UserError


def test_a_process_alone_is_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")  # of a program that lets its processes save by themselves
    monkeypatch.setenv("THREEFOLD_NODE", "n7")
    assert nodes_here(Alone()) == [Node("n7", "n7", 0, 1, 1)]


@pytest.mark.parametrize("number", ["", "x", "3"])
def test_without_torchrun_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", number)
    with pytest.raises(UserError, match=r"rank \d of 2 does not know which ranks its node has: LOCAL_RANK=") as refused:
        ThreadExchange(2).run(nodes_here)
    assert "torchrun" in str(refused.value.hint)


def test_what_the_program_says_is_compared() -> None:
    said = [Node("a", "b", 0, 2, 3), Node("a", "b", 0, 2, 3), Node("b", "a", 2, 1, 3)]
    assert ThreadExchange(3).run(lambda exchange: nodes_here(exchange, said[exchange.rank])) == [said] * 3
    wrong = [Node("a", "a", 0, 2, 3)] * 3
    with pytest.raises(UserError, match="by what all ranks say it is on"):
        ThreadExchange(3).run(lambda exchange: nodes_here(exchange, wrong[exchange.rank]))


def test_ranks_of_a_node_follow_each_other() -> None:
    said = [("a", 0), ("b", 1), ("a", 1)]  # what ranks numbered in turns would say
    with pytest.raises(UserError, match="rank 2 is on node a, among the ranks of b"):
        _fitting(said, ThreadExchange(3).of(2), None)


def test_two_nodes_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # on each of two nodes of one rank
    monkeypatch.setenv("THREEFOLD_NODE", "same")
    with pytest.raises(UserError, match="2 nodes have the name same"):
        ThreadExchange(2).run(nodes_here)
