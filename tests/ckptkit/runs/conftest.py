"""A run on every kind of storage."""

import uuid
from pathlib import Path

import pytest

from threefold.storage import Storage, open_storage


@pytest.fixture(params=["local", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a run that is empty."""
    if request.param == "s3":
        return request.getfixturevalue("s3_url")
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def storage(url: str) -> Storage:
    """The storage of a run that is empty."""
    return open_storage(url)
