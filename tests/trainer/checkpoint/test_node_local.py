"""What a node's ranks say of places that they cannot reach, and what several nodes hold in common."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit import Alone, Node, Run, parse_tiers
from threefold.errors import StorageError
from trainer.checkpoint.node_local import NodeLocalSteps, agreed_steps
from trainer.config import Config, ParallelConfig
from trainer.config.resolve import layout_of


class OneRank:
    """A rank of a job whose other ranks find the same as it does."""

    def __init__(self, rank: int) -> None:
        self.rank, self.exchange = rank, Alone()

    def on_all(self, action: Callable[[], Any]) -> Any:
        return action()

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_a_replica_that_cannot_be_reached_is_told_once_a_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps_of(run: Run) -> Iterator[int]:
        if "peer" in run.url:
            raise StorageError("no answer from the peer")
        return iter([])

    monkeypatch.setattr(Run, "newest_first", steps_of)
    tiers = replace(parse_tiers(["/nvme/{node},replica=/peer/{peer}/{node}"]), node=Node("n1", "n0", 2, 2, 4))
    for rank in (2, 3):
        assert NodeLocalSteps(OneRank(rank), Config(), tiers).steps == {}  # type: ignore[arg-type]
    assert capsys.readouterr().err == "warning: the replica is left out: no answer from the peer\n"


@pytest.mark.parametrize(
    ("saved", "counts"),
    [
        ({"pipeline_layout": "7,5"}, True),
        ({"pipeline_layout": "9,3"}, False),
        ({}, False),
        ({"pipeline_layout": "7,5", "bucket_mib": 16}, False),
        ({"pipeline_layout": "7,5", "dp_shard": 1, "zero_whole_kib": 0}, False),
        ({"pipeline_layout": "7,5", "dp_shard": 0, "zero_whole_kib": 0}, True),
    ],
)
def test_a_step_that_other_ranks_own_does_not_count(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], counts: bool
) -> None:
    """A rank would look for layers, or for parts of buckets, that another node has."""
    config = replace(Config(), parallel=ParallelConfig(pp=2, dp=2, pipeline_layout="7,5"))
    root = SimpleNamespace(
        share=SimpleNamespace(first=2, count=2, of=4), layout=layout_of(config), attempt="a",
        metadata={"config": {"parallel": saved}},
    )  # fmt: skip
    monkeypatch.setattr(Run, "newest_first", lambda run: iter([3]))
    monkeypatch.setattr(Run, "root", lambda run, step: root)
    tiers = replace(parse_tiers(["/nvme/{node}"]), node=Node("n1", "n0", 2, 2, 4))
    assert NodeLocalSteps(OneRank(2), config, tiers).steps == ({3: "a"} if counts else {})  # type: ignore[arg-type]


@given(held_steps=st.lists(st.dictionaries(st.integers(0, 5), st.sampled_from("ab")), min_size=1, max_size=4))
def test_nodes_agree_on_what_all_hold_of_one_attempt(held_steps: list[dict[int, str]]) -> None:
    agreed = agreed_steps(held_steps)
    assert list(agreed) == sorted(agreed, reverse=True)
    for step in range(6):
        attempts = {steps.get(step) for steps in held_steps}
        assert agreed.get(step) == (attempts.pop() if len(attempts) == 1 else None)
