"""What a node's ranks say of places that they cannot reach, and damaged steps that are set aside."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.runs.catalogue import committed_steps
from ckptkit.tiers.tier import Node, parse_tiers
from tests.ckptkit.support.saves import SMALL, save_whole
from threefold.errors import StorageError
from threefold.storage import open_storage
from threefold.storage.local import LocalStorage, local_failure
from trainer import own_steps
from trainer.config import Config
from trainer.own_steps import OwnSteps, set_aside


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
    def steps_of(storage: Any) -> Iterator[int]:
        if "peer" in storage.url:
            raise StorageError("no answer from the peer")
        return iter([])

    monkeypatch.setattr(own_steps, "newest_first", steps_of)
    monkeypatch.setattr(own_steps, "find_node", lambda ranks, config: Node("n1", "n0", 2, 2, 4))
    tiers = parse_tiers(["/nvme/{node},replica=/peer/{peer}/{node}"])
    for rank in (2, 3):
        assert OwnSteps(OneRank(rank), Config(), tiers).steps == {}  # type: ignore[arg-type]
    assert capsys.readouterr().err == "warning: the replica is left out: no answer from the peer\n"


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_root_that_a_disk_does_not_give_back_is_set_aside_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def copy(self: LocalStorage, source: str, target: str) -> None:
        error = OSError(code, "as the disk says")
        raise local_failure(error, "read", source) from error

    assert save_whole(tmp_path, 1, SMALL).ok
    monkeypatch.setattr(LocalStorage, "copy", copy)
    if code == errno.EIO:
        set_aside([(str(tmp_path), 1)])
        assert (tmp_path / "step-000000001/damaged-root.json").read_bytes() == b""
        assert committed_steps(open_storage(tmp_path)) == []
    else:
        with pytest.raises(StorageError, match="as the disk says"):
            set_aside([(str(tmp_path), 1)])
        assert committed_steps(open_storage(tmp_path)) == [1]
