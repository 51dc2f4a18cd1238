"""S3 under real faults: refused, reset, cut, stalled and delayed answers, and every way of being set up wrongly."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, Storage, open_storage
from threefold.storage.object_store import MAX_PARTS_IN_FLIGHT, MIN_PART_BYTES, PART_BYTES, part_plan
from threefold.storage.repeating import RepeatingStorage
from threefold.storage.stale_uploads import abort_stale_uploads
from tools.fault_proxy import Fault, FaultProxy
from tools.s3_server import READ_ONLY_KEY, READ_ONLY_SECRET

LARGE = b"x" * (9 << 20)
PART = MIN_PART_BYTES


def operations(storage: Storage) -> dict[str, Callable[[], object]]:
    """Each operation that reaches the server."""
    return {
        "write": lambda: storage.write("key", b"x"),
        "write if absent": lambda: storage.write("key", b"x", if_absent=True),
        "write large": lambda: storage.write("key", iter([LARGE] * 3)),
        "read": lambda: storage.read("key"),
        "read ranges": lambda: storage.read_ranges("key", [(0, 1)]),
        "list": lambda: storage.list(),
        "list folders": lambda: storage.list_folders(),
        "delete": lambda: storage.delete(["key"]),
    }


@pytest.fixture(autouse=True)
def _quick_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "2")


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["503", "reset", "cut"])
def test_passing_faults_are_survived(s3_proxy: FaultProxy, s3_url: str, kind: str) -> None:
    storage = open_storage(s3_url)
    for name, operation in operations(storage).items():
        s3_proxy.fault = Fault(kind, times=1)
        operation()
        assert s3_proxy.num_faults > 0, name
        s3_proxy.num_faults = 0


@pytest.mark.parametrize("kind", ["reset", "cut"])
def test_a_body_that_breaks_off_is_read_to_its_end(s3_proxy: FaultProxy, s3_url: str, kind: str) -> None:
    storage = open_storage(s3_url)
    content = bytes(range(256)) * 40_000
    storage.write("key", content)
    s3_proxy.fault = Fault(kind, method="GET", times=1, after_bytes=1_000_000)
    assert storage.read("key") == content
    s3_proxy.fault = Fault(kind, method="GET", times=1, after_bytes=1_000_000)
    assert storage.read_ranges("key", [(10, 9_000_000)]) == [content[10:9_000_000]]
    assert s3_proxy.num_faults == 2


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["503", "reset", "stall"])
def test_lasting_faults_are_errors_and_no_hangs(
    s3_proxy: FaultProxy, s3_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "0.3")
    storage = open_storage(s3_url)
    s3_proxy.fault = Fault(kind)
    for name in ("write", "write if absent", "read", "list"):
        with pytest.raises(StorageError, match="answered 503" if kind == "503" else "no answer from http://127.0.0.1"):
            operations(storage)[name]()
    s3_proxy.fault = Fault()
    patient = RepeatingStorage(storage)
    patient.write("key", b"after")
    assert patient.read("key") == b"after"


@pytest.mark.ci
@pytest.mark.slow
def test_a_large_write_that_fails_is_never_listed(s3_proxy: FaultProxy, s3_url: str) -> None:
    storage = open_storage(s3_url)
    s3_proxy.fault = Fault("503", method="PUT", skip=1)
    with pytest.raises(StorageError, match="503"):
        storage.write("key", iter([LARGE] * 6))
    s3_proxy.fault = Fault()
    assert list(storage.list()) == []


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["503", "reset", "cut", pytest.param("stall", marks=pytest.mark.slow)])
def test_of_a_large_write_only_the_parts_that_failed_are_sent_again(
    s3_proxy: FaultProxy, s3_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "true")
    storage = open_storage(s3_url, write_memory_bytes=3 * PART)
    s3_proxy.fault = Fault(kind, method="PUT", skip=2, times=2)
    storage.write("key", iter([LARGE[:PART]] * 12))
    assert s3_proxy.num_faults == 2
    assert s3_proxy.bytes_in <= 1.3 * 12 * PART
    info = storage.info("key")
    assert info is not None
    assert info.size_bytes == 12 * PART


@pytest.mark.parametrize("source", ["source", "server"])
def test_an_upload_that_fails_is_taken_back(s3_proxy: FaultProxy, s3_url: str, source: str) -> None:
    def buffers() -> Iterator[bytes]:
        yield from [LARGE] * 5
        if source == "source":
            raise RuntimeError("the source is broken")

    if source == "server":
        s3_proxy.fault = Fault("503", method="PUT", skip=1)
    storage = open_storage(s3_url)
    with pytest.raises((RuntimeError, StorageError)):
        storage.write("key", buffers())
    s3_proxy.fault = Fault()
    assert abort_stale_uploads(storage, older_than_s=0) == []


UPLOAD_AND_DIE = """
import os, signal, sys
from threefold.storage import open_storage
def buffers():
    yield from [bytes(9 << 20)] * 5
    os.kill(os.getpid(), signal.SIGKILL)
open_storage(sys.argv[1]).write("step/key", buffers())
"""


@pytest.mark.ci
@pytest.mark.slow
def test_what_a_killed_upload_left_is_found_and_aborted(s3_url: str) -> None:
    for url in (f"{s3_url}/run", f"{s3_url}/run-2"):
        died = subprocess.run([sys.executable, "-c", UPLOAD_AND_DIE, url], check=False, timeout=60)
        assert died.returncode == -signal.SIGKILL
    storage = RepeatingStorage(open_storage(f"{s3_url}/run"))
    assert abort_stale_uploads(storage, "other/", older_than_s=0) == []
    assert abort_stale_uploads(storage) == []  # too young
    assert abort_stale_uploads(storage, older_than_s=0) == ["step/key"]
    assert abort_stale_uploads(storage, older_than_s=0) == []
    assert abort_stale_uploads(open_storage(s3_url), "run-2/", older_than_s=0) == ["run-2/step/key"]


def test_uploads_that_cannot_be_listed_are_an_error(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="cannot abort unfinished uploads of s3://"):
        abort_stale_uploads(open_storage(s3_url))


def test_other_storages_have_no_stale_uploads(tmp_path: Path) -> None:
    assert abort_stale_uploads(open_storage(tmp_path), older_than_s=0) == []


@given(size_bytes=st.none() | st.integers(0, 5 << 40), memory_bytes=st.none() | st.integers(0, 1 << 34))
def test_parts_suffice_for_the_object_and_fit_the_memory(size_bytes: int | None, memory_bytes: int | None) -> None:
    part_bytes, in_flight = part_plan(size_bytes, memory_bytes)
    assert MIN_PART_BYTES <= part_bytes <= 5 << 30
    assert 1 <= in_flight <= MAX_PARTS_IN_FLIGHT
    if size_bytes is not None:
        assert -(-size_bytes // part_bytes) <= 10_000
    if memory_bytes is not None and memory_bytes >= 3 * part_bytes:
        assert (in_flight + 2) * part_bytes <= memory_bytes
    if not size_bytes and memory_bytes is None:
        assert part_bytes == PART_BYTES


@pytest.mark.parametrize("times", [1, None])
def test_a_lost_acknowledgement_of_an_if_absent_write_is_read_back(
    s3_proxy: FaultProxy, s3_url: str, times: int | None
) -> None:
    storage = open_storage(s3_url)
    s3_proxy.fault = Fault("reset", method="PUT", times=times)
    storage.write("root", b"ours", if_absent=True)
    assert s3_proxy.num_faults >= 1
    assert storage.read("root") == b"ours"
    with pytest.raises(AlreadyExists):
        open_storage(s3_url).write("root", b"another", if_absent=True)


def test_a_slow_server_is_waited_for(s3_proxy: FaultProxy, s3_url: str) -> None:
    storage = open_storage(s3_url)
    s3_proxy.fault = Fault("delay", delay_s=0.5)
    storage.write("key", b"x")
    assert storage.read("key") == b"x"


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("write", "read", "list") else pytest.param(name, marks=pytest.mark.slow)
        for name in operations(None)  # type: ignore[arg-type]  # the names alone
    ],
)
def test_a_missing_bucket_is_named(s3_url: str, name: str) -> None:
    storage = open_storage("s3://no-such-bucket/run")
    with pytest.raises(StorageError, match="bucket 'no-such-bucket' does not exist on http://") as caught:
        operations(storage)[name]()
    assert caught.value.hint is not None
    assert re.match(r"aws s3 mb s3://no-such-bucket --endpoint-url http", caught.value.hint)


@pytest.mark.parametrize("name", operations(None))  # type: ignore[arg-type]  # the names alone
@pytest.mark.parametrize(("key", "secret"), [("testkey", "wrong"), ("wrong", "testsecret")])
def test_wrong_credentials_are_told(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, name: str, key: str, secret: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(StorageError, match=f"refused access key '{key}'") as caught:
        operations(open_storage(s3_url))[name]()
    assert caught.value.hint is not None
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.hint
    assert secret not in str(caught.value)


def test_rights_to_read_alone_do_not_write(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_storage(s3_url).write("key", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READ_ONLY_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READ_ONLY_SECRET)
    storage = open_storage(s3_url)
    assert storage.read("key") == b"x"
    for name in ("write", "write if absent", "delete"):
        with pytest.raises(StorageError, match="refused access key 'rokey'"):
            operations(storage)[name]()


@pytest.mark.parametrize("name", operations(None))  # type: ignore[arg-type]  # the names alone
def test_a_dead_server_is_told(s3_url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"no answer from http://127\.0\.0\.1:9") as caught:
        operations(open_storage(s3_url))[name]()
    assert caught.value.hint == "check AWS_ENDPOINT_URL"


def test_settings_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "many")
    with pytest.raises(ValueError, match="AWS_MAX_ATTEMPTS='many' is not a number"):
        open_storage("s3://bucket/run")


def test_a_url_is_a_key_to_its_last_character(s3_url: str) -> None:
    prefixes = [f"{s3_url}/run{end}" for end in ("#1", "#2", "?a=1", "%20", " é")]
    for prefix in prefixes:
        open_storage(prefix).write("k", prefix.encode())
    assert [open_storage(prefix).read("k") for prefix in prefixes] == [prefix.encode() for prefix in prefixes]


@pytest.mark.parametrize("path", ["/b", "a//b", "a/./b", "a/../b"])
def test_parts_that_no_key_has_are_refused(path: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"'s3://bucket/{path}' has an empty part")) as caught:
        open_storage(f"s3://bucket/{path}")
    assert caught.value.hint in ("s3://bucket/b", "s3://bucket/a/b")


@pytest.mark.parametrize("endpoint", ["nonsense", "localhost:9000", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UserError, match=f"AWS_ENDPOINT_URL is '{endpoint}', no URL"):
        open_storage("s3://bucket/run")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("THREEFOLD_STORAGE_TIMEOUT_S", "abc", "is not a number"),
        ("THREEFOLD_STORAGE_TIMEOUT_S", "-1", "is not from 0.001 to 1,000,000"),
        ("THREEFOLD_STORAGE_TIMEOUT_S", "nan", "is not from 0.001"),
        ("THREEFOLD_STORAGE_TIMEOUT_S", "inf", "is not from 0.001"),
        ("AWS_MAX_ATTEMPTS", "0", "is not from 1 to"),
        ("AWS_MAX_ATTEMPTS", "9" * 20, "is not from 1 to"),
        ("AWS_ACCESS_KEY_ID", "a key without its secret", "(?i)cannot open s3://bucket/run: .*secret"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=message) as caught:
        open_storage("s3://bucket/run")
    assert caught.value.hint
