"""Addresses: a step URL names its run and step, a word of FOREIGN another program's folder, anything else a run."""

from pathlib import Path

import pytest

from ckptkit.foreign.kinds import meant
from ckptkit.format.address import FOREIGN, STORE_NAMES, open_run, split_address
from ckptkit.format.keys import step_folder
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


@pytest.mark.parametrize("name", STORE_NAMES)
def test_a_run_is_begun_in_no_token_store_and_goes_on_beside_any_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="is a token store, and a run has a folder of its own"):
        open_run(str(tmp_path))
    (tmp_path / step_folder(1)).mkdir()
    (tmp_path / step_folder(1) / "root.json").write_text("{}")
    assert open_run(str(tmp_path)).url == str(tmp_path)
