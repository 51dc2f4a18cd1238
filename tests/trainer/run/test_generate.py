"""Generation continues a prompt as the model's logits say."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.trainer.support import plain_model
from tests.trainer.support.training import call
from trainer.job.ranks import Ranks
from trainer.run.generate import continue_tokens
from trainer.run.inference import TrainedModel, open_checkpoint


def successor(window: list[int]) -> torch.Tensor:
    """Logits that prefer the successor of the last token, among 10."""
    logits = torch.zeros(10)
    logits[(window[-1] + 1) % 10] = 2.0
    return logits


def test_greedy_takes_the_likeliest() -> None:
    tokens = continue_tokens(successor, [3, 4], 8, window=4, temperature=0.0, seed=0)
    assert tokens == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]


def test_no_more_than_the_window_is_read() -> None:
    lengths = []

    def logits_of(window: list[int]) -> torch.Tensor:
        lengths.append(len(window))
        return successor(window)

    continue_tokens(logits_of, [1, 2], 6, window=4, temperature=0.0, seed=0)
    assert lengths == [2, 3, 4, 4, 4, 4]


def test_sampling_follows_the_distribution_and_its_seed() -> None:
    tokens = continue_tokens(successor, [0], 4000, window=1, temperature=1.0, seed=1)
    followed = sum(b == (a + 1) % 10 for a, b in pairwise(tokens)) / 4000
    expected = float(torch.softmax(successor([0]), -1)[1])
    assert followed == pytest.approx(expected, abs=0.03)
    assert tokens == continue_tokens(successor, [0], 4000, window=1, temperature=1.0, seed=1)
    assert tokens != continue_tokens(successor, [0], 4000, window=1, temperature=1.0, seed=2)


@pytest.fixture(scope="module")
def run(job_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with a tokenizer of its vocabulary's size beside it."""
    folder = tmp_path_factory.mktemp("generate")
    assert call("train", job_config, "--train-steps", 4, "--save", folder / "run") == 0
    vocabulary = {f"w{number}": number for number in range(61)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model, "added_tokens": []}
    (folder / "tok.json").write_text(json.dumps(tokenizer))
    model["vocab"] = vocabulary | {"w61": 61}
    (folder / "large.json").write_text(json.dumps(tokenizer))
    return folder


def test_the_command_prints_prompt_and_continuation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [run / "run", "--prompt", "w1 w2 w3", "--data.tokenizer", run / "tok.json", "--tokens", 40]
    texts = []
    for flags in ([], ["--temperature", 1, "--seed", 5], ["--temperature", 1, "--seed", 5], []):
        assert call("generate", *arguments, *flags) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("w1 w2 w3 ") and len(text.split()) == 43 for text in texts)
    assert texts[0] == texts[3] != texts[1] == texts[2]


def test_a_window_cuts_rows_that_are_longer_than_those_of_training(job_config: Path, tmp_path: Path) -> None:
    """As where the last rows of a mixture were longer: what the configuration plans says nothing of them."""
    flags = ["--model.window", 8, "--model.window-every", 2, "--train.seq-length", 4]
    assert call("train", job_config, "--train-steps", 1, "--save", tmp_path / "run", *flags) == 0
    checkpoint = replace(open_checkpoint(str(tmp_path / "run"), None, {}, world_size=1), window=16)
    assert checkpoint.config.train.seq_length == 4
    tokens = torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(0))
    with Ranks("cpu", timeout_s=60) as ranks:
        engine = TrainedModel(checkpoint, ranks).engine
        logits = engine.logits(tokens)
        windows = [block.attention.window for block in engine.chunks[0].blocks]
        names = engine.choices.names
        state = {name: value.detach().double() for name, value in engine.store.values()}
    assert windows == [8, None, 8]
    assert names == {"attention": "sdpa-cpu", "attention-window-8": "reference"}
    model, positions = engine.config.model, torch.arange(16).unsqueeze(0)
    expected, full = (
        plain_model.logits(each, state, tokens, positions, lambda x, **place: x)[:, -1, :61]
        for each in (model, replace(model, window=0))
    )
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    assert (expected - full).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "no tokenizer to read the prompt with"),
        (["--data.tokenizer", "large.json"], "has 62 tokens, the model 61"),
        (["--data.tokenizer", "tok.json", "--tokens", 0], "--tokens must be at least 1, got 0"),
        (["--data.tokenizer", "tok.json", "--temperature", -1], "at least 0, got -1"),
        (["--data.tokenizer", "tok.json", "--prompt", ""], "the prompt holds no token"),
    ],
)
def test_what_cannot_be_generated(
    run: Path, flags: list, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    assert call("generate", "run", "--prompt", "w1", *flags) == 2
    assert expected in capsys.readouterr().err
