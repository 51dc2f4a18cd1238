"""Credentials of files, profiles and programs; servers that refuse once; what is said if they have expired."""

import stat
import sys
from pathlib import Path

import pytest

from threefold.errors import StorageError, UserError
from threefold.storage import open_storage
from threefold.storage.aws_credentials import AwsCredentials
from threefold.storage.service import open_service
from tools.s3_server import ACCESS_KEY, READ_ONLY_KEY, READ_ONLY_SECRET, SECRET_KEY

VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE")
SECTION = "[{name}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"


@pytest.fixture
def home(tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A HOME without keys in the environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    return tmp_path


def write_credentials(home: Path, name: str, key: str, secret: str) -> None:
    (home / ".aws" / "credentials").write_text(SECTION.format(name=name, key=key, secret=secret))


def write_process(home: Path, answers: list[dict[str, object]]) -> None:
    """Make a profile whose program prints one answer after the other, the last one from then on."""
    program = home / "credentials"
    program.write_text(
        f"#!{sys.executable}\nimport json, pathlib\ncount = pathlib.Path({str(home / 'count')!r})\n"
        f"number = int(count.read_text()) if count.exists() else 0\ncount.write_text(str(number + 1))\n"
        f"answers = {answers!r}\nprint(json.dumps(answers[min(number, len(answers) - 1)]))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (home / ".aws" / "config").write_text(f"[profile made]\ncredential_process = {program}\nregion = eu-test-1\n")


def answer(key: str, secret: str, expires: str = "2036-01-01T00:00:00Z") -> dict[str, object]:
    return {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, "Expiration": expires}


def test_the_file_of_credentials_is_read(home: Path, s3_url: str) -> None:
    write_credentials(home, "default", ACCESS_KEY, SECRET_KEY)
    storage = open_storage(s3_url)
    storage.write("key", b"content")
    storage.write("once", b"content", if_absent=True)
    assert [item.key for item in storage.list()] == ["key", "once"]
    storage.delete(["key"])


def test_a_profile_is_read(home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_credentials(home, "mine", ACCESS_KEY, SECRET_KEY)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    open_storage(s3_url).write("key", b"content")
    assert open_storage(s3_url).read("key") == b"content"


def test_a_program_prints_credentials(home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_process(home, [answer(ACCESS_KEY, SECRET_KEY)])
    monkeypatch.setenv("AWS_PROFILE", "made")
    open_storage(s3_url).write("key", b"content")
    assert (home / "count").read_text() == "1"
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    credentials = open_service(s3_url).credentials
    assert credentials is not None
    assert credentials.region == "eu-test-1"


@pytest.mark.parametrize("verb", ["read", "write", "once", "delete", "list"])
def test_a_refusal_is_tried_once_more_with_fresh_credentials(
    home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    write_credentials(home, "default", ACCESS_KEY, SECRET_KEY)
    open_storage(s3_url).write("key", b"content")
    write_credentials(home, "default", "former", "former")
    storage = open_storage(s3_url)
    with pytest.raises(StorageError, match="refused the profile 'default'"):
        storage.read("key")
    write_credentials(home, "default", ACCESS_KEY, SECRET_KEY)
    work = {
        "read": lambda: storage.read("key"),
        "write": lambda: storage.write("key", b"new"),
        "once": lambda: storage.write("new", b"new", if_absent=True),
        "delete": lambda: storage.delete(["key"]),
        "list": lambda: list(storage.list()),
    }
    work[verb]()


def test_a_right_that_is_lacking_stays_one_error(home: Path, s3_url: str) -> None:
    write_credentials(home, "default", READ_ONLY_KEY, READ_ONLY_SECRET)
    with pytest.raises(StorageError, match="refused the profile 'default'") as caught:
        open_storage(s3_url).write("key", b"content")
    assert "aws sso login" in str(caught.value.hint)


def test_a_refusal_of_keys_in_a_file_that_is_as_it_was_makes_no_other_session(
    home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_credentials(home, "default", READ_ONLY_KEY, READ_ONLY_SECRET)
    storage, urls, usual = open_storage(s3_url), [], AwsCredentials.find
    monkeypatch.setattr(AwsCredentials, "find", lambda url: (urls.append(url), usual(url))[1])
    for _ in range(3):
        with pytest.raises(StorageError, match="refused the profile 'default'"):
            storage.write("key", b"content")
    assert not urls
    write_credentials(home, "default", ACCESS_KEY, SECRET_KEY)
    storage.write("key", b"content")
    assert len(urls) == 1


def test_keys_that_are_replaced_while_they_are_read_may_be_new(
    home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = pytest.importorskip("botocore.session").Session
    write_credentials(home, "default", "old", "old")
    read = session.get_credentials

    def replacing(self: object) -> object:
        found = read(self)
        write_credentials(home, "default", ACCESS_KEY, SECRET_KEY)
        return found

    monkeypatch.setattr(session, "get_credentials", replacing)
    credentials = AwsCredentials.find(s3_url)
    assert credentials is not None
    assert credentials()["access_key_id"] == "old"
    assert credentials.may_be_new


def test_a_program_that_fails_is_named(home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_process(home, [{"Version": 7}])
    monkeypatch.setenv("AWS_PROFILE", "made")
    with pytest.raises(UserError, match=r"cannot open s3://test: .*custom-process: Unsupported version") as caught:
        open_storage(s3_url)
    assert "--profile made" in str(caught.value.hint)


def test_a_role_that_is_refused_is_named(home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """STS refuses by an error of another kind than botocore's own; the endpoint of the tests knows no roles."""
    write_credentials(home, "default", ACCESS_KEY, SECRET_KEY)
    role = "role_arn = arn:aws:iam::123456789012:role/cluster\nsource_profile = default\nregion = eu-test-1\n"
    (home / ".aws" / "config").write_text(f"[profile cluster]\n{role}")
    monkeypatch.setenv("AWS_PROFILE", "cluster")
    with pytest.raises(StorageError, match=r"the credentials of the profile 'cluster' cannot be had: .*AssumeRole"):
        open_storage(s3_url).read("a")


def test_what_has_expired_is_said(home: Path, s3_url: str) -> None:
    storage = open_storage(s3_url)
    error = ValueError("Client error with status code: 400 Bad Request: <Error><Code>ExpiredToken</Code></Error>")
    assert "have expired" in str(storage._failure(error, "read", "key"))  # type: ignore[attr-defined]


def test_a_profile_that_is_not_there(home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(UserError, match=r"profile \(absent\) could not be found") as caught:
        open_storage(s3_url)
    assert "aws configure --profile absent" in str(caught.value.hint)


def test_keys_of_the_environment_go_before(home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_credentials(home, "default", "wrong", "wrong")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert AwsCredentials.find(s3_url) is None
    open_storage(s3_url).write("key", b"content")


@pytest.mark.parametrize("files", [(), ("config",)])
def test_no_credentials_are_left_to_the_client(
    home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]
) -> None:
    for name in files:
        (home / ".aws" / name).write_text("[default]\nregion = eu-test-1\n")
    assert AwsCredentials.find(s3_url) is None
    write_credentials(home, "default", "wrong", "wrong")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert AwsCredentials.find(s3_url) is None


def test_botocore_that_is_missing_is_one_line(home: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_credentials(home, "default", ACCESS_KEY, SECRET_KEY)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    monkeypatch.setattr("threefold.packages.find_spec", lambda _: None)
    with pytest.raises(UserError, match="botocore") as caught:
        open_storage(s3_url)
    assert '"s3fs>=' in str(caught.value.hint)
