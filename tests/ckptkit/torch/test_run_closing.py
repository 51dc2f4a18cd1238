"""What a Run of ckptkit.torch lets go of: the group of its ranks, and optimizers that are gone."""

import gc
from pathlib import Path

import pytest
import torch

from ckptkit.saving.checkpointer import Checkpointer
from ckptkit.torch import GroupExchange, Run
from threefold.errors import StorageError


def test_an_error_of_closing_closes_the_group_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Group(GroupExchange):
        """One rank, and whether its group is open."""

        rank, size, is_open = 0, 1, True

        def __init__(self) -> None: ...

        def all_gather(self, data: bytes) -> list[bytes]:
            return [data]

        def close(self) -> None:
            self.is_open = False

    def fail(*arguments: object, **options: object) -> None:
        raise StorageError("the writer takes no order")

    group = Group()
    run = Run(tmp_path, exchange=group)
    run.save(1, {"weight": torch.ones(2)})
    run.wait()
    close = Checkpointer.close
    monkeypatch.setattr(Checkpointer, "close", fail)
    checkpointer = run._checkpointer
    with pytest.raises(StorageError, match="takes no order"):
        run.close()
    assert not group.is_open
    close(checkpointer)


@pytest.mark.slow
@pytest.mark.ci
def test_an_optimizer_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    """Another one may be made where it was, and has to wait for the copies too."""
    with Run(tmp_path) as run:
        for step in range(1, 4):
            parameter = torch.nn.Parameter(torch.zeros(4))
            optimizer = torch.optim.SGD([parameter], lr=1.0)
            run.save(step, {"weight": parameter, "optimizer": optimizer}, overlap=True)
            run.wait()
            assert len(optimizer._optimizer_step_pre_hooks) == 1
            del parameter, optimizer
            gc.collect()
            assert not run._hooks
