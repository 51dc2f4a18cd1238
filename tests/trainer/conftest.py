"""Fixtures of the trainer's tests."""

from pathlib import Path

import pytest
import torch

from tests.trainer.support.training import write_config, write_stores
from trainer.run.loop import Run
from trainer.store.leases import Lease, Leases


@pytest.fixture(scope="session")
def job_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration file of a tiny job, with its stores beside it."""
    folder = tmp_path_factory.mktemp("job")
    write_stores(folder)
    return write_config(folder)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Two cores serve all tests, and sums depend on the number of threads."""
    torch.set_num_threads(1)


@pytest.fixture
def leases_with_content() -> None:
    """Let memory that was given back keep its content for the next pass of its tenant, as it does outside of tests."""


@pytest.fixture(autouse=True)
def _poisoned_leases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever reads memory that was given back find no numbers there."""
    if "leases_with_content" in request.fixturenames:
        return
    put_by = Leases.put_by

    def give_back(self: Leases, lease: Lease) -> None:
        lease.settle()
        lease.memory.fill_(torch.nan)
        lease.tenant = object()
        put_by(self, lease)

    monkeypatch.setattr(Leases, "give_back", give_back)


@pytest.fixture
def reads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run on a CPU read each step while the next one runs, as one on a GPU does."""
    goes_on = Run.goes_on.fget
    assert goes_on is not None

    def late(run: Run) -> bool:
        run._reads_late = True
        return bool(goes_on(run))

    monkeypatch.setattr(Run, "goes_on", property(late))
