"""A run made small: its options and cuts stay, and what changed is listed."""

from collections.abc import Iterator
from typing import get_args, get_origin, get_type_hints

import pytest

from threefold.errors import UserError
from threefold.options import FlagText, leaves
from trainer.config import Config
from trainer.config.resolve import cuts_tokens, gathers_keys, kv_replicas, layout_of
from trainer.config.walk import load_config
from trainer.verify.shrink import shrunk

VALID = {"data.valid.stores": FlagText("none", "--data.valid.stores")}
LARGE = "examples/llama-3-70b.toml"


def run_of(path: str = LARGE, **flags: str) -> Config:
    texts = {name.replace("__", "."): FlagText(text, name) for name, text in flags.items()}
    return load_config(path, {**VALID, **texts}, world_size=None)


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
    run = run_of(**flags)
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
    found = shrunk(run_of(parallel__tp="8"))
    texts = list(map(str, found.changes))
    assert "model.num_layers 80 -> 2" in texts
    assert "train.precision bf16 -> fp64" in texts
    assert not [text for text in texts if text.startswith(("parallel.tp", "parallel.schedule", "optim.clip"))]


def test_many_ranks_are_shortened_from_dp_on() -> None:
    run = run_of(parallel__tp="8", parallel__pp="8", parallel__dp="64", train__global_batch_size="1024")
    assert str(layout_of(shrunk(run).config)) == "tp8-dp2-pp4"
    assert str(layout_of(shrunk(run, max_ranks=256).config)) == "tp8-dp4-pp8"
    with pytest.raises(UserError, match="too few for each axis"):
        shrunk(run, max_ranks=4)


def values_of(kind: object, default: object) -> Iterator[str]:
    """Other values of an option, as texts."""
    if kind is bool:
        yield "false" if default else "true"
    elif get_origin(kind) is not None and all(isinstance(each, str | int) for each in get_args(kind)):
        yield from (str(value) for value in get_args(kind) if value != default)


def test_every_choice_of_an_option_has_a_small_run() -> None:
    tried = []
    for leaf in leaves(Config):
        table, _, key = leaf.name.partition(".")
        kind = get_type_hints(type(getattr(Config(), table))).get(key)
        for text in values_of(kind, getattr(getattr(Config(), table), key, None)):
            try:
                run = run_of("examples/tiny.toml", **{leaf.name: text})
            except UserError:
                continue  # it needs another option
            shrunk(run)
            tried.append(leaf.name)
    assert len(set(tried)) > 30
