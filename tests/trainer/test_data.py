"""A token that the vocabulary does not hold is named, with its store and sample, before a device reads it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from datakit import Blend, write_store
from tests.trainer.support.training import call, last_step
from trainer.data import token_fault

BAD = 70  # of a vocabulary of 61


def spoilt_store(path: Path) -> Path:
    """A store whose manifest promises fewer tokens than it holds."""
    documents = [np.arange(60)] * 120
    documents[110] = np.array([*range(20), BAD, *range(20)])
    manifest = write_store(path, documents, vocab_size=BAD + 1).manifest
    replace(manifest, tokenizer=replace(manifest.tokenizer, vocab_size=61)).write(path)
    return path


@pytest.mark.parametrize("what", ["tokens", "labels"])
@pytest.mark.parametrize("bad", [61, -1])
def test_the_first_bad_token_is_found_wherever_it_is(tmp_path: Path, what: str, bad: int) -> None:
    store = write_store(tmp_path / "store", [np.arange(60)] * 20, vocab_size=61)
    blend, samples = Blend([(store, 1.0)], seq_length=8), np.arange(4, 8).reshape(2, 2)
    host = blend.batch(samples.ravel()).reshaped(2, 2, 8, first_sample=4, epochs=())
    assert token_fault(host, samples, blend, 61) is None
    getattr(host, what)[1, 0, 7] = bad
    fault = token_fault(host, samples, blend, 61)
    assert fault is not None
    start = int(blend.addresses([6])[1][0])
    place = start + 7 + (what == "labels")
    assert f"{store.path} holds token {bad} at address {place:,}, in sample 6 of the stream" in fault.message
    assert fault.hint == f"datakit inspect {store.path} --sample {start // 8} --seq-length 8"


def test_a_run_ends_before_the_step_that_would_read_it(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = spoilt_store(tmp_path / "store")
    flags = [
        "--data.stores",
        store,
        "--train-steps",
        100,
        "--save",
        tmp_path / "run",
        "--metrics",
        tmp_path / "m.jsonl",
    ]
    assert call("train", job_config, *flags) == 2
    message = capsys.readouterr().err
    assert f"error: {store} holds token {BAD} at address 6,620, in sample " in message
    assert "the vocabulary has 61 tokens\nhint: datakit inspect" in message
    assert last_step(tmp_path / "m.jsonl") < 100
    flags = ["--data.valid.stores", store, "--data.valid.num-samples", 500, "--train.eval-interval", 1]
    assert call("train", job_config, *flags, "--train-steps", 1) == 2
    assert f"error: {store} holds token {BAD} at address 6,620" in capsys.readouterr().err
