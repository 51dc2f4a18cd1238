"""The soft cap of logits of a folder: read, written back, and lost by no export."""

from pathlib import Path
from typing import Any

import pytest

from ckptkit.foreign.hf.folder import HfFolder
from tests.ckptkit.foreign.hf.test_experts import export
from tests.ckptkit.support.hf_folders import write_folder
from threefold.errors import UserError

CAPS: list[tuple[str, dict[str, Any], float | None]] = [
    ("gemma2", {}, 30.0),
    ("gemma2", {"final_logit_softcapping": 12.5}, 12.5),
    ("gemma2", {"final_logit_softcapping": None}, None),
    ("gemma3_text", {}, None),
    ("gemma3_text", {"final_logit_softcapping": 7}, 7.0),
    ("llama", {"final_logit_softcapping": 30.0}, None),  # which it does not read
]


@pytest.mark.parametrize(("model_type", "changes", "cap"), CAPS)
def test_a_soft_cap_of_logits_is_known(
    tmp_path: Path, model_type: str, changes: dict[str, Any], cap: float | None
) -> None:
    write_folder(tmp_path / "model", model_type, **changes)
    assert HfFolder(str(tmp_path / "model")).root(0).metadata["config"]["model"].get("logit_softcap") == cap


def test_another_cap_is_another_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_folder(model, "gemma2", final_logit_softcapping=12.5)
    assert export(model, tmp_path / "same", like=model)["final_logit_softcapping"] == 12.5
    with pytest.raises(UserError, match=r"logit_softcap: 30.0, config.json says 12.5"):
        export(model, tmp_path / "other", like=model, logit_softcap=30.0)


def test_what_an_older_release_imported_is_exported(tmp_path: Path) -> None:
    """It recorded the cap as a phrase."""
    model = tmp_path / "model"
    write_folder(model, "gemma2", final_logit_softcapping=12.5)
    beyond = list(HfFolder(str(model)).root(0).metadata["config"]["model"]["beyond"])
    beyond.insert(-1, "a soft cap of logits (12.5)")
    old = {"logit_softcap": None, "beyond": beyond}
    assert export(model, tmp_path / "same", like=model, **old)["final_logit_softcapping"] == 12.5
    old["beyond"] = [phrase.replace("12.5", "?") for phrase in beyond]
    assert export(model, tmp_path / "unread", like=model, **old), "a record that says nothing is not compared"
    old["beyond"] = [phrase.replace("12.5", "30.0") for phrase in beyond]
    with pytest.raises(UserError, match=r"logit_softcap: 30.0, config.json says 12.5"):
        export(model, tmp_path / "other", like=model, **old)


def test_a_run_with_a_cap_is_of_no_family_by_itself(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "llama")
    with pytest.raises(UserError, match=r"no known family of Hugging Face has such a model: .*logit_softcap 12.5"):
        export(tmp_path / "model", tmp_path / "made", logit_softcap=12.5)
