"""`trainer explain`: its tables, its JSON and its page, what it refuses, and that it takes every option."""

import json
from pathlib import Path

import pytest

from tests.support.printed import printed
from tests.trainer.support.option_walk import choices_of_options
from trainer.cli import main
from trainer.config.resolve import layout_of
from trainer.plan.explained import explained

Capture = pytest.CaptureFixture[str]
SMALL = ["explain", "examples/gpt-small.toml", "--model.num-layers", "2", "--global-batch-size", "32"]


def test_a_layout_is_explained(tmp_path: Path, capsys: Capture) -> None:
    data, page = tmp_path / "known.json", tmp_path / "known.html"
    words = [*SMALL, "--layout", "tp2-pp2-dp2", "--rank", "5", "--json", str(data), "--html", str(page)]
    code, out, err = printed(main, words, capsys)
    assert code == 0, err
    assert "no store says the vocabulary's size: 32,768 is assumed" in err
    known = json.loads(data.read_text())
    assert [(row["rank"], row["tp"], row["dp"], row["pp"]) for row in known["ranks"]][5] == (5, 1, 0, 1)
    head = next(row for row in known["tensors"] if row["tensor"] == "head.weight")
    assert (head["held"], head["holders"]) == ("[16384:32768, 0:768]", "dp")
    assert {row["group"]: row["ranks"] for row in known["groups"]}["tp"] == [4, 5]
    sends = [row for row in known["transfers"] if row["kind"] == "send" and row["pp"] == 0]
    assert [(row["group"], row["reason"], row["calls"]) for row in sends] == [("activations", "between stages", 4)]
    assert "[16384:32768, 0:768]" in page.read_text()
    assert "sums of gradients" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "one of CONFIG.toml, RUN and --from-megatron COMMAND is explained"),
        ([*SMALL[1:], "--layout", "tp5"], "is not a multiple of parallel.tp 5"),
        ([*SMALL[1:], "--layout", "tp2", "--rank", "2"], "--rank 2: tp2 has ranks 0 to 1"),
        ([*SMALL[1:], "--html", "{}/nowhere/page.html"], "the folder"),
    ],
)
def test_what_cannot_be_explained_is_one_line(words: list[str], text: str, tmp_path: Path, capsys: Capture) -> None:
    code, out, err = printed(main, ["explain", *(word.format(tmp_path) for word in words)], capsys)
    assert (code, out) == (2, "")
    assert text in err


@pytest.mark.slow
@pytest.mark.ci
def test_a_command_of_megatron_is_explained(capsys: Capture) -> None:
    command = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
        "--max-position-embeddings 64 --global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 512"
    )
    words = ["explain", "--from-megatron", command, "--layout", "tp2-dp2", "--json", "-"]
    code, out, err = printed(main, words, capsys)
    assert code == 0, err
    assert json.loads(out)["layout"] == "tp2-dp2"


@pytest.mark.slow
@pytest.mark.ci
def test_every_choice_of_an_option_is_explained() -> None:
    flags = {"parallel__tp": "2", "parallel__pp": "2", "parallel__dp": "2", "train__micro_batch_size": "2"}
    tried = []
    for name, run in choices_of_options(
        "examples/gpt-small.toml", model__num_layers="2", model__vocab_size="512", **flags
    ):
        known = explained(run, name, layout_of(run).world_size - 1)
        assert known["transfers"], name
        tried.append(name)
    assert len(set(tried)) > 30
