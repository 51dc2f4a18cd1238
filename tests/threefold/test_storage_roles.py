"""Assumed roles and SSO by botocore's own code, with a server that answers for STS and SSO, down to what is stored."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.threefold.test_storage_credentials import SECTION
from tools.s3_server import ACCESS_KEY, SECRET_KEY

ROOT = Path(__file__).parents[2]
ROLE = "arn:aws:iam::123456789012:role/cluster"
START = "https://corp.awsapps.com/start"
PROGRAM = """
import sys
import time
from threefold.errors import UserError
from threefold.storage import open_storage
try:
    for number in range(3):
        storage = open_storage(sys.argv[1]) if number < 2 else storage
        storage.write(f"key{number}", b"content")
        time.sleep(0.3)  # the client asks for others at most ten times a second
    print(storage.read("key0").decode())
except UserError as error:
    sys.exit(str(error))
"""
ANSWER = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>
<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey><SessionToken></SessionToken>
<Expiration>{expires}</Expiration></Credentials><AssumedRoleUser><Arn>{role}</Arn><AssumedRoleId>A:b</AssumedRoleId>
</AssumedRoleUser></AssumeRoleResult></AssumeRoleResponse>"""


class Aws(ThreadingHTTPServer):
    """STS and SSO in one: what was asked of it, and how long what it hands out is good."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.good_for = timedelta(hours=1)


class Handler(BaseHTTPRequestHandler):
    server: Aws

    def do_POST(self) -> None:  # STS
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.server.asked.append(f"{form['Action'][0]} {form['RoleArn'][0]}")
        if f"Credential={ACCESS_KEY}/" not in self.headers["Authorization"]:  # the source profile signs
            self.answer(403, "<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>", "text/xml")
            return
        expires = (datetime.now(UTC) + self.server.good_for).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.answer(200, ANSWER.format(key=ACCESS_KEY, secret=SECRET_KEY, expires=expires, role=ROLE), "text/xml")

    def do_GET(self) -> None:  # SSO
        query = parse_qs(urlsplit(self.path).query)
        self.server.asked.append(f"{urlsplit(self.path).path} {query['role_name'][0]} {query['account_id'][0]}")
        if self.headers["x-amz-sso_bearer_token"] != "bearer":
            self.answer(401, json.dumps({"message": "Session token not found or invalid"}), "application/json")
            return
        expires = int((datetime.now(UTC) + self.server.good_for).timestamp() * 1000)
        keys = {"accessKeyId": ACCESS_KEY, "secretAccessKey": SECRET_KEY, "sessionToken": "", "expiration": expires}
        self.answer(200, json.dumps({"roleCredentials": keys}), "application/json")

    def answer(self, status: int, text: str, kind: str) -> None:
        self.send_response(status)
        if status != 200:
            self.send_header("x-amzn-ErrorType", "UnauthorizedException")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def aws() -> Iterator[Aws]:
    with Aws() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run_with(aws: Aws, home: Path, url: str, profile: str) -> "subprocess.CompletedProcess[str]":
    """Write and read at a URL as a profile of the files in a HOME, in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    here = f"http://127.0.0.1:{aws.server_address[1]}"
    environment = kept | {
        "HOME": str(home), "AWS_PROFILE": profile, "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": os.environ["AWS_ENDPOINT_URL"], "AWS_ENDPOINT_URL_STS": here,
        "AWS_ENDPOINT_URL_SSO": here, "AWS_MAX_ATTEMPTS": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, url], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120,
        check=False,
    )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws" / "sso" / "cache").mkdir(parents=True)
    (tmp_path / ".aws" / "credentials").write_text(SECTION.format(name="base", key=ACCESS_KEY, secret=SECRET_KEY))
    role = f"[profile cluster]\nrole_arn = {ROLE}\nsource_profile = base\n"
    account = "sso_account_id = 123456789012\nsso_role_name = train\n"
    session = f"[sso-session corp]\nsso_region = eu-test-1\nsso_start_url = {START}\n"
    (tmp_path / ".aws" / "config").write_text(
        f"{role}{session}[profile session]\nsso_session = corp\n{account}"
        f"[profile legacy]\nsso_region = eu-test-1\nsso_start_url = {START}\n{account}"
        f"[profile chain]\nrole_arn = {ROLE}/2\nsource_profile = cluster\n"
    )
    return tmp_path


def write_token(home: Path, profile: str, good_for: timedelta, token: str = "bearer") -> None:
    """What `aws sso login` leaves."""
    name = hashlib.sha1((START if profile == "legacy" else "corp").encode()).hexdigest()
    expires = (datetime.now(UTC) + good_for).strftime("%Y-%m-%dT%H:%M:%SZ")
    content = {"accessToken": token, "expiresAt": expires, "startUrl": START, "region": "eu-test-1"}
    (home / ".aws" / "sso" / "cache" / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("profile", "roles"), [("cluster", [ROLE]), ("chain", [ROLE, f"{ROLE}/2"])])
def test_a_role_is_assumed_with_the_keys_of_another_profile(
    aws: Aws, home: Path, s3_url: str, profile: str, roles: list[str]
) -> None:
    done = run_with(aws, home, s3_url, profile)
    assert (done.returncode, done.stdout) == (0, "content\n"), done.stderr
    assert aws.asked[: len(roles)] == [f"AssumeRole {role}" for role in roles]


def test_a_role_whose_credentials_are_about_to_expire_is_assumed_again(aws: Aws, home: Path, s3_url: str) -> None:
    aws.good_for = timedelta(minutes=4)  # the client asks again if less than five are left, botocore renews below ten
    done = run_with(aws, home, s3_url, "cluster")
    assert (done.returncode, done.stdout) == (0, "content\n"), done.stderr
    assert len(aws.asked) > 2


@pytest.mark.parametrize("profile", ["session", "legacy"])
def test_sso_hands_out_keys_for_the_token_of_a_login(aws: Aws, home: Path, s3_url: str, profile: str) -> None:
    write_token(home, profile, timedelta(hours=8))
    done = run_with(aws, home, s3_url, profile)
    assert (done.returncode, done.stdout) == (0, "content\n"), done.stderr
    assert set(aws.asked) == {"/federation/credentials train 123456789012"}


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("profile", ["session", "legacy"])
@pytest.mark.parametrize("login", ["none", "expired", "revoked"])
def test_a_login_that_does_not_hold_is_one_sentence_with_the_command(
    aws: Aws, home: Path, s3_url: str, profile: str, login: str
) -> None:
    if login != "none":
        write_token(home, profile, timedelta(hours=-1 if login == "expired" else 8), "old")
    done = run_with(aws, home, s3_url, profile)
    assert done.returncode == 1
    error, hint = done.stderr.strip().splitlines()
    assert error.startswith("cannot ")
    assert f"{profile!r}" in error
    assert "SSO" in error or "Token" in error
    assert hint.startswith(f"hint: aws sso login --profile {profile}")
