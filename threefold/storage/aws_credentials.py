"""AwsCredentials: what botocore finds in the files of AWS: profiles, SSO, roles, and programs that print credentials.

The environment's own keys, roles of containers and machines, and requests without a signature are left to obstore. Who
asks is any thread of obstore's client; botocore has credentials renewed by itself shortly before they expire.
"""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from threefold.errors import UserError, quoted
from threefold.packages import needed_for

# with these in the environment obstore finds credentials, or does without
BY_OBSTORE = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
DEFAULT_REGION = "us-east-1"
FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
OF_FILES = ("shared-credentials-file", "config-file")  # botocore's providers of keys that are in a file
_OF_THE_MACHINE = ("container-role", "iam-role")  # providers that ask a server which may not be there
States = list[tuple[int, int] | None]  # of the files of AWS


class AwsCredentials:
    """Credentials of a profile; safe to ask from several threads. `fault` is what the last request for them met."""

    def __init__(self, url: str, credentials: Any, profile: str, region: str | None, files: States) -> None:
        """Take what botocore found, and the state of the files before it looked."""
        self.url, self.profile, self.region, self.fault = url, profile, region, ""
        self._found, self._files = credentials, files

    @property
    def may_be_new(self) -> bool:
        """Whether a look at the files may find others: keys that are in a file are as they were while that is."""
        return self._found.method not in OF_FILES or _state_of_files() != self._files

    @classmethod
    def find(cls, url: str) -> "AwsCredentials | None":
        """Return what the files have, None if that is nothing or the environment goes before; UserError if unusable."""
        profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or ""
        is_there = any(Path(os.environ.get(name) or path).expanduser().is_file() for name, path in FILES.items())
        if any(os.environ.get(name) for name in BY_OBSTORE) or not (profile or is_there):
            return None
        with needed_for(url):
            from botocore.exceptions import BotoCoreError
            from botocore.session import Session
        session, files = Session(), _state_of_files()  # before: a file may be replaced while it is read
        try:
            region = session.get_config_variable("region")
            # of STS; botocore itself reads no AWS_REGION, and without any region asks no server
            session.set_config_variable("region", os.environ.get("AWS_REGION") or region or DEFAULT_REGION)
            resolver = session.get_component("credential_provider")
            for name in _OF_THE_MACHINE:
                resolver.remove(name)
            found = session.get_credentials()
        except BotoCoreError as error:
            raise UserError(f"cannot open {url}: {error}", hint=_hint(profile)) from error
        if found is None and profile:
            raise UserError(f"cannot open {url}: the profile {profile!r} has no credentials", hint=_hint(profile))
        return None if found is None else cls(url, found, profile or "default", region, files)

    def __call__(self) -> Mapping[str, Any]:
        """Return credentials as obstore takes them, with when they expire; an exception where there are none."""
        try:
            frozen = self._found.get_frozen_credentials()
        except Exception as error:  # botocore's and the system's; a role that is refused is of neither
            self.fault = f"the credentials of the profile {self.profile!r} cannot be had: {error}"
            raise
        self.fault = ""
        expires: datetime | None = getattr(self._found, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires and expires.astimezone(UTC),  # obstore takes no other zone
        }

    @property
    def hint(self) -> str:
        """What to do if they are refused."""
        return _hint(self.profile)


def _state_of_files() -> States:
    """Return size and time of change of each file, None of one that is not there."""
    states: States = []
    for name, path in FILES.items():
        try:
            status = Path(os.environ.get(name) or path).expanduser().stat()
        except OSError:
            states.append(None)
        else:
            states.append((status.st_size, status.st_mtime_ns))
    return states


def _hint(profile: str) -> str:
    name = f" --profile {quoted(profile)}" if profile else ""
    return f"aws sso login{name}, or aws configure{name}, or export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..."
