"""The first configuration: its loss falls within its first steps, and its comment says what it is."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from datakit import Recipe, preprocess, train_tokenizer
from tests.datakit.conftest import write_jsonl
from tests.trainer.support.training import call

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.toml"


def test_its_comment_has_its_numbers() -> None:
    text = TINY.read_text()
    config = tomllib.loads(text)
    train, model = config["train"], config["model"]
    num_tokens = train["train_steps"] * train["global_batch_size"] * train["seq_length"]
    assert f"{train['train_steps']} steps of {train['global_batch_size']} rows of {train['seq_length']} tokens" in text
    assert f"{num_tokens / 1e3:.0f} thousand tokens" in text
    assert f"{2 * model['hidden_size']} more" in text
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"{model['num_layers']} layers of {model['hidden_size']}, {train['train_steps']} steps", readme)


@pytest.mark.ci
@pytest.mark.slow
def test_its_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = sorted((ROOT / "datakit").rglob("*.py"))[:60]
    write_jsonl(tmp_path / "a.jsonl", [path.read_text() for path in sources])
    train_tokenizer(["a.jsonl"], "tok.json", vocab_size=600)
    preprocess(["a.jsonl"], "store", Recipe("tok.json", append_eod=True, split=(0.8, 0.2)), num_workers=1)
    flags = ["--train-steps", 16, "--metrics", "m.jsonl"]
    assert call("train", TINY, *flags) == 0
    lines = [json.loads(line) for line in Path("m.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "event" not in line]
    assert losses[-1] < 0.9 * losses[0]
    assert any(line.get("event") == "eval" for line in lines)
