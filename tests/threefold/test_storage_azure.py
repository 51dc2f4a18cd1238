"""Azure against Azurite, its maker's emulator: `npm install azurite`, found on PATH or through AZURITE_BLOB."""

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from threefold.errors import StorageError, UserError
from threefold.storage import Storage, open_storage
from threefold.storage.conformance import StorageConformance

ACCOUNT = "devstoreaccount1"
# Azurite's published one, the same everywhere
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of a fresh Azurite with the container `box`."""
    program = os.environ.get("AZURITE_BLOB") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite is not installed; run: npm install -g azurite")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("azurite")
    process = subprocess.Popen(
        [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent",
         "--skipApiVersionCheck"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        make_container(endpoint)
        yield endpoint
    finally:
        process.terminate()
        process.wait(timeout=20)


def make_container(endpoint: str) -> None:
    """Create `box`, once the server answers; obstore has no call for that, so it is a signed request by hand."""
    deadline = time.monotonic() + 30
    while True:
        date = formatdate(usegmt=True)
        headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06"
        text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\n{headers}\n/{ACCOUNT}/{ACCOUNT}/box\nrestype:container"
        digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
        request = urllib.request.Request(f"{endpoint}/box?restype=container", method="PUT", data=b"")
        for name, value in (line.split(":", 1) for line in headers.split("\n")):
            request.add_header(name, value)
        request.add_header("Authorization", f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}")
        request.add_header("Content-Type", "")
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < deadline, "Azurite does not answer"
            time.sleep(0.1)


@pytest.fixture
def account(azurite: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL below `box`, whose account stands in the environment."""
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azurite)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    return f"az://box/{uuid.uuid4().hex}"


class TestAzure(StorageConformance):
    @pytest.fixture
    def storage(self, account: str) -> Storage:
        return open_storage(account)


def test_faults_are_told_in_one_sentence(account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="bucket 'other' does not exist on http://") as caught:
        open_storage("az://other/run").write("key", b"")
    assert caught.value.hint == "az storage container create --name other"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY.replace("Eby8", "Eby9"))
    with pytest.raises(StorageError, match=f"refused account '{ACCOUNT}'"):
        open_storage(account).write("key", b"")


@pytest.mark.parametrize("url", ["az://box/run", "abfs://box@myaccount.dfs.core.windows.net/run"])
def test_urls_name_container_and_account(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ENDPOINT", raising=False)
    if "@" not in url:
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
        with pytest.raises(UserError, match=r"cannot open az://box/run: .*Account must be specified"):
            open_storage(url)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    assert open_storage(url).url == url
