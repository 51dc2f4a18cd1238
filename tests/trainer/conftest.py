"""Fixtures of the trainer's tests."""

from pathlib import Path

import pytest
import torch

from tests.trainer.support.training import write_config, write_stores


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
