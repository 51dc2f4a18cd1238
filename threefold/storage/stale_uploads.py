"""Multipart uploads that a killed process left behind: invisible to listings, and paid for until they are aborted.

S3 keeps them for ever, Google Cloud Storage until a lifecycle rule removes them; Azure drops them after a week.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from threefold.errors import StorageError
from threefold.masking import shown_cause
from threefold.packages import needed_for
from threefold.storage.contract import Storage
from threefold.storage.service import CONNECT_TIMEOUT_S, request_timeout_s, s3_endpoint, s3_region, split_url

SAFE_AGE_S = 24 * 3600.0  # no single upload lasts so long


def abort_stale_uploads(
    storage: Storage, prefix: str = "", older_than_s: float = SAFE_AGE_S,
    *, is_wanted: Callable[[str], bool] = lambda key: True, dry_run: bool = False,
) -> list[str]:  # fmt: skip
    """Abort the unfinished uploads of wanted keys that start with prefix and began longer ago; return their keys.

    Nothing is done if a storage is not on S3. StorageError if the server refuses or does not answer.
    """
    if not storage.url.startswith("s3://"):
        return []
    with needed_for("listing unfinished uploads"):
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.session import get_session
    bucket, path = split_url(storage.url)
    base = f"{path}/" if path else ""
    try:
        client = get_session().create_client(
            "s3", endpoint_url=s3_endpoint(), region_name=s3_region(),
            config=Config(
                connect_timeout=CONNECT_TIMEOUT_S, read_timeout=request_timeout_s(), retries={"max_attempts": 1}
            ),
        )  # fmt: skip
        found = _stale(client, bucket, base + prefix, time.time() - older_than_s)
        stale = [(key, upload) for key, upload in found if is_wanted(key.removeprefix(base))]
        for key, upload in stale if not dry_run else ():
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)
    except (BotoCoreError, ClientError, ValueError) as error:  # the last: of an endpoint that it cannot read
        raise StorageError(f"cannot abort unfinished uploads of {storage.url}: {error}") from shown_cause(error)
    return [key.removeprefix(base) for key, _ in stale]


def _stale(client: Any, bucket: str, prefix: str, began_before_s: float) -> Iterator[tuple[str, str]]:
    """Full key and upload id of each upload to abort."""
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
        for upload in page.get("Uploads", []):
            # not every server heeds the prefix
            if upload["Key"].startswith(prefix) and upload["Initiated"].timestamp() <= began_before_s:
                yield upload["Key"], upload["UploadId"]
