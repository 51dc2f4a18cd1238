"""Every choice of every option of a run, one at a time, that needs no other option."""

from collections.abc import Iterator
from typing import get_args, get_origin, get_type_hints

from threefold.errors import UserError
from threefold.options import FlagText, leaves
from trainer.config import Config
from trainer.config.walk import load_config

VALID = {"data.valid.stores": FlagText("none", "--data.valid.stores")}


def run_of(path: str, **flags: str) -> Config:
    """A run of a file with flags over it, named as model__num_layers; it has stores that validate."""
    texts = {name.replace("__", "."): FlagText(text, name) for name, text in flags.items()}
    return load_config(path, {**VALID, **texts}, world_size=None)


def choices_of_options(path: str, **flags: str) -> Iterator[tuple[str, Config]]:
    """The run of a file with one option at another of its choices, by the option's name; most need no other option."""
    for leaf in leaves(Config):
        table, _, key = leaf.name.partition(".")
        kind = get_type_hints(type(getattr(Config(), table))).get(key)
        for text in values_of(kind, getattr(getattr(Config(), table), key, None)):
            try:
                run = run_of(path, **{**flags, leaf.name: text})
            except UserError:
                continue  # it needs another option
            yield leaf.name, run


def values_of(kind: object, default: object) -> Iterator[str]:
    """Other values of an option, as texts."""
    if kind is bool:
        yield "false" if default else "true"
    elif get_origin(kind) is not None and all(isinstance(choice, str | int) for choice in get_args(kind)):
        yield from (str(value) for value in get_args(kind) if value != default)
