"""Service: the obstore client of S3, Google Cloud Storage or Azure behind a URL, and the words for its errors.

Each is set up by its own standard variables: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and
AWS_MAX_ATTEMPTS, or the files of AWS (see AwsCredentials); GOOGLE_BASE_URL and GOOGLE_APPLICATION_CREDENTIALS;
AZURE_STORAGE_ENDPOINT, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY. What is not named here (session
tokens, roles of machines, ...) obstore reads by itself.
Every request has a deadline, THREEFOLD_STORAGE_TIMEOUT_S (default 60), and is repeated within three times that.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from threefold.errors import UserError
from threefold.masking import shown_cause
from threefold.packages import needed_for
from threefold.storage.aws_credentials import DEFAULT_REGION, AwsCredentials
from threefold.storage.contract import OBJECT_STORES

DEFAULT_ATTEMPTS = 8
DEFAULT_TIMEOUT_S = 60.0
REPEAT_WITHIN_TIMEOUTS = 3
CONNECT_TIMEOUT_S = 5.0
MAX_NUMBER = 1_000_000  # of seconds and of attempts
S3_HINT = "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (and AWS_ENDPOINT_URL=... if it is not AWS)"
GCS_HINT = "export GOOGLE_APPLICATION_CREDENTIALS=KEY.json"
AZURE_HINT = "export AZURE_STORAGE_ACCOUNT_NAME=... AZURE_STORAGE_ACCOUNT_KEY=..."


@dataclass(frozen=True)
class Service:
    """A client for one bucket (Azure: container), with `path` the keys' common prefix in it, without a "/" at its end.

    `exclusive_store` is the client for what may be written once only, `server` is who answers, `identity` whose rights
    count, `address_hint` what to check if nobody answers. `credentials` are those that are not of the environment.
    """

    store: Any
    exclusive_store: Any
    bucket: str
    path: str
    attempts: int
    server: str
    identity: str
    credentials_hint: str
    address_hint: str
    make_bucket_hint: str
    credentials: AwsCredentials | None = None


def open_service(url: str) -> Service:
    """Return the service behind a URL of one of OBJECT_STORES; nothing is contacted yet."""
    with needed_for(url):
        from obstore.exceptions import BaseError
    bucket, path = split_url(url)
    kind = OBJECT_STORES[url.partition("://")[0]]
    make, hint = {"s3": (_s3, S3_HINT), "gcs": (_gcs, GCS_HINT), "azure": (_azure, AZURE_HINT)}[kind]
    if ":" in bucket or ("@" in bucket and kind != "azure"):  # Azure's are CONTAINER@ACCOUNT
        raise UserError(f"{url} holds credentials, which are read from the environment alone", hint=hint)
    try:
        return make(bucket, path)
    except (BaseError, OSError) as error:  # half a pair of keys, a file of credentials that is not there, no account
        raise UserError(f"cannot open {url}: {str(error).partition(chr(10))[0]}", hint=hint) from shown_cause(error)


def split_url(url: str) -> tuple[str, str]:
    """Bucket and path of a URL, by hand: keys may hold what ends the path of other URLs, "?" and "#"."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.rstrip("/").partition("/")
    if not bucket:
        raise UserError(f"{url!r} names no bucket", hint=f"write it like {scheme}://bucket/run")
    kept = [part for part in path.split("/") if part not in ("", ".", "..")]
    if path and path != "/".join(kept):
        raise UserError(
            f"{url!r} has an empty part, a . or a .. in its path, which no key has here",
            hint="/".join([f"{scheme}:/", bucket, *kept]),
        )
    return bucket, path


def request_timeout_s() -> float:
    """Return the deadline of one request."""
    return _number("THREEFOLD_STORAGE_TIMEOUT_S", DEFAULT_TIMEOUT_S, least=0.001)


def s3_endpoint() -> str | None:
    """Return the S3 server that the environment names, None for AWS."""
    return _endpoint("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def s3_region(of_profile: str | None = None) -> str:
    """Return the region that the environment names, or a profile does."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or of_profile or DEFAULT_REGION


def _s3(bucket: str, path: str) -> Service:
    from obstore.store import S3Store

    endpoint = s3_endpoint()
    attempts = int(_number("AWS_MAX_ATTEMPTS", DEFAULT_ATTEMPTS, least=1))
    credentials = AwsCredentials.find(f"s3://{bucket}")
    config: dict[str, Any] = {"region": s3_region(credentials.region if credentials else None)}
    if endpoint:
        config["endpoint"] = endpoint
    if "AWS_UNSIGNED_PAYLOAD" not in os.environ and not (endpoint or "https:").startswith("http:"):
        config["unsigned_payload"] = True  # TLS guards the body already, and hashing it doubles the CPU of a PUT
    at = f" --endpoint-url {endpoint}" if endpoint else ""
    client = _client(endpoint, attempts)
    identity = f"access key {os.environ.get('AWS_ACCESS_KEY_ID', '')!r}"
    if credentials:
        client, identity = {**client, "credential_provider": credentials}, f"the profile {credentials.profile!r}"
    return Service(
        S3Store(bucket, config=config, **client),  # type: ignore[arg-type]
        # with a checksum: SeaweedFS keeps a PUT without one that broke off, as an empty object
        S3Store(bucket, config=config | {"checksum_algorithm": "sha256"}, **client),  # type: ignore[arg-type]
        bucket, path, attempts, endpoint or "AWS", identity,
        credentials.hint if credentials else S3_HINT, "check AWS_ENDPOINT_URL", f"aws s3 mb s3://{bucket}{at}",
        credentials,
    )  # fmt: skip


def _gcs(bucket: str, path: str) -> Service:
    from obstore.store import GCSStore

    endpoint = _endpoint("GOOGLE_BASE_URL")
    config: dict[str, Any] = {"base_url": endpoint} if endpoint else {}
    if token := os.environ.get("GOOGLE_BEARER_TOKEN"):
        config["bearer_token"] = token
    store = GCSStore(bucket, config=config, **_client(endpoint, DEFAULT_ATTEMPTS))  # type: ignore[arg-type]
    return Service(
        store, store, bucket, path, DEFAULT_ATTEMPTS, endpoint or "Google Cloud Storage", "the Google account in use",
        GCS_HINT, "check GOOGLE_BASE_URL",
        f"gcloud storage buckets create gs://{bucket}",
    )  # fmt: skip


def _azure(bucket: str, path: str) -> Service:
    from obstore.store import AzureStore

    endpoint = _endpoint("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    container, _, host = bucket.partition("@")  # abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH
    account = host.partition(".")[0] or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    config = {"endpoint": endpoint} if endpoint else {}
    if account:
        config["account_name"] = account
    store = AzureStore(container, config=config, **_client(endpoint, DEFAULT_ATTEMPTS))  # type: ignore[arg-type]
    return Service(
        store, store, container, path, DEFAULT_ATTEMPTS, endpoint or "Azure", f"account {account!r}",
        AZURE_HINT, "check AZURE_STORAGE_ENDPOINT",
        f"az storage container create --name {container}",
    )  # fmt: skip


def _client(endpoint: str | None, attempts: int) -> Mapping[str, Any]:
    """Deadlines and repeats: a request may stall to its deadline twice and still be repeated."""
    timeout_s = request_timeout_s()
    return {
        "client_options": {
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
            "connect_timeout": timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S)),
            "timeout": timedelta(seconds=timeout_s),
        },
        "retry_config": {
            "max_retries": attempts - 1,
            "retry_timeout": timedelta(seconds=REPEAT_WITHIN_TIMEOUTS * timeout_s),
            "backoff": {
                # each pause is drawn between this and twice the last: 8 attempts outlast at least 3.5 s
                "init_backoff": timedelta(milliseconds=500),
                "max_backoff": timedelta(seconds=10),
                "base": 2,
            },
        },
    }


def _endpoint(*variables: str) -> str | None:
    """Return the URL of a server that the first variable which is set names."""
    for variable in variables:
        endpoint = os.environ.get(variable)
        if endpoint:
            if not re.match(r"https?://[^/]", endpoint) or not urlsplit(endpoint).hostname:
                raise UserError(
                    f"{variable} is {endpoint!r}, no URL of a server",
                    hint=f"export {variable}=http://HOST:PORT, or unset it for the vendor's own",
                )
            return endpoint
    return None


def _number(variable: str, default: float, *, least: float) -> float:
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        raise UserError(f"{variable}={text!r} is not a number", hint=f"unset {variable}") from None
    if not least <= value <= MAX_NUMBER:
        raise UserError(f"{variable}={text!r} is not from {least:g} to {MAX_NUMBER:,}", hint=f"unset {variable}")
    return value
