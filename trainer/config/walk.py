"""From TOML and flags to a checked Config: the walker of `threefold.options`, then what holds between fields.

The order of precedence is defaults, then the file, then flags. Each field is the dotted flag `--table.field`; some have
short ones. All faults are reported at once.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from glob import escape, glob
from typing import Any

from ckptkit import HfFolder, open_source, parse_tiers
from threefold import options
from threefold.errors import CheckFailed, UserError, quoted
from threefold.flags import Settings
from threefold.needs import effective
from threefold.options import Fault, FlagText, leaves, merge, raise_faults, walk
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.config.foreign.derived import complete
from trainer.config.foreign.translate import answers
from trainer.config.resolve import ranks_a_sample, resolve, shared_urls

SAMPLE = "examples/gpt-small.toml"
HINT = f"{SAMPLE} documents every key; so does: trainer train --help"


def load_config(path: str | None, overrides: Settings | None = None, *, world_size: int | None = 1) -> Config:
    """Return the checked configuration of a run on `world_size` ranks; None means as many as its layout asks for.

    Sizes that were left at 0 are filled in, but vocab_size: the token stores know it. Where a checkpoint is gone on
    from, or loaded, `[model]` begins as its model. Raises one UserError that lists all faults.
    """
    own = read_toml(path) if path else {}
    tables, written = with_model(own, overrides or {}), names_in(own)
    return config_from(tables, overrides, source=path or "flags", world_size=world_size, written=written)


def with_model(tables: dict[str, Any], overrides: Settings) -> dict[str, Any]:
    """Return the tables with the model of the checkpoint that the run goes on from, or else of the one that it loads.

    Keys that the tables set themselves stay.
    """
    saving, own_model = tables.get("checkpoint", {}), tables.get("model", {})
    if not isinstance(saving, Mapping) or not isinstance(own_model, Mapping):
        return tables
    saves, load = (overrides.get(f"checkpoint.{name}", saving.get(name)) for name in ("save", "load"))
    urls = texts_of(load)
    with suppress(UserError):  # of what is not well written, which the run itself reports
        urls = [*shared_urls(parse_tiers(texts_of(saves)) if texts_of(saves) else None), *urls]
    known = next((model for model in map(model_of, urls) if model is not None), {})
    return {**tables, "model": {**known, **own_model}} if known else tables


def texts_of(value: Any) -> list[str]:
    """Return the texts of an option that may be repeated, out of a file or of flags; other values are left out."""
    texts = [value.text, *value.more] if isinstance(value, FlagText) else value
    return [text for text in ([texts] if isinstance(texts, str) else texts or ()) if isinstance(text, str) and text]


def model_of(url: str) -> dict[str, Any] | None:
    """Return the table of the model in the newest sound root of a URL, None without a step."""
    source = open_source(url)
    if isinstance(source, HfFolder):
        return dict(source.root(source.resolve()).metadata["config"]["model"])
    for step in source.newest_first():
        with suppress(CheckFailed):  # the run itself reports the damage
            return recorded_model(source.root(step).metadata)
    return None


def recorded_model(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of the model in a step's metadata, which in steps of other programs may be anything."""
    config = metadata.get("config")
    model = config.get("model") if isinstance(config, Mapping) else None
    return dict(model) if isinstance(model, Mapping) else {}


def config_from(
    tables: Mapping[str, Any],
    overrides: Settings | None = None,
    *,
    source: str,
    world_size: int | None = 1,
    written: Collection[str] | None = None,
) -> Config:
    """Return the checked configuration from nested tables; see load_config.

    `written` are the names that a user wrote in the tables, by default all. What else is there was recorded; if it is
    without effect, its default takes its place.
    """
    refuse_beyond(tables.get("model"), source)
    faults: list[Fault] = []
    names = [leaf.name for leaf in leaves(Config)]
    ours, answered = answers(tables, {*names, *(name.rpartition(".")[0] for name in names)})
    faults += answered  # what keys of other programs are here
    completed = complete(ours, overrides or {}, faults, world_size or 0)
    asked_for = {*(names_in(tables) if written is None else written), *completed}
    config = effective(walk(Config, merge(ours, completed), faults), but=asked_for)
    if world_size is None:
        world_size = ranks_a_sample(config) * (config.parallel.dp or 1)
    faulty = {name for names, _ in faults for name in names}  # these hold defaults: what they imply does not count
    faults += [fault for fault in cross_faults(config, world_size) if not implied(fault, faulty)]
    raise_faults(source, faults, hint=HINT)
    return resolve(config, world_size)


def names_in(tables: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Return the dotted names of all that nested tables hold."""
    names = {prefix + name for name in tables}
    inner = (names_in(value, f"{prefix}{name}.") for name, value in tables.items() if isinstance(value, Mapping))
    return names.union(*inner)


def refuse_beyond(model: Any, source: str) -> None:
    """Raise UserError if an imported model has parts that the trainer cannot train."""
    if not isinstance(model, Mapping):
        return
    beyond = model.get("beyond", ())
    parts = list(map(str, beyond if isinstance(beyond, list | tuple) else [beyond]))
    if parts:
        text = f"{source}: the model has what the trainer cannot train yet: {', '.join(parts)}"
        raise UserError(text, hint="take a model without; ckptkit imports, reshards and exports this one")


def implied(fault: Fault, faulty: set[str]) -> bool:
    """Return whether a fault between fields rests on one, or on a whole table, that has a fault of its own."""
    return any(
        field == name or field.startswith(f"{name}.") or name.startswith(f"{field}[")
        for field in fault[0]
        for name in faulty
    )


def read_toml(path: str) -> dict[str, Any]:
    """Return the tables of a configuration file; UserError if it is missing or not TOML."""
    if os.path.isdir(path):
        flag = "--load" if glob(f"{escape(path)}/step-*") else "--data.stores"
        hint = f"start from {SAMPLE}, with {flag} {quoted(path)}"
        raise UserError(f"{path} is a folder, and a configuration is a TOML file", hint=hint)
    return options.read_toml(path, sample=SAMPLE)
