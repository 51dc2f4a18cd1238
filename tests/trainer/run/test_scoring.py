"""Ends of rows are scored as the whole model says, in any batch and on any layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.support.decoding import PROMPTS, decoding
from tests.trainer.support.parity import make_engine
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network
from trainer.run.scoring import MOST_TOKENS, Score, ScoredRow, Scorer
from trainer.verify.threads import run_threads

ROWS = [ScoredRow([*prompt, 1, 2, 3][-9:], 1 + number % 3) for number, prompt in enumerate(PROMPTS)] + [
    ScoredRow([5, 6], 1)
]


def scored(rank: int, config: Config, batch_size: int = 16, *, network: Network | None = None) -> list[Score]:
    return Scorer(make_engine(rank, config, network=network), batch_size=batch_size).score(ROWS)


def assert_alike(scores: list[Score], expected: list[Score], within: float) -> None:
    assert [score.is_greedy for score in scores] == [score.is_greedy for score in expected]
    assert [score.logprob for score in scores] == pytest.approx([score.logprob for score in expected], rel=within)


@pytest.mark.parametrize("name", ["llama", "windows", "gpt2"])
def test_a_row_is_scored_as_the_logits_after_each_of_its_beginnings_say(name: str) -> None:
    config = decoding(name, "tp1", "fp64")
    engine, expected = make_engine(0, config), list[Score]()
    for row in ROWS:
        total, is_greedy = 0.0, True
        for place in range(len(row.tokens) - row.num_scored, len(row.tokens)):
            logits = engine.logits(torch.tensor([row.tokens[:place]]))[0]
            total += float(torch.log_softmax(logits, -1)[row.tokens[place]])
            is_greedy = is_greedy and int(logits.argmax()) == row.tokens[place]
        expected.append(Score(total, is_greedy))
    assert_alike(scored(0, config), expected, 1e-10)
    for batch_size in (1, 2):
        assert_alike(scored(0, config, batch_size), expected, 1e-10)
    small = replace(config, train=replace(config.train, max_logits_gib=61 * 8 * 2 / 2**30))  # two tokens at once
    assert_alike(scored(0, small), expected, 1e-10)


def test_the_likeliest_continuation_is_greedy() -> None:
    config = decoding("llama", "tp1", "fp64")
    engine = make_engine(0, config)
    likeliest = int(engine.logits(torch.tensor([[7, 3, 5]]))[0].argmax())
    rows = [ScoredRow([7, 3, 5, token], 1) for token in (likeliest, (likeliest + 1) % 60)]
    assert [score.is_greedy for score in Scorer(engine).score(rows)] == [True, False]


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2-pp2"])
def test_a_layout_scores_as_one_process(layout: str) -> None:
    expected = scored(0, decoding("llama", "tp1", "fp64"))
    config = decoding("llama", layout, "fp64")
    for batch_size in (2, 16):
        runs: list[Any] = run_threads(layout_of(config).world_size, scored, config, batch_size)
        for found in runs:
            assert_alike(found, expected, 1e-10)


def test_rows_go_together_up_to_a_number_of_tokens() -> None:
    scorer = Scorer(make_engine(0, decoding("llama", "tp1", "fp64")), batch_size=3)
    rows = [ScoredRow([0] * size, 1) for size in (MOST_TOKENS + 9, 3000, 1000, 100, 2, 2, 2)]
    assert list(scorer._groups(range(7), rows)) == [[0], [1, 2], [3, 4, 5], [6]]
