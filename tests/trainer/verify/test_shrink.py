"""A run made small: its options and cuts stay, and what changed is listed."""

import pytest

from tests.trainer.support.option_walk import choices_of_options, run_of
from threefold.errors import UserError
from trainer.config.resolve import cuts_tokens, gathers_keys, kv_replicas, layout_of
from trainer.verify.shrink import shrunk

LARGE = "examples/llama-3-70b.toml"


@pytest.mark.parametrize(
    "flags",
    [
        {"parallel__tp": "8", "parallel__pp": "4", "parallel__dp": "2"},
        {"parallel__tp": "4", "model__num_kv_heads": "2"},
        {"parallel__tp": "2", "parallel__cp": "4", "parallel__zero_stage": "3", "parallel__dp": "4"},
        {"parallel__tp": "2", "parallel__cp": "8"},
        {"parallel__tp": "2", "train__seq_length": "8191"},
        {"parallel__pp": "3", "parallel__virtual_stages": "5", "parallel__schedule": "zb-h1"},
    ],
)
def test_cuts_are_those_of_the_run(flags: dict[str, str]) -> None:
    run = run_of(LARGE, **flags)
    small = shrunk(run).config
    for trait in (cuts_tokens, gathers_keys):
        assert trait(small) == trait(run)
    assert (kv_replicas(small) > 1) == (kv_replicas(run) > 1)
    assert small.parallel.schedule == run.parallel.schedule
    assert small.parallel.zero_stage == run.parallel.zero_stage
    assert layout_of(small).tp == layout_of(run).tp
    assert small.model.num_heads // small.model.num_kv_heads > 1
    assert small.model.num_layers <= 2 * layout_of(small).num_stages


def test_what_changed_is_listed_with_both_values() -> None:
    found = shrunk(run_of(LARGE, parallel__tp="8"))
    texts = list(map(str, found.changes))
    assert "model.num_layers 80 -> 2" in texts
    assert "train.precision bf16 -> fp64" in texts
    assert not [text for text in texts if text.startswith(("parallel.tp", "parallel.schedule", "optim.clip"))]


def test_many_ranks_are_shortened_from_dp_on() -> None:
    run = run_of(LARGE, parallel__tp="8", parallel__pp="8", parallel__dp="64", train__global_batch_size="1024")
    assert str(layout_of(shrunk(run).config)) == "tp8-dp2-pp4"
    assert str(layout_of(shrunk(run, max_ranks=256).config)) == "tp8-dp4-pp8"
    with pytest.raises(UserError, match="too few for each axis"):
        shrunk(run, max_ranks=4)


def test_every_choice_of_an_option_has_a_small_run() -> None:
    tried = []
    for name, run in choices_of_options("examples/tiny.toml"):
        shrunk(run)
        tried.append(name)
    assert len(set(tried)) > 30
