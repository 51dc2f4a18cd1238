"""Addresses: a step URL names its run and step, a word of FOREIGN another program's folder, anything else a run."""

import pytest

from ckptkit.foreign.kinds import meant
from ckptkit.format.address import FOREIGN, split_address
from threefold.errors import UserError


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
        ("./dcp:run", "./dcp:run", None),
        ("hf://owner/model", "hf://owner/model", None),
        ("run/step-000000100/attempt", "run/step-000000100/attempt", None),
    ],
)
def test_split_address(url: str, run: str, step: int | None) -> None:
    assert split_address(url) == (run, step)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_folder_of_another_program_is_not_a_run(kind: str) -> None:
    folder = meant(f"{kind}:a b")
    assert folder is not None
    assert folder.url == f"{kind}:a b"
    with pytest.raises(UserError, match=f"hint: .*ckptkit import 'a b' RUN --from {kind}"):
        split_address(f"{kind}:a b")
