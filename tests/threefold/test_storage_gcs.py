"""Google Cloud Storage, as far as requests to a stand-in for its XML API can tell."""

from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from tests.threefold.support.fake_gcs import Bucket, fake_gcs
from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, Storage, open_storage
from threefold.storage.conformance import StorageConformance


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with fake_gcs("a-bucket") as (url, bucket):
        monkeypatch.setenv("GOOGLE_BASE_URL", url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a-token")
        yield bucket


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.usefixtures("bucket")
class TestGcs(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return open_storage("gs://a-bucket/run")


def test_an_if_absent_write_asks_for_no_generation(bucket: Bucket) -> None:
    storage = open_storage("gcs://a-bucket/run")
    storage.write("root", b"1", if_absent=True)
    [(method, path, headers)] = bucket.requests
    assert (method, unquote(path)) == ("PUT", "/a-bucket/run/root")
    assert headers["x-goog-if-generation-match"] == "0"
    with pytest.raises(AlreadyExists):
        storage.write("root", b"2", if_absent=True)
    assert bucket.objects == {"run/root": b"1"}


def test_a_failed_upload_is_taken_back(bucket: Bucket) -> None:
    def source() -> Iterator[bytes]:
        yield from [bytes(1 << 20)] * 20
        raise RuntimeError("the source is broken")

    with pytest.raises(RuntimeError):
        open_storage("gs://a-bucket/run").write("key", source())
    assert any("uploads" in path for _, path, _ in bucket.requests)
    assert bucket.uploads == {}


def test_faults_are_told_in_one_sentence(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="bucket 'other' does not exist on http://") as caught:
        open_storage("gs://other/run").write("key", b"")
    assert caught.value.hint == "gcloud storage buckets create gs://other"
    with pytest.raises(UserError, match="'gs:///run' names no bucket"):
        open_storage("gs:///run")
    monkeypatch.setenv("GOOGLE_BASE_URL", "localhost:80")
    with pytest.raises(UserError, match="GOOGLE_BASE_URL is 'localhost:80', no URL"):
        open_storage("gs://a-bucket/run")
