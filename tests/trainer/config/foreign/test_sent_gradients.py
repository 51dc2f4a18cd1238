"""Keys of DeepSpeed's files for gradients and weights that travel in fewer bits."""

import json
from pathlib import Path

import pytest

from tests.trainer.config.foreign.test_translate import parsed, refused


@pytest.mark.parametrize(("is_on", "how"), [(True, "int8"), (False, "wide")])
def test_quantized_gradients_are_int8(is_on: bool, how: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_quantized_gradients": is_on}}))
    assert parsed("--deepspeed_config", str(path), "run.toml")[1].parallel.grad_reduce == how


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "--parallel.grad-reduce int8"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "weights travel in the precision of the model"),
        ({"communication_data_type": "int4"}, "--parallel.grad-reduce is wide, bf16 or int8"),
    ],
)
def test_what_is_not_here_is_refused(
    tables: dict[str, object], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(tables))
    assert text in refused(capsys, "run.toml", "--deepspeed", str(tmp_path / "ds.json"))[0]
