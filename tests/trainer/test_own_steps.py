"""What a node's ranks say of places that they cannot reach, once."""

from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.saving.tiers import Node, parse_tiers
from threefold.errors import StorageError
from trainer import own_steps
from trainer.config import Config
from trainer.own_steps import OwnSteps


class OneRank:
    """A rank of a job whose other ranks find the same as it does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def together(self, action: Callable[[], Any]) -> Any:
        return action()

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_a_replica_that_cannot_be_reached_is_told_once_a_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def committed_steps(storage: Any) -> list[int]:
        if "peer" in storage.url:
            raise StorageError("no answer from the peer")
        return []

    monkeypatch.setattr(own_steps, "committed_steps", committed_steps)
    monkeypatch.setattr(own_steps, "find_node", lambda ranks, config: Node("n1", "n0", 2, 2, 4))
    tiers = parse_tiers(["/nvme/{node},replica=/peer/{peer}/{node}"])
    for rank in (2, 3):
        assert OwnSteps(OneRank(rank), Config(), tiers).steps == {}  # type: ignore[arg-type]
    assert capsys.readouterr().err == "warning: the replica is left out: no answer from the peer\n"
