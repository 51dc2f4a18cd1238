"""From TOML and flags to a checked Config: the walker of `threefold.options`, then what holds between fields.

The order of precedence is defaults, then the file, then flags. Each field is the dotted flag `--table.field`; some have
short ones. All faults are reported at once.
"""

from collections.abc import Mapping
from typing import Any

from ckptkit import HfFolder, open_source
from threefold import options
from threefold.errors import UserError
from threefold.flags import Settings
from threefold.options import Fault, merge, raise_faults, walk
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.config.resolve import resolve

SAMPLE = "examples/gpt-small.toml"
HINT = f"{SAMPLE} documents every key; so does: trainer train --help"


def load_config(path: str | None, overrides: Settings | None = None, *, world_size: int | None = 1) -> Config:
    """Return the checked configuration of a run on `world_size` ranks; None means as many as its layout asks for.

    Sizes that were left at 0 are filled in, but vocab_size: the token stores know it. Where checkpoint.load is a
    Hugging Face folder, `[model]` begins as its model. Raises one UserError that lists all faults.
    """
    tables = with_model(read_toml(path) if path else {}, overrides or {})
    return config_from(tables, overrides, source=path or "flags", world_size=world_size)


def with_model(tables: dict[str, Any], overrides: Settings) -> dict[str, Any]:
    """Return the tables with the model of the Hugging Face folder that checkpoint.load names, if it names one.

    Keys that the tables set themselves stay.
    """
    saving, given = tables.get("checkpoint"), overrides.get("checkpoint.load")
    load = given.text if given is not None else saving.get("load") if isinstance(saving, dict) else None
    source = open_source(load) if isinstance(load, str) and load else None
    model = tables.get("model", {})
    if not isinstance(source, HfFolder) or not isinstance(model, dict):
        return tables
    return {**tables, "model": {**source.root(source.resolve()).metadata["config"]["model"], **model}}


def config_from(
    tables: Mapping[str, Any], overrides: Settings | None = None, *, source: str, world_size: int | None = 1
) -> Config:
    """Return the checked configuration from nested tables; see load_config."""
    model = tables.get("model")
    if isinstance(model, Mapping) and model.get("num_experts"):
        text = f"{source}: the model has {model['num_experts']} experts, which the trainer cannot train yet"
        raise UserError(text, hint="take a dense model; ckptkit imports, reshards and exports this one")
    found: list[Fault] = []
    config = walk(Config, merge(tables, overrides or {}), found)
    if world_size is None:
        world_size = config.parallel.tp * config.parallel.pp * (config.parallel.dp or 1)
    faulty = {name for names, _ in found for name in names}  # these hold defaults: what they imply does not count
    found += [fault for fault in cross_faults(config, world_size) if not implied(fault, faulty)]
    raise_faults(source, found, hint=HINT)
    return resolve(config, world_size)


def implied(fault: Fault, faulty: set[str]) -> bool:
    """Return whether a fault between fields rests on one, or on a whole table, that has a fault of its own."""
    return any(
        field == name or field.startswith(f"{name}.") or name.startswith(f"{field}[")
        for field in fault[0]
        for name in faulty
    )


def read_toml(path: str) -> dict[str, Any]:
    """Return the tables of a configuration file; UserError if it is missing or not TOML."""
    return options.read_toml(path, sample=SAMPLE)
