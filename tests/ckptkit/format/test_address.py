"""Addresses: a step URL names its run and step, anything else is a run."""

import pytest

from ckptkit.format.address import split_address


@pytest.mark.parametrize(
    ("url", "run", "step"),
    [
        ("s3://bucket/run/step-000000100", "s3://bucket/run", 100),
        ("s3://bucket/run/step-000000100/", "s3://bucket/run", 100),
        ("s3://bucket/run", "s3://bucket/run", None),
        ("/data/run/step-000000007", "/data/run", 7),
        ("/step-000000007", "/", 7),
        ("step-000000007", ".", 7),
        ("run", "run", None),
        ("run/step-7", "run/step-7", None),
        ("run/step-000000100/attempt", "run/step-000000100/attempt", None),
    ],
)
def test_split_address(url: str, run: str, step: int | None) -> None:
    assert split_address(url) == (run, step)
