"""S3 under real faults: refused, reset, cut, stalled and delayed answers, and every way of being set up wrongly."""

import re
from collections.abc import Callable

import pytest

from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, Storage, open_storage
from tools.fault_proxy import Fault, FaultProxy
from tools.s3_server import READ_ONLY_KEY, READ_ONLY_SECRET

LARGE = b"x" * (9 << 20)


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


@pytest.mark.parametrize("kind", ["503", "reset", "stall"])
def test_lasting_faults_are_errors_and_no_hangs(
    s3_proxy: FaultProxy, s3_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "1")
    storage = open_storage(s3_url)
    s3_proxy.fault = Fault(kind)
    for name in ("write", "write if absent", "read", "list"):
        with pytest.raises(StorageError, match="answered 503" if kind == "503" else "no answer from http://127.0.0.1"):
            operations(storage)[name]()
    s3_proxy.fault = Fault()
    storage.write("key", b"after")
    assert storage.read("key") == b"after"


def test_a_large_write_that_fails_is_never_listed(s3_proxy: FaultProxy, s3_url: str) -> None:
    storage = open_storage(s3_url)
    s3_proxy.fault = Fault("503", method="PUT", skip=1)
    with pytest.raises(StorageError, match="503"):
        storage.write("key", iter([LARGE] * 6))
    s3_proxy.fault = Fault()
    assert list(storage.list()) == []


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


@pytest.mark.parametrize("name", operations(None))  # type: ignore[arg-type]  # the names alone
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
